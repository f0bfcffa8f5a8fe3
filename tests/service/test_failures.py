"""Where a database, disk, journal, clock or follower fails, others go on, and nothing is lost or done twice."""

from __future__ import annotations

import errno
import json
import socket
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest
from services import Served, served, wait_for

from alto.service.coordinator import coordinator as coordinating
from alto.service.store import store as storing
from alto.service.store.events import add_event
from alto.service.store.jobs import find_job, lock_job
from alto.service.store.tables import JobRow
from benchmarks.service.plane import simulated_plane
from benchmarks.service.simulated_cluster import SimulatedCluster


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Runs wait in their middle for this file."""
    return tmp_path / "go"


@pytest.fixture
def service(tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(storing, "BUSY_S", 0.2)
    monkeypatch.setattr(coordinating, "_RETRY_S", 0.1)
    monkeypatch.setattr(coordinating, "LEASE_S", 1000.0)  # however busy the machine is
    root = tmp_path / "service"
    plane = simulated_plane(root, lambda: SimulatedCluster(duration_s=0.1, waits_for=gate))
    with served(root, open_plane=plane) as found:
        yield found


def create(service: Served, client: openai.OpenAI) -> str:
    return client.fine_tuning.jobs.create(model="alto-tiny", training_file=service.upload(client)).id


def status(client: openai.OpenAI, job: str) -> str:
    return client.fine_tuning.jobs.retrieve(job).status


def check_trained_once(service: Served, client: openai.OpenAI, job: str) -> None:
    assert service.finished(client, job).status == "succeeded"
    journal = service.service.settings.root / "runs" / "default" / job / "journal.jsonl"
    events = [json.loads(line)["event"] for line in journal.read_text().splitlines()]
    assert events.count("task_completed") == 1
    found = client.fine_tuning.jobs.list_events(job, limit=100).data
    assert sum(event.message == "The job has successfully completed" for event in found) == 1
    assert sum(event.type == "metrics" for event in found) == 8


def test_a_locked_database_is_503_and_nothing_is_lost(service: Served, gate: Path) -> None:
    client = service.client()
    running = create(service, client)
    wait_for(lambda: status(client, running) == "running")
    file = service.upload(client)
    lock = sqlite3.connect(service.service.settings.root / "alto.db", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    with pytest.raises(openai.InternalServerError, match="nothing was changed, try again") as found:
        client.fine_tuning.jobs.create(model="alto-tiny", training_file=file)
    assert found.value.status_code == 503
    assert found.value.response.headers["retry-after"] == "2"
    assert status(client, running) == "running", "what only reads is answered"
    wait_for(lambda: service.coordinator is not None and service.coordinator.failure is not None)
    assert httpx2.get(f"{service.url}/readyz").status_code == 503
    time.sleep(2.0)  # some turns of the coordinator
    lock.close()
    wait_for(lambda: httpx2.get(f"{service.url}/readyz").status_code == 200)
    gate.touch()
    later = client.fine_tuning.jobs.create(model="alto-tiny", training_file=file).id
    for job in (running, later):
        check_trained_once(service, client, job)
    assert {job.id for job in client.fine_tuning.jobs.list()} == {running, later}
    journal = service.service.run_of(row_of(service, running)) / "journal.jsonl"
    events = [json.loads(line)["event"] for line in journal.read_text().splitlines()]
    assert not {"task_resumed", "task_interrupted"} & set(events), "its executor went on meanwhile"


def test_a_database_that_is_silent_for_long_has_executors_save(
    service: Served, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinating, "LEASE_S", 0.0)
    client = service.client()
    job = create(service, client)
    wait_for(lambda: status(client, job) == "running")
    journal = service.service.run_of(row_of(service, job)) / "journal.jsonl"
    lock = sqlite3.connect(service.service.settings.root / "alto.db", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    wait_for(lambda: '"task_interrupted"' in journal.read_text())
    lock.close()
    gate.touch()
    check_trained_once(service, client, job)
    assert '"task_resumed"' in journal.read_text()


def row_of(service: Served, job: str) -> JobRow:
    with service.service.store.reading() as session:
        return find_job(session, "default", job)


def test_a_full_disk_refuses_uploads_and_keeps_nothing_of_them(
    service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, artefacts = service.client(), service.service.artefacts
    with monkeypatch.context() as patch:
        patch.setattr(artefacts._fs, "mv", fail)
        with pytest.raises(openai.InternalServerError, match="full or gone; try again") as found:
            service.upload(client)
    assert found.value.status_code == 503
    assert client.files.list().data == []
    assert [path for path in (service.service.settings.root / "artefacts").rglob("*") if path.is_file()] == []
    service.upload(client)
    assert len(client.files.list().data) == 1


def fail(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_result_that_cannot_be_kept_is_kept_later_and_others_go_on(
    service: Served, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, artefacts = service.client(), service.service.artefacts
    first = create(service, client)
    write = artefacts.write_folder

    def refuse_the_first(name: str, folder: Path) -> None:
        if name.endswith(first):
            fail()
        write(name, folder)

    with monkeypatch.context() as patch:
        patch.setattr(artefacts, "write_folder", refuse_the_first)
        gate.touch()
        check_trained_once(service, client, create(service, client))
        assert status(client, first) == "running", "it is put off"
        messages = [event.message for event in client.fine_tuning.jobs.list_events(first, limit=100)]
        assert messages.count("The service cannot read or write the job's files; it tries again") == 1
        assert httpx2.get(f"{service.url}/readyz").status_code == 503
    check_trained_once(service, client, first)
    wait_for(lambda: httpx2.get(f"{service.url}/readyz").status_code == 200)


def test_a_damaged_journal_fails_its_job_alone(service: Served, gate: Path) -> None:
    client = service.client()
    bad, good = create(service, client), create(service, client)
    wait_for(lambda: {status(client, job) for job in (bad, good)} == {"running"})
    journal = service.service.settings.root / "runs" / "default" / bad / "journal.jsonl"
    with journal.open("a") as file:
        file.write(json.dumps({"event": "task_completed", "time": 1.0, "seq": 1000}) + "\n")
    found = service.finished(client, bad)
    assert (found.status, found.error.code) == ("failed", "cannot_run")
    assert str(service.service.settings.root) not in found.error.message
    gate.touch()
    check_trained_once(service, client, good)


def test_an_unexpected_error_fails_its_job_alone(service: Served, gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, make = service.client(), coordinating.make_run
    gate.touch()
    file = service.upload(client)

    def refuse_a_seed(service: Any, job: Any) -> None:
        if job.seed == 13:
            raise KeyError("a fault of the code")
        make(service, job)

    monkeypatch.setattr(coordinating, "make_run", refuse_a_seed)
    bad = client.fine_tuning.jobs.create(model="alto-tiny", training_file=file, seed=13).id
    good = client.fine_tuning.jobs.create(model="alto-tiny", training_file=file, seed=14).id
    found = service.finished(client, bad)
    assert (found.status, found.error.code) == ("failed", "internal_error")
    assert "a fault of the code" not in found.error.message
    check_trained_once(service, client, good)


@pytest.mark.parametrize("jump_s", [3.15e7, -3.15e7], ids=["forwards", "backwards"])
def test_a_clock_that_jumps_changes_nothing_but_times(
    service: Served, gate: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    client, true = service.client(), time.time
    job = create(service, client)
    wait_for(lambda: status(client, job) == "running")
    monkeypatch.setattr(time, "time", lambda: true() + jump_s)
    gate.touch()
    check_trained_once(service, client, job)
    check_trained_once(service, client, create(service, client))


def test_a_slow_follower_delays_nobody_and_misses_nothing(service: Served) -> None:
    """More events than the buffers of a connection hold, and a follower who does not read them for a while."""
    client, num = service.client(), 4000
    job = create(service, client)
    wait_for(lambda: status(client, job) == "running")
    with service.service.store.writing() as session:
        row = lock_job(session, job)
        assert row is not None
        begin = row.num_events
        for number in range(num):
            add_event(session, row, f"{number} " + "x" * 1900)
    address = urlsplit(service.url)
    with socket.create_connection((address.hostname, address.port)) as slow:
        request = f"GET /api/tasks/{job}/events?since={begin + 1} HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n"
        slow.sendall(request.encode())
        wait_for(lambda: b"200 OK" in slow.recv(4096))
        # The server has met the full buffers; others are answered as before.
        assert create(service, client) != job
        assert len(client.fine_tuning.jobs.list_events(job, limit=100).data) == 100
        client.fine_tuning.jobs.cancel(job)
        numbers = []
        with slow.makefile("rb") as file:
            for line in file:
                if line.startswith(b"id: "):
                    numbers.append(int(line[4:]))
                if line == b"event: end\n":
                    break
    with service.service.store.reading() as session:
        num_events = find_job(session, "default", job).num_events
    # The first events went by with the head of the answer.
    assert numbers == list(range(numbers[0], num_events + 1))
    assert numbers[0] <= begin + 3
