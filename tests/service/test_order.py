"""The order in which tasks of tenants begin, and the tasks that train in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
from services import Served, served, wait_for

import alto
from alto.cluster import Launch
from alto.engine.control_plane import ControlPlane
from alto.service.access import create_key, create_tenant
from benchmarks.service.plane import simulated_plane
from benchmarks.service.simulated_cluster import SimulatedCluster

FIXED = {"learning_rate": 1e-4, "n_epochs": 1, "num_gpus": 2}


def plane_of(service: Served) -> ControlPlane:
    assert service.coordinator is not None
    assert service.coordinator.plane is not None
    return service.coordinator.plane


class Bench:
    """A service of two tenants that runs one task at a time; the first one runs until :meth:`order` is called.

    All tasks have both GPUs. The control plane has four tasks at most: the one that runs, and three that wait.
    """

    def __init__(self, service: Served, gate: Path, launches: list[str]) -> None:
        self.service = service
        self._gate = gate
        self._launches = launches
        self._names: dict[str, str] = {}
        with service.service.store.writing() as session:
            keys = {tenant: create_key(session, tenant)[1] for tenant in ("a", "b")}
        self.clients = {tenant: service.client(key) for tenant, key in keys.items()}
        self._files = {tenant: service.upload(client) for tenant, client in self.clients.items()}
        first = self.job("first")
        wait_for(lambda: self.clients["a"].fine_tuning.jobs.retrieve(first).status == "running")

    def job(self, name: str, tenant: str = "a", *, own: dict[str, Any] | None = None, **more: Any) -> str:
        """Create a job; return its id once the job has been checked."""
        jobs = self.clients[tenant].fine_tuning.jobs
        hyperparameters: Any = {**FIXED, **(own or {})}
        job: str = jobs.create(
            model="alto-tiny", training_file=self._files[tenant], hyperparameters=hyperparameters, **more
        ).id
        self._names[job] = name
        wait_for(lambda: jobs.retrieve(job).status != "validating_files")
        return job

    def scheduled(self) -> set[str]:
        """Return the names of the jobs that the control plane has and has not begun."""
        states = plane_of(self.service).states()
        return {self._names[order.partition(".")[0]] for order, state in states.items() if state.is_new}

    def order(self) -> list[str]:
        """Return the names of all jobs but the first, in the order in which they began."""
        self._gate.touch()
        wait_for(lambda: len(set(self._launches)) == len(self._names))
        assert len(self._launches) == len(self._names), "a job began twice"
        return [self._names[job] for job in self._launches][1:]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    launches: list[str] = []
    start = SimulatedCluster.start

    def noted_start(cluster: SimulatedCluster, launch: Launch) -> None:
        launches.append(launch.task.partition(".")[0])
        start(cluster, launch)

    monkeypatch.setattr(SimulatedCluster, "start", noted_start)
    gate = tmp_path / "go"
    plane = simulated_plane(tmp_path, lambda: SimulatedCluster(num_gpus=2, duration_s=0.1, waits_for=gate))
    with served(tmp_path, open_plane=plane) as service:
        yield Bench(service, gate, launches)


def test_a_priority_of_the_header_reaches_the_schedule(bench: Bench) -> None:
    bench.job("low")
    bench.job("high", extra_headers={"alto-priority": "5"})
    bench.job("middle", own={"priority": 3})
    wait_for(lambda: bench.scheduled() == {"low", "high", "middle"})
    assert bench.order() == ["high", "middle", "low"]


def test_the_control_plane_has_the_tasks_of_the_highest_priority(bench: Bench) -> None:
    for number in range(4):
        bench.job(f"low {number}")
    wait_for(lambda: bench.scheduled() == {"low 0", "low 1", "low 2"})
    bench.job("high", extra_headers={"alto-priority": "5"})
    wait_for(lambda: bench.scheduled() == {"high", "low 0", "low 1"})
    assert bench.order()[0] == "high"


def test_a_priority_that_changes_moves_a_task_in_the_schedule(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = threading.Event()
    prioritise = ControlPlane.prioritise

    def noted(plane: ControlPlane, priorities: Mapping[str, int]) -> None:
        prioritise(plane, priorities)
        changed.set()

    monkeypatch.setattr(ControlPlane, "prioritise", noted)
    tasks = [bench.job(f"task {number}") for number in range(3)]
    wait_for(lambda: bench.scheduled() == {"task 0", "task 1", "task 2"})
    bench.clients["a"].post(f"../api/tasks/{tasks[2]}/priority", body={"priority": 1}, cast_to=object)
    wait_for(changed.is_set)
    assert bench.order()[0] == "task 2"


def test_a_tenant_does_not_go_before_others_by_its_priorities(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    levels: dict[str, int] = {}
    submit = ControlPlane.submit

    def noted(plane: ControlPlane, name: str, *run: Any, priority: int, **more: Any) -> None:
        levels[name.partition(".")[0]] = priority
        submit(plane, name, *run, priority=priority, **more)

    monkeypatch.setattr(ControlPlane, "submit", noted)
    first = bench.job("of b", "b")
    high = bench.job("high", extra_headers={"alto-priority": "100"})
    low = bench.job("low", extra_headers={"alto-priority": "99"})
    wait_for(lambda: bench.scheduled() == {"of b", "high", "low"})
    assert levels == {first: 0, high: 0, low: -1}
    begun = bench.order()
    assert begun.index("high") < begun.index("low")


@pytest.mark.parametrize(("priority", "own"), [("101", {}), ("-1", {}), ("high", {}), ("1", {"priority": 2})])
def test_a_header_that_is_no_priority_is_refused(bench: Bench, priority: str, own: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        bench.job("x", own=own, extra_headers={"alto-priority": priority})
    assert "alto-priority" in str(raised.value)


def test_the_limit_of_a_new_tenant_holds_from_its_first_task_on(tmp_path: Path) -> None:
    gate = tmp_path / "go"
    plane = simulated_plane(tmp_path, lambda: SimulatedCluster(num_gpus=3, duration_s=0.1, waits_for=gate))
    own: Any = {**FIXED, "num_gpus": 1}
    with served(tmp_path, open_plane=plane) as service:
        begun = service.client().fine_tuning.jobs.create(
            model="alto-tiny", training_file=service.upload(service.client()), hyperparameters=own
        )
        wait_for(lambda: service.client().fine_tuning.jobs.retrieve(begun.id).status == "running")
        with service.service.store.writing() as session:  # after the coordinator has read the limits of all tenants
            create_tenant(session, "limited", {"max_gpus": 1})
            key = create_key(session, "limited")[1]
        client = service.client(key)
        file = service.upload(client)
        tasks = [
            client.fine_tuning.jobs.create(model="alto-tiny", training_file=file, hyperparameters=own).id
            for _ in range(2)
        ]
        wait_for(lambda: len(plane_of(service).states()) == 3)
        assert [state.is_new for state in plane_of(service).states().values()] == [False, False, True]
        gate.touch()
        assert [service.finished(client, task).status for task in tasks] == ["succeeded"] * 2


SHARES = {"open-a": True, "open-b": True, "closed-a": False, "closed-b": False}


def test_both_tenants_must_allow_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: dict[str, str] = {}
    submit = ControlPlane.submit

    def noted(plane: ControlPlane, name: str, run_dir: Path, task: alto.Task, *, shares_with: str, **more: Any) -> None:
        groups[task.tenant] = shares_with
        submit(plane, name, run_dir, task, shares_with=shares_with, **more)

    monkeypatch.setattr(ControlPlane, "submit", noted)
    bases: dict[str, str] = {}
    start = SimulatedCluster.start

    def noted_start(cluster: SimulatedCluster, launch: Launch) -> None:
        bases[Path(launch.run_dir).parent.name] = launch.base
        start(cluster, launch)

    monkeypatch.setattr(SimulatedCluster, "start", noted_start)
    with served(tmp_path, open_plane=simulated_plane(tmp_path, lambda: SimulatedCluster(duration_s=0.1))) as service:
        with service.service.store.writing() as session:
            for tenant, shares in SHARES.items():
                create_tenant(session, tenant, {"shares_executors": shares})
            keys = {tenant: create_key(session, tenant)[1] for tenant in SHARES}
        for key in keys.values():
            client = service.client(key)
            job = client.fine_tuning.jobs.create(model="alto-tiny", training_file=service.upload(client)).id
            assert service.finished(client, job).status == "succeeded"
    assert set(groups) == set(SHARES)
    assert groups["open-a"] == groups["open-b"]
    assert len(set(groups.values())) == 3, "each of the others is alone"
    assert len(set(bases.values())) == 3, bases
