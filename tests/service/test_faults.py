"""Accepted jobs are trained once, whatever process dies."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import openai
import pytest
from budgets import kills
from postgres import new_database
from run_service import ContainedService, ServiceProcess, skip_without_namespaces
from services import ROWS, wait_for
from sqlalchemy import select

from alto.service.settings import ServiceSettings
from alto.service.store import Store
from alto.service.store.jobs import ENDED
from alto.service.store.tables import FileRow, JobEvent, JobRow, LeaderRow, ModelRow

pytestmark = pytest.mark.slow("campaigns")

NUM_TASKS = 20


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def check_once(root: Path, jobs: list[str], database: str | None = None) -> None:
    """Check that every job has succeeded, once, and that nothing else exists."""
    store = Store(ServiceSettings(data_dir=str(root), database=database).database_url)
    with store.reading() as session:
        rows = {row.id: row for row in session.query(JobRow)}
        models = Counter(row.job for row in session.query(ModelRow))
        results = Counter(row.filename for row in session.query(FileRow) if row.purpose == "fine-tune-results")
        events = list(session.query(JobEvent).order_by(JobEvent.job, JobEvent.number))
    store.close()
    assert set(rows) == set(jobs), "a job was lost or duplicated"
    assert {row.status for row in rows.values()} == {"succeeded"}
    assert models == Counter(jobs)
    assert results == Counter(f"{job}-results.csv" for job in jobs)
    for job in jobs:
        journal = (root / "runs" / "default" / job / "journal.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in journal]
        assert sum(entry["event"] == "task_completed" for entry in entries) == 1, "trained once"
        trained = [(entry["job"], entry["step"]) for entry in entries if entry["event"] == "eval"]
        assert len(trained) == len(set(trained)) == 8, "two executors have trained it"
        own = [event for event in events if event.job == job]
        assert [event.number for event in own] == list(range(1, len(own) + 1))
        reported = [(event.data["job"], event.data["step"]) for event in own if event.data and "step" in event.data]
        assert len(reported) == len(set(reported)) == 8
        ends = [event.message for event in own if "successfully completed" in event.message]
        assert len(ends) == 1


def submit(client: openai.OpenAI, file: str, jobs: list[str]) -> None:
    for number in range(NUM_TASKS):
        jobs.append(client.fine_tuning.jobs.create(model="alto-tiny", training_file=file, seed=number).id)
        time.sleep(0.05)


def test_a_server_that_is_killed_again_and_again_loses_no_task(tmp_path: Path) -> None:
    source, jobs = random.Random(1), list[str]()
    server = ServiceProcess(tmp_path, free_port(), lease_s=0.5)
    server.start()
    # It repeats requests by itself, as for users; on a busy machine a server is often killed before it answers.
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=1000, timeout=20)
    file = client.files.create(file=("rows.jsonl", ROWS), purpose="fine-tune").id
    submitting = threading.Thread(target=submit, args=(client, file, jobs))
    submitting.start()
    for _ in range(kills(50)):
        time.sleep(source.uniform(0.0, 1.0))
        server.kill()
        server.start()
    submitting.join()
    wait_for(lambda: all(client.fine_tuning.jobs.retrieve(job).status in ENDED for job in jobs))
    server.kill()
    check_once(tmp_path, jobs)


def test_a_leader_that_stands_still_is_followed_and_fenced(tmp_path: Path) -> None:
    """Two servers share a database: the second takes over while the first is paused. The tasks that the first had
    started cannot write any more when it continues."""
    gate = tmp_path / "go"
    first = ServiceProcess(tmp_path, free_port(), waits_for=gate)
    second = ServiceProcess(tmp_path, free_port(), waits_for=gate)
    with first.running():
        client = openai.OpenAI(base_url=f"{first.url}/v1", api_key="none")
        file = client.files.create(file=("rows.jsonl", ROWS), purpose="fine-tune").id
        job = client.fine_tuning.jobs.create(model="alto-tiny", training_file=file).id
        wait_for(lambda: client.fine_tuning.jobs.retrieve(job).status == "running")
        with second.running():
            other = openai.OpenAI(base_url=f"{second.url}/v1", api_key="none")
            assert other.fine_tuning.jobs.retrieve(job).status == "running", "it answers, and does not lead"
            first.pause()
            lease = tmp_path / "runs" / "default" / job / "lease"
            wait_for(lambda: lease.read_text().strip() == "2")
            gate.touch()
            first.go_on()
            wait_for(lambda: other.fine_tuning.jobs.retrieve(job).status in ENDED)
            check_once(tmp_path, [job])


def test_two_servers_in_two_pid_namespaces_lose_nothing_when_their_leaders_are_killed(
    tmp_path: Path, postgres: Path
) -> None:
    """This is as in two containers: both servers have the process id 1 and the same hostname, and see nothing of each
    other but the database and the data folder."""
    skip_without_namespaces()
    source, jobs = random.Random(2), list[str]()
    database = new_database(postgres)
    servers = [ContainedService(tmp_path, free_port(), database=database, lease_s=5.0) for _ in range(2)]
    for server in servers:
        server.start()
        wait_for(server.answers)
    wait_for(lambda: any(server.leads() for server in servers))
    clients = [openai.OpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=1000, timeout=20) for it in servers]
    file = clients[0].files.create(file=("rows.jsonl", ROWS), purpose="fine-tune").id
    num_kills, leaders = kills(20), list[int]()

    def create(number: int) -> None:
        created = clients[number % 2].fine_tuning.jobs.create(model="alto-tiny", training_file=file, seed=number)
        jobs.append(created.id)

    try:
        for kill in range(num_kills):
            for number in range(2):
                create(2 * kill + number)
            time.sleep(source.uniform(0.0, 1.0))
            wait_for(lambda: any(server.leads() for server in servers))
            leaders.append(next(number for number, server in enumerate(servers) if server.leads()))
            servers[leaders[-1]].kill()
            servers[leaders[-1]].start()
            wait_for(servers[leaders[-1]].answers)
        wait_for(lambda: all(clients[0].fine_tuning.jobs.retrieve(job).status in ENDED for job in jobs))
        store = Store(database)
        with store.reading() as session:
            epoch = session.scalars(select(LeaderRow.epoch)).one()
        store.close()
        # A leader may be late on a busy machine; servers that took turns would be at hundreds.
        assert epoch <= 2 * (1 + num_kills), "leadership was taken from a live leader"
    finally:
        for server in servers:
            server.kill()
    assert set(leaders) == {0, 1}
    check_once(tmp_path, jobs, database)
