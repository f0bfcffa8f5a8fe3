"""If a database, disk, journal, clock or follower fails, others continue, and nothing is lost or done twice."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import socket
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest
from services import ROWS, Served, served, wait_for

from alto.service.coordinator import coordinator as coordinating
from alto.service.coordinator import projection
from alto.service.savings import Savings
from alto.service.store import store as storing
from alto.service.store.jobs import add_event, find_job, lock_job
from alto.service.store.tables import JobRow
from benchmarks.service.plane import simulated_plane
from benchmarks.service.simulated_cluster import SimulatedCluster


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The file that runs wait for in their middle."""
    return tmp_path / "go"


@pytest.fixture
def service(tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(storing, "BUSY_S", 5.0)  # shorter than in use, longer than a busy machine stalls
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


def test_changes_of_a_job_are_lines_of_the_log(tmp_path: Path, gate: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "alto.service")
    plane = simulated_plane(tmp_path, lambda: SimulatedCluster(duration_s=0.1, waits_for=gate))
    with served(tmp_path, open_plane=plane) as first:
        client = first.client()
        job = create(first, client)
        wait_for(lambda: status(client, job) == "running")
    with served(tmp_path, open_plane=plane) as second:
        client = second.client()
        wait_for(lambda: any(line.endswith("continues") for line in caplog.messages))
        for change in (client.fine_tuning.jobs.pause, client.fine_tuning.jobs.resume, client.fine_tuning.jobs.cancel):
            change(job)
    words = [line.rpartition(" ")[2] for line in caplog.messages if job in line]
    begin, end = ["queued", "running", "continues", "paused", "queued"], ["cancelled"]
    assert words in (begin + end, [*begin, "running", *end])


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
    assert status(client, running) == "running", "requests that only read are answered"
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
    assert not {"task_resumed", "task_interrupted"} & set(events), "its executor continued meanwhile"


def test_the_repetition_of_a_request_that_the_database_refused_creates_an_object_of_its_own(service: Served) -> None:
    client = service.client()
    file = service.upload(client)
    create = partial(client.fine_tuning.jobs.create, model="alto-tiny", training_file=file)
    older, retry = create().id, {"x-stainless-retry-count": "1"}
    with contextlib.closing(sqlite3.connect(service.service.settings.root / "alto.db", isolation_level=None)) as lock:
        lock.execute("BEGIN IMMEDIATE")
        for headers in ({}, retry):
            with pytest.raises(openai.InternalServerError) as found:
                create(extra_headers=headers)
            assert found.value.status_code == 503
    created = create(extra_headers=retry).id
    assert created != older
    assert create(extra_headers=retry).id == created


def test_the_repetition_of_an_upload_that_a_full_disk_refused_creates_a_file_of_its_own(
    service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, retry = service.client(), {"x-stainless-retry-count": "1"}
    create = partial(client.files.create, file=("rows.jsonl", ROWS), purpose="fine-tune")
    older = create().id
    with monkeypatch.context() as patch:
        patch.setattr(service.service.artefacts._fs, "mv", fail)
        with pytest.raises(openai.InternalServerError):
            create()
    created = create(extra_headers=retry).id
    assert created != older
    assert create(extra_headers=retry).id == created


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
        assert status(client, first) in ("queued", "running"), "it is postponed"
        messages = [event.message for event in client.fine_tuning.jobs.list_events(first, limit=100)]
        assert messages.count("The service cannot read or write the job's files; it tries again") == 1
        assert httpx2.get(f"{service.url}/readyz").status_code == 200, "the server is healthy"
        # While the service tries again, the metric is 0 for a moment.
        wait_for(lambda: "\nalto_tasks_put_off 1\n" in httpx2.get(f"{service.url}/metrics").text)
    check_trained_once(service, client, first)
    assert "\nalto_tasks_put_off 0\n" in httpx2.get(f"{service.url}/metrics").text


@pytest.mark.parametrize("param", ["training_file", "validation_file"])
def test_jobs_whose_stored_file_is_gone_fail_with_the_reason_and_delay_no_other(
    service: Served, gate: Path, param: str
) -> None:
    client = service.client()
    gate.touch()
    good, gone = service.upload(client), service.upload(client)
    (service.service.settings.root / "artefacts" / "files" / "default" / gone).unlink()
    files = {"training_file": good, param: gone}
    bad = [client.fine_tuning.jobs.create(model="alto-tiny", **files).id for _ in range(17)]
    check_trained_once(service, client, client.fine_tuning.jobs.create(model="alto-tiny", training_file=good).id)
    assert httpx2.get(f"{service.url}/readyz").status_code == 200
    for job in bad:
        found = service.finished(client, job)
        assert (found.status, found.error.code, found.error.param) == ("failed", "file_content_missing", param)
        assert f"expected the content of {gone}, found that it is gone" in found.error.message


def test_jobs_that_are_put_off_leave_their_place_to_new_ones(
    service: Served, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, artefacts = service.client(), service.service.artefacts
    gate.touch()
    good, bad = service.upload(client), service.upload(client)
    fetch, tried = artefacts.fetch, Counter[str]()

    def refuse_a_file(name: str, to: Path) -> None:
        tried[name.rpartition("/")[2]] += 1
        if name.endswith(bad):
            fail()
        fetch(name, to)

    with monkeypatch.context() as patch:
        patch.setattr(artefacts, "fetch", refuse_a_file)
        patch.setattr(coordinating, "_RETRY_S", 1000.0)
        waiting = [client.fine_tuning.jobs.create(model="alto-tiny", training_file=bad).id for _ in range(17)]
        check_trained_once(service, client, client.fine_tuning.jobs.create(model="alto-tiny", training_file=good).id)
        assert httpx2.get(f"{service.url}/readyz").status_code == 200
        assert {status(client, job) for job in waiting} == {"validating_files"}
        wait_for(lambda: tried[bad] == 17)
        assert service.coordinator is not None
        for _ in range(3):
            service.service.work.set()
            time.sleep(0.3)
        assert tried[bad] == 17, "none is tried before its time"
        service.coordinator._put_off = dict.fromkeys(waiting, 0.0)
    for job in waiting:
        check_trained_once(service, client, job)


def test_a_job_that_is_put_off_again_waits_longer_each_time(service: Served) -> None:
    client, coordinator = service.client(), service.coordinator
    assert coordinator is not None
    row, pauses = row_of(service, create(service, client)), []
    for _ in range(15):
        began = time.monotonic()
        coordinator._delay(row, OSError(errno.EIO, "Input/output error"))
        pauses.append(round((coordinator._put_off[row.id] - began) / 0.1))
    assert pauses[:4] == [1, 2, 4, 8]
    assert pauses[-1] == 3000


def test_results_that_cannot_be_kept_take_no_place_of_jobs_that_wait(
    service: Served, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are twice as many jobs as its four GPUs, which is what the control plane gets at a time."""
    client, artefacts = service.client(), service.service.artefacts
    gate.touch()
    write = artefacts.write_folder

    def refuse_a_seed(name: str, folder: Path) -> None:
        if row_of(service, name.rpartition("/")[2]).seed == 13:
            fail()
        write(name, folder)

    with monkeypatch.context() as patch:
        patch.setattr(artefacts, "write_folder", refuse_a_seed)
        patch.setattr(coordinating, "_RETRY_S", 1000.0)
        file = service.upload(client)
        create_refused = partial(client.fine_tuning.jobs.create, model="alto-tiny", training_file=file, seed=13)
        refused = [create_refused().id for _ in range(8)]
        wait_for(lambda: service.coordinator is not None and service.coordinator.num_put_off == 8)
        check_trained_once(service, client, create(service, client))
        assert service.coordinator is not None
        service.coordinator._put_off = dict.fromkeys(refused, 0.0)
    for job in refused:
        check_trained_once(service, client, job)


def test_a_store_that_is_not_mounted_fails_no_job(service: Served, gate: Path) -> None:
    client, files = service.client(), service.service.settings.root / "artefacts" / "files"
    gate.touch()
    file = service.upload(client)
    files.rename(files.with_name("unmounted"))
    job = client.fine_tuning.jobs.create(model="alto-tiny", training_file=file).id
    wait_for(lambda: service.coordinator is not None and service.coordinator.num_put_off == 1)
    assert status(client, job) == "validating_files"
    files.with_name("unmounted").rename(files)
    check_trained_once(service, client, job)


def test_a_file_of_a_run_that_is_gone_fails_its_job_with_the_reason(
    service: Served, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = service.client()

    def lose(name: str, folder: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(folder / "adapter_model.safetensors"))

    monkeypatch.setattr(service.service.artefacts, "write_folder", lose)
    gate.touch()
    found = service.finished(client, create(service, client))
    assert (found.status, found.error.code) == ("failed", "missing_file")
    assert "found that adapter_model.safetensors is gone" in found.error.message
    assert str(service.service.settings.root) not in found.error.message
    assert httpx2.get(f"{service.url}/readyz").status_code == 200


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


def test_a_slow_follower_delays_no_other_and_misses_nothing(service: Served) -> None:
    """More events than the buffers of a connection hold, and a follower that does not read them for a while."""
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
        # The server has met the full buffers, and answers others as before.
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
    # The first events arrived with the head of the answer.
    assert numbers == list(range(numbers[0], num_events + 1))
    assert numbers[0] <= begin + 3


def test_the_result_does_not_mention_early_exit_if_nothing_was_saved(
    service: Served, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = service.client()
    gate.touch()

    def message() -> str:
        job = create(service, client)
        assert service.finished(client, job).status == "succeeded"
        found = client.fine_tuning.jobs.list_events(job, limit=100).data
        return next(event.message for event in found if event.message.startswith("Best of"))

    assert message().endswith("; early exit saved 40% of the training")
    nothing = Savings(samples=0, share=0.0, time_s=None, device_h=None)
    monkeypatch.setattr(projection, "savings_of", lambda *_: nothing)
    assert message() == "Best of 2 configurations: job-000, validation loss 1.2500"
