"""Tasks of two tenants are trained in one process only where both allow it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from services import served

import alto
from alto.cluster import Launch
from alto.engine.control_plane import ControlPlane
from alto.service.access import create_key, create_tenant
from benchmarks.service.plane import simulated_plane
from benchmarks.service.simulated_cluster import SimulatedCluster

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
