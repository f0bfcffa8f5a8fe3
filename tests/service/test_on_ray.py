"""A service on a Ray cluster: nodes die under their tasks, the server is killed and started again, and every task has
its result once.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

pytest.importorskip("ray", reason="needs the ray extra: pip install 'alto-lora[ray]'")

from budgets import kills
from deaths import HOLD, TRAIN, plan_deaths
from journals import entries
from ray_machine import RayHead, RayMachine
from services import ROWS, wait_for

from alto.early_exit import audit
from alto.runs import QueueHistory, RunDir, read_events
from benchmarks.servers.vllm_server import free_port

pytestmark = [
    pytest.mark.slow("ray"),
    pytest.mark.filterwarnings("ignore:.*:ResourceWarning"),  # ray does not close the output of its processes
]

HALF_WAY = 5
"""The step at which executors wait for their death; every turn before it writes a checkpoint."""

LIMIT_S = 900.0
"""Far more than a busy machine needs."""

SERVER = f"""
import functools
from alto.cli import main
from alto.engine import control_plane
from alto.service.coordinator import run_folders
control_plane.TRAIN = {TRAIN!r}
run_folders.Task = functools.partial(run_folders.Task, checkpoint_interval_s=0)
main()
"""
"""``alto``, with executors of the tests and a checkpoint at every turn."""


class Server:
    """``alto serve`` on a Ray cluster; its address stays the same in all its lives."""

    def __init__(self, data: Path, cluster: str, **environment: str) -> None:
        port = free_port()
        self.url, self.data = f"http://127.0.0.1:{port}", data
        self._command = [sys.executable, "-c", SERVER, "serve", "--cluster", cluster, "--data-dir", str(data)]
        self._command += ["--port", str(port)]
        self._log = data.parent / "server.log"
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environment)
        wait_for(self.is_ready, LIMIT_S)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        with contextlib.suppress(httpx2.HTTPError):
            return bool(httpx2.get(f"{self.url}/readyz").status_code == 200)
        return False


class Tenant:
    """A tenant of a server."""

    def __init__(self, server: Server, name: str, *limits: str) -> None:
        command = ["-c", "from alto.cli import main; main()", "keys", "create", name, "--json", *limits]
        command += ["--data-dir", str(server.data)]
        made = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True)
        key = json.loads(made.stdout)["secret"]
        self.runs = server.data / "runs" / name
        self.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=20)
        self.http = httpx2.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=60)
        self._file = self.openai.files.create(file=("rows.jsonl", ROWS), purpose="fine-tune").id

    def submit(self, n_epochs: int = 3) -> SubmittedTask:
        settings: Any = {"learning_rate": 1e-3, "r": 4, "batch_size": 4, "n_epochs": n_epochs}
        method: Any = {"type": "supervised", "supervised": {"hyperparameters": settings}}
        job = self.openai.fine_tuning.jobs.create(model="alto-tiny", training_file=self._file, seed=1, method=method)
        return SubmittedTask(tenant=self, id=job.id, run=RunDir(self.runs / job.id))

    def cluster(self) -> dict[str, Any]:
        """Return the facts that the dashboard shows about the cluster."""
        found: dict[str, Any] = self.http.get("/api/cluster").raise_for_status().json()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedTask:
    """A task of a tenant, and its run folder."""

    tenant: Tenant
    id: str
    run: RunDir

    def has_succeeded(self) -> bool:
        job = self.tenant.openai.fine_tuning.jobs.retrieve(self.id)
        assert job.status not in ("failed", "cancelled"), job.error
        return job.status == "succeeded"

    def has_begun(self) -> bool:
        return self.run.journal_file.exists() and bool(read_events(self.run.journal_file))

    def attempt(self) -> tuple[int, bool]:
        """Return the number of its latest attempt, and whether this waits for its death."""
        attempt = step = began_at = 0
        for event in read_events(self.run.journal_file) if self.has_begun() else []:
            if event["event"] in ("task_started", "task_resumed"):
                attempt, began_at = attempt + 1, step
            elif event["event"] == "checkpoint":
                step = max(job["step"] for job in event["jobs"].values())
            elif event["event"] == "task_completed":
                return attempt, False
        return attempt, step - began_at == HALF_WAY - 1

    def node(self) -> str | None:
        """Return the name of the node that runs the task, as the dashboard shows it; None before its first start."""
        own = [placement for placement in self.tenant.cluster()["actual"] if placement["task"] == self.id]
        latest = max(own, key=lambda placement: placement["start_s"], default=None)
        return None if latest is None else str(latest["gpus"][0]["node"])

    def check(self) -> dict[str, Any]:
        """Check that the task has one result and that its steps were reported once; return its result."""
        events = read_events(self.run.journal_file)
        assert audit(entries(events)) == ()
        assert sum(event["event"] == "task_completed" for event in events) == 1, "a finished task ran again"
        reported = [
            event.data["step"]  # type: ignore[index]
            for event in self.tenant.openai.fine_tuning.jobs.list_events(self.id, limit=100)
            if event.type == "metrics"
        ]
        assert sorted(reported) == sorted(set(reported)), "a step was reported twice"
        result: dict[str, Any] = self.tenant.http.get(f"/api/tasks/{self.id}").json()["result"]
        return result


class Nodes:
    """The nodes of a Ray cluster, which are killed and replaced."""

    def __init__(self, machine: RayMachine, number: int) -> None:
        self._machine = machine
        self._nodes = [machine.add_node(num_cpus=1) for _ in range(number)]

    def replace(self, name: str) -> str:
        """Kill the node that ALTO calls ``name``, and return the last part of the name of a new one."""
        (node,) = (node for node in self._nodes if name.endswith(node.node_id[:8]))
        self._machine.kill_node(node)
        self._nodes.remove(node)
        self._nodes.append(self._machine.add_node(num_cpus=1))
        return str(self._nodes[-1].node_id[:8])


@pytest.fixture
def machine() -> Iterator[RayMachine]:
    """A head without slots, to which this process is not connected."""
    machine = RayMachine()
    yield machine
    machine.shutdown()


@pytest.fixture
def server(machine: RayMachine, tmp_path: Path) -> Iterator[Server]:
    """A server on ``machine`` that has not started."""
    server = Server(tmp_path / "data", "auto", RAY_ADDRESS=machine.address)
    yield server
    server.kill()


def test_tasks_outlive_their_nodes_and_the_server(machine: RayMachine, server: Server, tmp_path: Path) -> None:
    """Every executor waits once (nightly: three times) in the middle of its task, until its node is killed."""
    num_kills = kills(10)
    num_deaths = 1 if num_kills < 10 else 3
    plan_deaths(tmp_path, {"*": [(0, "update", HOLD, HALF_WAY)] * num_deaths})
    nodes = Nodes(machine, 3)
    server.start()
    limited, free = Tenant(server, "limited", "--max-gpus", "1"), Tenant(server, "free")
    tasks = [limited.submit(), free.submit(), free.submit()]
    wait_for(lambda: all(task.has_begun() for task in tasks), LIMIT_S)
    later, preferred = limited.submit(), limited.submit()
    tasks += [later, preferred]
    limited.http.post(f"/api/tasks/{preferred.id}/priority", json={"priority": 7}).raise_for_status()

    ended: set[tuple[str, int]] = set()  # attempts that were held, and whose node or server was killed

    def held() -> list[SubmittedTask]:
        attempts = {task.id: task.attempt() for task in tasks}
        return [
            task
            for task in tasks
            if attempts[task.id][1]
            and attempts[task.id][0] <= num_deaths
            and (task.id, attempts[task.id][0]) not in ended
        ]

    num_killed, num_lives = 0, 1
    while not all(task.has_succeeded() for task in tasks):
        found = held()
        if found and num_killed >= num_kills and num_lives == 1:
            # The executors save and end, because their server is gone; another server continues their tasks.
            server.kill()
            ended |= {(task.id, task.attempt()[0]) for task in tasks}
            server.start()
            num_lives += 1
        elif found and (lost := found[0].node()) is not None:
            ended.add((found[0].id, found[0].attempt()[0]))
            came = nodes.replace(lost)
            wait_for(lambda lost=lost: lost not in str(free.cluster()["nodes"]), LIMIT_S)
            wait_for(lambda came=came: came in str(free.cluster()["nodes"]), LIMIT_S)
            num_killed += 1
        else:
            time.sleep(0.1)
    assert (num_killed >= num_kills, num_lives) == (True, 2)

    results = [task.check() for task in tasks]
    assert [result["validation_loss"] for result in results] == pytest.approx(
        [results[0]["validation_loss"]] * len(tasks), rel=1e-4
    )
    starts: dict[str, float] = {}
    for journal in sorted((server.data / "control").glob("*/journal.jsonl")):
        history = QueueHistory.read(journal)
        own = {task.id for task in tasks if task.tenant is limited}
        placements = sorted(history.actual_placements(), key=lambda placement: placement.start_s)
        limited_ends_s = 0.0
        for placement in placements:
            name = placement.task.partition(".")[0]
            starts.setdefault(name, len(starts))
            if name in own:
                assert placement.start_s >= limited_ends_s, "the tenant had more than one slot"
                limited_ends_s = placement.start_s + placement.duration_s
    assert starts[preferred.id] < starts[later.id]


@pytest.fixture
def head() -> Iterator[RayHead]:
    """A head behind ``ray://`` that has not started."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        head = RayHead(Path(folder), [free_port() for _ in range(3)])
        yield head
        head.kill()


@pytest.mark.parametrize("executors", [True, False], ids=["power-failure", "executors-live"])
def test_a_job_outlives_the_head_of_the_cluster(head: RayHead, tmp_path: Path, *, executors: bool) -> None:
    """The head is killed in the middle of a job, with its executor or without, and comes back after a while."""
    plan_deaths(tmp_path, {"*": [(0, "update", HOLD, HALF_WAY)]})
    server = Server(tmp_path / "data", head.address, **head.environment)
    head.start()
    try:
        server.start()
        tenant = Tenant(server, "tenant")
        task = tenant.submit(n_epochs=1)
        wait_for(lambda: task.attempt()[1], LIMIT_S)
        head.kill(executors=executors)
        wait_for(lambda: not server.is_ready(), LIMIT_S)
        plan_deaths(tmp_path, {})
        later = tenant.submit(n_epochs=1)
        head.start()
        wait_for(lambda: task.has_succeeded() and later.has_succeeded(), LIMIT_S)
        assert server.is_ready()
        losses = [each.check()["validation_loss"] for each in (task, later)]
    finally:
        server.kill()
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    events = [event["event"] for event in read_events(task.run.journal_file)]
    assert (events.count("task_started"), events.count("task_resumed")) == (1, 1), "it continued once"
    evaluated = [
        (event["job"], event["step"]) for event in read_events(task.run.journal_file) if event["event"] == "eval"
    ]
    assert len(set(evaluated)) == len(evaluated), "a step ran twice"
