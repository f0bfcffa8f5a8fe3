"""What the dashboard shows of tasks that were paused, have failed, or whose results are gone; and errors as pages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from html_pages import Page
from services import Served, served, wait_for
from sqlalchemy.exc import OperationalError

from alto.records import ExitReason
from alto.runs import RunHistory
from alto.runs.job_history import JobHistory, Stage
from alto.service.coordinator import projection
from alto.service.savings import savings_of
from alto.service.store import Store
from alto.service.store.jobs import lock_job
from benchmarks.service.plane import simulated_plane
from benchmarks.service.simulated_cluster import SimulatedCluster

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Runs wait in their middle for this file."""
    return tmp_path / "go"


@pytest.fixture
def service(tmp_path: Path, gate: Path) -> Iterator[Served]:
    root = tmp_path / "service"
    plane = simulated_plane(root, lambda: SimulatedCluster(duration_s=0.1, waits_for=gate))
    with served(root, open_plane=plane) as found:
        yield found


def running(service: Served, client: openai.OpenAI) -> str:
    """A task in the middle of its run."""
    job = client.fine_tuning.jobs.create(model="alto-tiny", training_file=service.upload(client)).id
    wait_for(lambda: client.fine_tuning.jobs.retrieve(job).status == "running")
    wait_for(lambda: sum(event.type == "metrics" for event in client.fine_tuning.jobs.list_events(job, limit=100)) >= 4)
    return job


def shown(service: Served, path: str) -> str:
    answer = httpx2.get(f"{service.url}{path}")
    assert answer.status_code == 200
    return answer.text


def test_a_paused_task_is_paused_on_the_cluster_page_and_there_once(service: Served, gate: Path) -> None:
    client = service.client()
    job = running(service, client)
    client.fine_tuning.jobs.pause(job)
    assert service.coordinator is not None
    coordinator = service.coordinator
    wait_for(lambda: job not in coordinator._live)

    def lines() -> list[str]:
        table = re.search(r'<table class="queue">.*?</table>', shown(service, "/cluster"), re.DOTALL)
        assert table is not None
        return re.findall(r"<tr>.*?</tr>", table[0], re.DOTALL)[1:]

    (line,) = lines()
    assert ">paused<" in line
    assert f'href="/tasks/{job}" title="{job}"' in line
    assert f">{job[:14]}…</a>" in line, "ids are short"
    gate.touch()
    client.fine_tuning.jobs.resume(job)
    assert service.finished(client, job).status == "succeeded"
    wait_for(lambda: ">finished<" in lines()[0])
    assert len(lines()) == 1


def test_time_goes_on_for_a_task_that_runs(service: Served) -> None:
    running(service, service.client())
    control = service.service.settings.root / "control"
    (journal,) = control.glob("*/journal.jsonl")
    before = journal.read_bytes()

    def cluster() -> tuple[float, float, str]:
        actual = json.loads(shown(service, "/api/cluster"))["actual"][0]["duration_s"]
        found = json.loads(shown(service, "/dashboard/cluster"))
        (bar,) = (trace["x"][0] for trace in found["gantt"]["traces"] if trace["meta"]["kind"] == "actual")
        return actual, bar, re.findall(r'<td class="number">([^<]*)</td>', found["fragments"]["queue"])[-1]

    first = cluster()
    wait_for(lambda: all(now != then for now, then in zip(cluster(), first, strict=True)))
    assert cluster()[0] > first[0]
    assert journal.read_bytes() == before, "though nothing was written"


def test_a_failed_task_trains_nothing_any_more(service: Served) -> None:
    job = running(service, service.client())
    figures = json.loads(shown(service, f"/dashboard/tasks/{job}"))["figures"]
    assert "training (" in json.dumps(figures["validation"])
    with service.service.store.writing() as session:
        row = lock_job(session, job)
        assert row is not None
        row.status = "failed"
    now = json.loads(shown(service, f"/dashboard/tasks/{job}"))
    assert "training (" not in json.dumps(now["figures"])
    assert "failed (" in json.dumps(now["figures"]["validation"])
    assert 'data-role="diverging"></i>failed' in now["fragments"]["heading"], "the colour that alarms"
    assert "saved by early exit;" not in now["fragments"]["numbers"]


def test_results_that_were_deleted_have_no_links(service: Served, gate: Path) -> None:
    gate.touch()
    client = service.client()
    job = client.fine_tuning.jobs.create(model="alto-tiny", training_file=service.upload(client)).id
    done = service.finished(client, job)
    links = (f"/v1/files/{done.result_files[0]}/content", "/adapter")
    page = shown(service, f"/tasks/{job}")
    assert all(link in page for link in links)
    client.files.delete(done.result_files[0])
    client.models.delete(done.fine_tuned_model)
    page = shown(service, f"/tasks/{job}")
    assert not any(link in page for link in links)
    assert f"/api/tasks/{job}/report" in page


def ended(job: str, reason: ExitReason, position: int) -> JobHistory:
    return JobHistory(
        job=job,
        position=position,
        samples_budgeted=100,
        samples_at_end=40,
        stage=Stage.EXITED,
        exit_reason=reason,
    )


def test_only_rules_save() -> None:
    history = RunHistory()
    reasons = (ExitReason.UNDERPERFORMING, ExitReason.STOPPED, ExitReason.FAILED)
    history.jobs = {reason: ended(reason, reason, number) for number, reason in enumerate(reasons)}
    found = savings_of(history, "succeeded")
    assert (found.samples, found.share) == (60, pytest.approx(0.2))
    assert savings_of(history, "failed").samples == 0


def test_events_tell_users_from_rules() -> None:
    assert projection._ended("job-001", "stopped") == "Configuration job-001 was stopped by a user"
    assert projection._ended("job-001", "overfitting") == "Configuration job-001 stopped early: overfitting"


def test_unknown_addresses_are_pages_for_browsers(tmp_path: Path) -> None:
    with served(tmp_path) as service:
        for path in ("/nowhere", "/api/nowhere", "/api/tasks/none"):
            answer = httpx2.get(f"{service.url}{path}", headers=BROWSER)
            assert answer.status_code == 404
            assert "There is no such page" in Page(answer.text).text
            assert "Content-Security-Policy" in answer.headers
            assert httpx2.get(f"{service.url}{path}").json()["error"]["type"] == "not_found_error"


def test_a_database_that_is_gone_is_a_page_for_browsers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Store) -> None:
        raise OperationalError("SELECT 1", {}, Exception("gone"))

    with served(tmp_path) as service:
        monkeypatch.setattr(Store, "reading", fail)
        answer = httpx2.get(f"{service.url}/", headers=BROWSER)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
        assert "This page cannot be shown now" in Page(answer.text).text
        assert httpx2.get(f"{service.url}/api/tasks").json()["error"]["code"] == "database_unavailable"
