"""Machines of a cluster that leave, come back and join while a service runs, and connections that are lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from services import Served, served, wait_for

from alto.cluster import ClusterEvent, GpuAdded, GpuLost
from alto.engine.control_plane import ControlPlane, opened_control_plane
from alto.engine.queue_setup import QueueSetup
from alto.errors import ClusterLostError, SpecError
from alto.records import Gpu, Node
from alto.service.coordinator import coordinator as coordinating
from alto.service.coordinator import leadership
from alto.service.coordinator.coordinator import OpenPlane
from alto.service.store.jobs import ENDED
from alto.service.store.tables import LeaderRow
from benchmarks.service.plane import simulated_plane
from benchmarks.service.simulated_cluster import SimulatedCluster


@dataclass
class Machines:
    """The machines that a test lets a cluster have, by name, with their numbers of GPUs; None: nothing answers."""

    present: dict[str, int] | None
    has_gpus: bool = False
    gate: Path | None = None

    def cluster(self) -> ChangingCluster:
        if self.present is None:
            raise SpecError("cluster: expected a cluster, found that the test has switched it off")
        return ChangingCluster(machines=self, has_gpus=self.has_gpus, waits_for=self.gate)


@dataclass(kw_only=True)
class ChangingCluster(SimulatedCluster):
    """A cluster whose machines a test changes while it runs."""

    machines: Machines
    duration_s: float = 0.05
    _known: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = dict(self.machines.present or {})
        self._set_nodes()

    def poll(self, timeout_s: float) -> list[ClusterEvent]:
        present = self.machines.present
        if present is None:
            raise ClusterLostError("expected the cluster to answer, found that the test has switched it off")
        before, self._known = self._known, dict(present)
        lost = [Gpu(name, index) for name in before if name not in present for index in range(before[name])]
        came = [Gpu(name, index) for name in present if name not in before for index in range(present[name])]
        self._set_nodes()
        changes: list[ClusterEvent] = [*(GpuLost(gpu=gpu) for gpu in lost), *(GpuAdded(gpu=gpu) for gpu in came)]
        return [*changes, *super().poll(timeout_s)]

    def _set_nodes(self) -> None:
        self.nodes = [Node(name=name, gpus=tuple(range(num))) for name, num in self._known.items()]


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinating, "_RETRY_S", 0.1)


@contextlib.contextmanager
def serving(root: Path, present: Machines, *, strategy: str = "single", **own: Any) -> Iterator[Served]:
    with served(root, open_plane=plane_of(root, present, strategy=strategy, **own), cluster="auto", **own) as service:
        yield service


def plane_of(root: Path, present: Machines, *, strategy: str = "single", **own: Any) -> OpenPlane:
    return simulated_plane(root, present.cluster, strategy=strategy, **own)


def create(service: Served, num_gpus: int, seed: int = 1) -> str:
    client = service.client()
    settings: Any = {"learning_rate": 1e-3, "n_epochs": 1, "num_gpus": num_gpus}
    file = service.upload(client)
    job = client.fine_tuning.jobs.create(model="alto-tiny", training_file=file, seed=seed, hyperparameters=settings)
    return job.id


def status(service: Served, job: str) -> str:
    return service.client().fine_tuning.jobs.retrieve(job).status


def messages(client: openai.OpenAI, job: str) -> list[str]:
    return [event.message for event in client.fine_tuning.jobs.list_events(job, limit=100)]


def ready(service: Served) -> tuple[int, list[str]]:
    answer = httpx2.get(f"{service.url}/readyz")
    return answer.status_code, answer.json()["problems"]


def lose(service: Served, machines: Machines, name: str) -> None:
    """Let a machine leave, and wait until the service knows."""
    machines.present = {other: num for other, num in (machines.present or {}).items() if other != name}
    wait_for(lambda: name not in str(httpx2.get(f"{service.url}/api/cluster").json()["nodes"]))


@pytest.mark.parametrize("strategy", ["single", "adapter_parallel"])
def test_a_job_for_a_machine_that_is_away_waits_for_it_and_smaller_ones_do_not(tmp_path: Path, strategy: str) -> None:
    machines = Machines({"small": 1, "large": 3})
    with serving(tmp_path, machines, strategy=strategy) as service:
        wait_for(lambda: ready(service)[0] == 200)
        lose(service, machines, "large")
        # With strategy single, a task on CPU slots may have those of all machines.
        wide = [create(service, 4 if strategy == "single" else 3, seed) for seed in range(3)]
        wait_for(lambda: {status(service, job) for job in wide} == {"queued"})
        assert service.finished(service.client(), create(service, 1)).status == "succeeded"
        assert {status(service, job) for job in wide} == {"queued"}
        assert any("found 1: machines of the cluster are away" in it for it in messages(service.client(), wide[0]))
        machines.present = {"small": 1, "large again": 3}
        for job in wide:
            assert service.finished(service.client(), job).status == "succeeded"


def test_a_job_that_has_never_fitted_is_refused(tmp_path: Path) -> None:
    machines = Machines({"small": 1, "large": 3})
    with serving(tmp_path, machines, strategy="adapter_parallel") as service:
        wait_for(lambda: ready(service)[0] == 200)
        lose(service, machines, "large")
        found = service.finished(service.client(), create(service, 4))
        assert found.status == "failed"
        assert "expected at most 3, the GPUs of one machine, found 4" in found.error.message


def test_machines_are_remembered_by_the_next_server(tmp_path: Path) -> None:
    machines = Machines({"small": 1, "large": 3})
    for present in ({"small": 1, "large": 3}, {"small": 1}, {"small": 1}):
        machines.present = present
        with serving(tmp_path, machines) as service:
            wait_for(lambda service=service: ready(service)[0] == 200)
    with serving(tmp_path, machines) as service:
        job = create(service, 4)
        wait_for(lambda: status(service, job) == "queued")
        machines.present = {"small": 1, "large": 3}
        assert service.finished(service.client(), job).status == "succeeded"


def test_machines_that_are_gone_for_good_are_named_in_the_settings(tmp_path: Path) -> None:
    present = Machines({"small": 1, "large": 3})
    with serving(tmp_path, present, strategy="adapter_parallel") as service:
        wait_for(lambda: ready(service)[0] == 200)
        lose(service, present, "large")
        waiting = create(service, 3)
        wait_for(lambda: status(service, waiting) == "queued")
    with serving(tmp_path, present, strategy="adapter_parallel", machines=(1,)) as service:
        for job in (waiting, create(service, 3)):
            found = service.finished(service.client(), job)
            assert found.status == "failed"
            assert "expected num_gpus from 1 to 1 (all GPUs of the cluster), found 3" in found.error.message
        assert service.finished(service.client(), create(service, 1)).status == "succeeded"


def test_machines_that_never_were_there_can_be_waited_for(tmp_path: Path) -> None:
    present = Machines({"small": 1})
    with serving(tmp_path, present, strategy="adapter_parallel", machines=(1, 3)) as service:
        job = create(service, 3)
        wait_for(lambda: status(service, job) == "queued")
        present.present = {"small": 1, "large": 3}
        assert service.finished(service.client(), job).status == "succeeded"


def test_a_cluster_that_grows_is_used_whole(tmp_path: Path) -> None:
    gate = tmp_path / "go"
    machines = Machines({"first": 1}, gate=gate)
    with serving(tmp_path / "data", machines) as service:
        jobs = [create(service, 1, seed) for seed in range(5)]
        wait_for(lambda: "running" in {status(service, job) for job in jobs})
        machines.present = {"first": 1, "second": 2, "third": 2}
        wait_for(lambda: {status(service, job) for job in jobs} == {"running"})
        gate.touch()
        for job in jobs:
            assert service.finished(service.client(), job).status == "succeeded"


def test_a_server_is_ready_once_it_is_connected(tmp_path: Path) -> None:
    machines, go_on = Machines({"machine": 1}), threading.Event()
    opened = plane_of(tmp_path, machines)

    @contextlib.contextmanager
    def slow(epoch: int) -> Iterator[ControlPlane]:
        go_on.wait()
        with opened(epoch) as plane:
            yield plane

    with served(tmp_path, open_plane=slow) as service, served(tmp_path) as other:
        try:
            wait_for(lambda: ready(service)[1] != ["no server leads yet"])
            assert ready(service) == (503, ["this server is not connected to its cluster; see its log for the cause"])
            assert ready(other) == (503, ["the server that leads is not connected to its cluster yet"])
            assert httpx2.get(f"{service.url}/healthz").status_code == 200
        finally:
            go_on.set()
        wait_for(lambda: ready(service) == (200, []))
        assert ready(other) == (200, [])


class DatabaseClock:
    """A clock of the database that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1e9
        monkeypatch.setattr(leadership, "database_time", lambda session: self.now_s)


def leader_of(service: Served) -> tuple[int, float]:
    """Return the epoch of the leader, and the time of its last renewal."""
    with service.service.store.reading() as session:
        row = session.get(LeaderRow, 1)
    return (0, 0.0) if row is None else (row.epoch, row.renewed_at)


def test_a_leader_that_connects_slowly_keeps_its_lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, go_on, lease_s = DatabaseClock(monkeypatch), threading.Event(), 0.7
    opened = plane_of(tmp_path, Machines({"machine": 1}))

    @contextlib.contextmanager
    def slow(epoch: int) -> Iterator[ControlPlane]:
        go_on.wait()
        with opened(epoch) as plane:
            yield plane

    with (
        served(tmp_path, open_plane=slow, lease_s=lease_s) as first,
        served(tmp_path, open_plane=slow, lease_s=lease_s) as second,
    ):
        try:
            wait_for(lambda: leader_of(first)[0] == 1)
            for _ in range(4):
                clock.now_s += 0.9 * lease_s  # twice this time without a renewal, and the other server leads
                wait_for(lambda: leader_of(first) in ((1, clock.now_s), (2, clock.now_s)), timeout_s=30)
                assert leader_of(first)[0] == 1
        finally:
            go_on.set()
        wait_for(lambda: ready(first) == ready(second) == (200, []))
        assert leader_of(first)[0] == 1


def test_a_leader_that_cannot_connect_leaves_the_lead_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, go_on, lease_s = DatabaseClock(monkeypatch), threading.Event(), 0.7
    attempts: list[int] = []

    @contextlib.contextmanager
    def failing(epoch: int) -> Iterator[ControlPlane]:
        attempts.append(epoch)
        if len(attempts) > 1:
            go_on.wait()
        raise SpecError("cluster: expected a cluster, found none")
        yield

    opened = plane_of(tmp_path, Machines({"machine": 1}))
    with served(tmp_path, open_plane=failing, lease_s=lease_s) as first:
        try:
            wait_for(lambda: len(attempts) > 1)
            assert "alto-lease" not in {thread.name for thread in threading.enumerate()}, "it renews no more"
            with served(tmp_path, open_plane=opened, lease_s=lease_s) as second:
                clock.now_s += lease_s
                wait_for(lambda: ready(second) == (200, []))
                assert leader_of(first)[0] == 2
        finally:
            go_on.set()


def test_a_lost_connection_is_reported_until_it_is_back_and_jobs_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = tmp_path / "go"
    machines = Machines({"machine": 1}, gate=gate)
    with serving(tmp_path / "data", machines) as service:
        running = create(service, 1)
        wait_for(lambda: status(service, running) == "running")
        machines.present = None
        # Nothing is submitted meanwhile: the service finds out by itself.
        wait_for(lambda: ready(service)[0] == 503)
        assert ready(service)[1] == ["this server is not connected to its cluster; see its log for the cause"]
        assert httpx2.get(f"{service.url}/healthz").status_code == 200
        waiting = create(service, 1)
        assert status(service, running) not in ENDED
        gate.touch()
        machines.present = {"machine": 1}
        wait_for(lambda: ready(service) == (200, []))
        for job in (running, waiting):
            assert service.finished(service.client(), job).status == "succeeded"
    reports = [record for record in caplog.records if "has no cluster" in record.message]
    assert [record.exc_info for record in reports] in ([None], [None, None]), "each error once, without a traceback"


def test_cpu_slots_do_not_take_the_place_of_gpus_that_are_away(tmp_path: Path) -> None:
    machines = Machines({"machine": 2}, has_gpus=False)

    @dataclass(frozen=True, kw_only=True)
    class Setup(QueueSetup):
        @contextlib.contextmanager
        def opened(self) -> Iterator[ChangingCluster]:
            with contextlib.closing(machines.cluster()) as cluster:
                yield cluster

    setup = Setup(strategy="single", cluster="simulated", total_gpus=None, quotas={})
    with (
        pytest.raises(ClusterLostError, match="expected GPUs, which the cluster had before, found only CPU slots"),
        opened_control_plane(setup, tmp_path, method="lpt", needs_gpus=True),
    ):
        pass
    assert not (tmp_path / "journal.jsonl").exists()
