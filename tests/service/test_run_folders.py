"""Run folders and histories of a service: moved to another place, kept, and cleared once their jobs have ended."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from services import Served, served, wait_for

from alto.runs import RunDir, read_history
from alto.runs.run_dir import load_run_task
from alto.service import context
from alto.service.access import Caller
from alto.service.api.tasks import list_
from alto.service.coordinator import coordinator as coordinating
from alto.service.coordinator.run_folders import clear_ended_runs
from alto.service.store.jobs import find_job
from alto.service.store.tables import JobRow
from benchmarks.service.plane import simulated_plane
from benchmarks.service.simulated_cluster import SimulatedCluster


def create(service: Served, client: openai.OpenAI) -> str:
    return client.fine_tuning.jobs.create(model="alto-tiny", training_file=service.upload(client)).id


def test_a_data_folder_that_was_moved_goes_on(tmp_path: Path) -> None:
    old, new, gate = tmp_path / "old", tmp_path / "new", tmp_path / "go"
    with served(old, open_plane=simulated_plane(old, lambda: SimulatedCluster(waits_for=gate))) as service:
        job = create(service, client := service.client())
        wait_for(lambda: client.fine_tuning.jobs.retrieve(job).status == "running")
    old.rename(new)
    gate.touch()
    with served(new, open_plane=simulated_plane(new, SimulatedCluster)) as service:
        assert service.finished(service.client(), job).status == "succeeded"
        run = RunDir.open(new / "runs" / "default" / job)
        task = load_run_task(run, trust_remote_code=True)
        assert Path(str(task.dataset)) == run.root / "data" / "training.jsonl"


def test_rows_and_checkpoints_of_ended_jobs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinating, "_HOUSEKEEPING_S", 0.0)
    gate = tmp_path / "go"
    root = tmp_path / "service"
    with served(root, open_plane=simulated_plane(root, lambda: SimulatedCluster(duration_s=0.1, waits_for=gate))) as it:
        client = it.client()
        job = create(it, client)
        folder = root / "runs" / "default" / job
        wait_for(lambda: client.fine_tuning.jobs.retrieve(job).status == "running")
        (folder / "jobs" / "job-000" / "last").mkdir(parents=True)
        time.sleep(0.5)
        assert (folder / "data" / "training.jsonl").exists(), "a job that runs keeps its rows"
        gate.touch()
        model = it.finished(client, job).fine_tuned_model
        wait_for(lambda: not (folder / "data").exists())
        assert {path.name for path in folder.iterdir()} == {"task.yaml", "journal.jsonl", "best", "lease", "run.lock"}
        assert httpx2.get(f"{it.url}/api/tasks/{job}/report").status_code == 200
        assert len(httpx2.get(f"{it.url}/api/tasks/{job}").json()["jobs"]) == 2
        client.models.delete(model)
        assert not (folder / "best").exists()
        assert httpx2.get(f"{it.url}/api/tasks/{job}/report").status_code == 200


def test_files_that_cannot_be_removed_stop_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinating, "_HOUSEKEEPING_S", 0.0)
    tries = []

    def refuse(*_: object) -> None:
        tries.append(1)
        raise PermissionError("not removable")

    monkeypatch.setattr(coordinating, "clear_ended_runs", refuse)
    gate = tmp_path / "go"
    plane = simulated_plane(tmp_path, lambda: SimulatedCluster(duration_s=0.1, waits_for=gate))
    with served(tmp_path, open_plane=plane) as service:
        job = create(service, client := service.client())
        wait_for(lambda: client.fine_tuning.jobs.retrieve(job).status == "running" and len(tries) > 3)
        gate.touch()
        assert service.finished(client, job).status == "succeeded"
        journal = (tmp_path / "runs" / "default" / job / "journal.jsonl").read_text()
        assert "task_resumed" not in journal, "its executor continued"


def test_what_an_executor_may_still_write_is_not_removed(tmp_path: Path) -> None:
    with served(tmp_path, open_plane=simulated_plane(tmp_path, lambda: SimulatedCluster(duration_s=0.1))) as service:
        job = create(service, client := service.client())
        service.finished(client, job)
        rows = tmp_path / "runs" / "default" / job / "data"
        clear_ended_runs(service.service, {job})
        assert rows.exists()
        clear_ended_runs(service.service, ())
        assert not rows.exists()


def test_the_expected_end_follows_the_pace_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in the middle of seconds of work is not expected to take an hour."""
    monkeypatch.setattr(coordinating, "_FORECAST_S", 0.0)
    gate = tmp_path / "go"
    plane = simulated_plane(tmp_path, lambda: SimulatedCluster(duration_s=0.1, waits_for=gate))
    with served(tmp_path, open_plane=plane) as service:
        client = service.client()
        job = create(service, client)

        def expected() -> int | None:
            with service.service.store.reading() as session:
                return find_job(session, "default", job).estimated_finish

        wait_for(lambda: expected() is not None)
        found = expected()
        assert found is not None
        assert found < time.time() + 600
        gate.touch()
        assert service.finished(client, job).estimated_finish is None


CALLER = Caller(tenant="t", scopes=frozenset({"read"}))


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The runs whose journals were folded, in order."""
    found: list[Path] = []

    def counted(run: Path) -> Any:
        found.append(run)
        return read_history(run)

    monkeypatch.setattr(context, "read_history", counted)
    return found


def test_a_page_of_many_tasks_folds_only_journals_that_have_changed(tmp_path, write_run, small_run, folded):
    journal = (write_run(small_run) / "journal.jsonl").read_bytes()
    with served(tmp_path / "data") as found:
        service = found.service
        with service.store.writing() as session:
            for number in range(100):
                row = JobRow(
                    id=f"ftjob-{number}", tenant="t", status="running", run_dir=f"t/ftjob-{number}", model="alto-tiny",
                    created_at=0, request={}, task={}, training_file="file-0", seed=1,
                )  # fmt: skip
                session.add(row)
                service.run_of(row).mkdir(parents=True)
                (service.run_of(row) / "journal.jsonl").write_bytes(journal)
        first = list_(service, CALLER, limit=100)
        assert len(first["data"]) == len(folded) == 100
        assert first["data"][0]["samples_trained"] == 1700
        assert list_(service, CALLER, limit=100) == first
        assert len(folded) == 100, "nothing has changed"
        changed = service.run_of(row) / "journal.jsonl"
        changed.write_bytes(b"".join(journal.splitlines(keepends=True)[:-1]))
        list_(service, CALLER, limit=100)
        assert folded[100:] == [changed.parent]


def test_the_history_that_was_used_least_lately_is_forgotten(tmp_path, write_run, small_run, folded, monkeypatch):
    monkeypatch.setattr(context, "_MOST_HISTORIES", 2)
    journal = (write_run(small_run) / "journal.jsonl").read_bytes()
    runs = [tmp_path / name for name in "abc"]
    for run in runs:
        run.mkdir()
        (run / "journal.jsonl").write_bytes(journal)
    known = context.Histories()
    for number in (0, 1, 0, 2, 0):
        known.read(runs[number])
    assert folded == runs
