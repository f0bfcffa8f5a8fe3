"""Drafts of requests: the expected time, and the rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from services import ROWS, Served, served, wait_for

from alto.engine.estimates import UNKNOWN_DURATION_S
from alto.errors import DataError
from alto.records import DataPreview
from alto.runs import RunDir, load_run_task
from alto.service import context
from alto.service.access import create_key
from alto.service.context import Previews
from alto.service.coordinator.coordinator import remember_duration
from alto.service.errors import ApiError
from alto.service.store.jobs import find_job
from alto.spec import Task
from benchmarks.service.plane import simulated_plane
from benchmarks.service.simulated_cluster import SimulatedCluster

FIXED = {"learning_rate": 1e-4, "r": 8}


@pytest.fixture
def site(keeping_site: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A service whose tests decide themselves which durations of tasks are kept."""
    monkeypatch.setattr("alto.service.coordinator.coordinator.remember_duration", lambda *_: None)
    return keeping_site


@pytest.fixture
def keeping_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))
    with served(tmp_path, open_plane=simulated_plane(tmp_path, SimulatedCluster)) as found:
        wait_for(lambda: found.coordinator is not None and found.coordinator.plane is not None)
        yield found


def body(site: Served, content: bytes = ROWS, **own: Any) -> dict[str, Any]:
    file = site.upload(site.client(), content)
    return {"model": "alto-tiny", "training_file": file, "hyperparameters": FIXED, **own}


def drafted(site: Served, request: dict[str, Any]) -> dict[str, Any]:
    answer = httpx2.post(f"{site.url}/api/drafts", json=request, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def trained(site: Served, request: dict[str, Any]) -> str:
    client = site.client()
    job = client.fine_tuning.jobs.create(**request)
    assert site.finished(client, job.id).status == "succeeded"
    return job.id


def note_end(site: Served, job: str, duration_s: float | None = None) -> list[float]:
    """Remember a finished task's duration, or ``duration_s``; return what was remembered."""
    assert site.coordinator is not None
    assert site.coordinator.plane is not None
    plane: Any = site.coordinator.plane
    kept = []

    def remember(task: Task, found_s: float) -> None:
        kept.append(found_s)
        plane._setup.remember_duration(task, plane._cluster, found_s if duration_s is None else duration_s)

    with site.service.store.reading() as session:
        row = find_job(session, "default", job)
    remember_duration(site.service, row, remember)
    return kept


def test_a_draft_of_what_was_trained_before_has_its_time(site: Served) -> None:
    request = body(site)
    job = trained(site, request)
    run = RunDir(site.service.settings.root / "runs" / "default" / job)
    resolved = load_run_task(run, trust_remote_code=False).replace(max_slots=16, max_tokens_per_pass=4096)
    run.task_file.write_text(resolved.to_yaml())  # as executors do
    assert note_end(site, job, 7200.0)[0] > 0
    assert drafted(site, request)["estimate"] == {"duration_s": 7200.0, "device_hours": 2.0}
    assert drafted(site, body(site))["estimate"] is not None, "another file of the same content"
    for other in (
        body(site, ROWS + ROWS.splitlines(keepends=True)[0]),
        {**request, "hyperparameters": {**FIXED, "n_epochs": 2}},
        {**request, "validation_file": request["training_file"]},
        {**request, "method": {"type": "supervised", "supervised": {"hyperparameters": {"learning_rate": 2e-4}}},
         "hyperparameters": None},
    ):  # fmt: skip
        assert drafted(site, other)["estimate"] is None


def test_a_model_that_cannot_be_loaded_is_named_and_not_the_rows(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    with served(tmp_path / "data", models={"broken": str(tmp_path / "broken")}) as found:
        answer = httpx2.post(f"{found.url}/api/drafts", json={**body(found), "model": "broken"}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "model", "invalid_model")
    assert error["message"].startswith("model: expected")


def test_a_draft_does_not_tell_what_another_tenant_has_trained(keeping_site: Served, tokenised: list[Task]) -> None:
    with keeping_site.service.store.writing() as session:
        clients = [keeping_site.client(create_key(session, tenant)[1]) for tenant in ("a", "b")]
    first, second = [
        {"model": "alto-tiny", "training_file": keeping_site.upload(client), "hyperparameters": FIXED}
        for client in clients
    ]

    def estimate(client: openai.OpenAI, request: dict[str, Any]) -> object:
        found = client.post("../api/drafts", body=request, cast_to=object)
        assert isinstance(found, dict)
        return found["estimate"]

    job = clients[0].fine_tuning.jobs.create(**first)
    assert keeping_site.finished(clients[0], job.id).status == "succeeded"
    wait_for(lambda: estimate(clients[0], first) is not None)
    assert estimate(clients[1], second) is None
    assert {task.tenant for task in tokenised} == {"a", "b"}, "nor does the time that a draft takes"


def test_the_service_keeps_what_its_tasks_take(keeping_site: Served) -> None:
    request = body(keeping_site)
    assert drafted(keeping_site, request)["estimate"] is None
    trained(keeping_site, request)
    wait_for(lambda: drafted(keeping_site, request)["estimate"] is not None)
    assert 0 < drafted(keeping_site, request)["estimate"]["duration_s"] < 60


def test_a_task_with_configurations_that_were_stopped_by_hand_is_no_measure(site: Served) -> None:
    job = trained(site, body(site))
    journal = site.service.settings.root / "runs" / "default" / job / "journal.jsonl"
    assert '"underperforming"' in journal.read_text()
    journal.write_text(journal.read_text().replace('"underperforming"', '"stopped"'))
    assert not note_end(site, job)


def test_a_run_that_cannot_be_read_is_no_error(site: Served) -> None:
    job = trained(site, body(site))
    RunDir(site.service.settings.root / "runs" / "default" / job).task_file.write_text("{")
    assert not note_end(site, job)


def test_only_what_was_measured_is_shown_as_planned(site: Served) -> None:
    request = body(site)
    job = trained(site, request)
    cluster = httpx2.get(f"{site.url}/api/cluster").json()
    assert (cluster["planned"], len(cluster["actual"])) == ([], 1)
    page = httpx2.get(f"{site.url}/cluster").text
    assert "not measured" in page
    assert "1 h" not in page
    note_end(site, job, 7200.0)
    trained(site, request)
    cluster = httpx2.get(f"{site.url}/api/cluster").json()
    assert [place["duration_s"] for place in cluster["planned"]] == [7200.0]
    assert "2 h" in httpx2.get(f"{site.url}/cluster").text
    assert UNKNOWN_DURATION_S == 3600


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    found = []
    made = context.preview_data

    def noted(task: Task, *, num_rows: int) -> DataPreview:
        found.append(task)
        return made(task, num_rows=num_rows)

    monkeypatch.setattr(context, "preview_data", noted)
    return found


def test_rows_are_tokenised_again_only_where_that_could_change_them(site: Served, tokenised: list[Task]) -> None:
    request = body(site)
    first = drafted(site, request)["rows"]
    assert first["counts"]["train_rows"] > 30
    same = [
        {**request, "hyperparameters": {"learning_rate": [1e-3, 1e-4], "r": 4, "n_epochs": 3}},
        {**request, "suffix": "other"},
        body(site),
    ]
    for other in same:
        assert drafted(site, other)["rows"]["examples"] == first["examples"]
    assert len(tokenised) == 1
    different = [
        {**request, "hyperparameters": {**FIXED, "max_length": 99}},
        {**request, "hyperparameters": {**FIXED, "train_on": "all"}},
        {**request, "seed": 3},
        {**request, "validation_file": request["training_file"]},
        body(site, ROWS[: len(ROWS) // 2].rpartition(b"\n")[0] + b"\n"),
    ]
    for number, other in enumerate(different, 2):
        drafted(site, other)
        assert len(tokenised) == number, other


def test_notes_are_those_of_the_settings_that_are_asked_now(site: Served, tokenised: list[Task]) -> None:
    plain = drafted(site, body(site))["rows"]["notes"]
    large = drafted(site, body(site, hyperparameters={**FIXED, "r": 512}))["rows"]["notes"]
    assert len(tokenised) == 1
    assert plain != large
    assert drafted(site, body(site))["rows"]["notes"] == plain


def test_few_drafts_read_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    at_work, most, go = [0], [0], threading.Event()

    def slow(task: Task, *, num_rows: int) -> DataPreview:
        at_work[0] += 1
        most[0] = max(most[0], at_work[0])
        go.wait(60)
        at_work[0] -= 1
        raise DataError("none")

    monkeypatch.setattr(context, "preview_data", slow)
    shown = Previews()
    task = Task(model="alto-tiny", dataset="rows.jsonl", search_space={"learning_rate": [1e-4]})
    ends: list[Exception] = []

    def ask(number: int) -> None:
        try:
            shown.preview(task, [str(number)], num_rows=1)
        except Exception as error:
            ends.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    wait_for(lambda: shown._num_open == len(threads))
    with pytest.raises(ApiError) as caught:
        shown.preview(task, ["one more"], num_rows=1)
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "5")
    go.set()
    for thread in threads:
        thread.join()
    assert most[0] == 2
    assert [type(error) for error in ends] == [DataError] * len(threads)
    with pytest.raises(DataError):
        shown.preview(task, ["one more"], num_rows=1)
