"""Real MLflow, on a SQLite store and through its server: what its own client finds there, also after a resume."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from clusters import wait_for
from journals import entry

from alto.trackers import tracking
from alto.trackers.mlflow import MlflowTracker
from benchmarks.servers.vllm_server import free_port

# MLflow is imported where it is used, because it takes seconds, and every worker of pytest imports this file.
pytestmark = [
    pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed"),
    pytest.mark.skipif(find_spec("sqlalchemy") is None, reason="mlflow's SQLite store needs sqlalchemy"),
    pytest.mark.filterwarnings("ignore::Warning"),  # raised by MLflow and its libraries
]

Event = dict[str, Any]


@pytest.fixture(scope="module", params=["store", "server"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an empty store, made once, because MLflow takes seconds to make one; or of a server in front."""
    from mlflow import MlflowClient

    folder = tmp_path_factory.mktemp("mlflow")
    store = f"sqlite:///{folder / 'mlflow.db'}"
    MlflowClient(store).search_experiments()
    if request.param == "store":
        yield store
        return
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--workers", "1"]
    command += ["--artifacts-destination", str(folder / "artifacts"), "--port", url.rpartition(":")[2]]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            wait_for(lambda: answers(url), "MLflow's server")
            yield url
        finally:
            server.terminate()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health") as response:
            return bool(response.status == 200)
    except OSError:
        return False


@pytest.fixture
def client(address: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of the store, with an experiment of this test's own."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", request.node.name)
    return MlflowClient(address)


def show(events: list[Event], run_dir: Path) -> None:
    with tracking({"mlflow": MlflowTracker()}, run_dir) as (observe,):
        for event in events:
            observe(entry(event))


def runs(client: Any, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the runs of the test's experiment by name."""
    experiment = client.get_experiment_by_name(request.node.name)
    found = client.search_runs([experiment.experiment_id])
    by_name = {run.info.run_name: run for run in found}
    assert len(by_name) == len(found)
    return by_name


def history(client: Any, run: Any, metric: str) -> list[tuple[int, float]]:
    return sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, metric))


def test_task_and_its_jobs(small_run: list[Event], tmp_path: Path, client: Any, request: pytest.FixtureRequest) -> None:
    show(small_run, tmp_path)
    found = runs(client, request)
    task = found.pop(tmp_path.name)
    assert set(found) == {"a", "b", "c", "d"}
    assert task.data.tags["best_job"] == "d"
    assert task.data.params["model"] == "alto-tiny"
    assert task.data.params["target_modules"] == '["q", "v"]'
    assert {run.data.tags["mlflow.parentRunId"] for run in found.values()} == {task.info.run_id}
    assert {run.info.status for run in (task, *found.values())} == {"FINISHED"}
    assert found["d"].data.params == {"learning_rate": "0.0002", "r": "8", "lora_alpha": "16"}
    assert found["c"].data.tags["outcome"] == "overfitting"
    assert found["c"].data.metrics["eval/best_loss"] == 2.2
    assert history(client, found["d"], "train/loss") == [(step, 2.0) for step in range(1, 101)]
    assert history(client, found["d"], "eval/loss") == [(10, 2.1), (100, 1.9)]


def test_losses_that_are_not_finite_are_taken(
    small_run: list[Event], tmp_path: Path, client: Any, request: pytest.FixtureRequest, caplog: Any
) -> None:
    show(small_run, tmp_path)
    assert math.isnan(runs(client, request)["a"].data.metrics["eval/loss"])
    assert not [message for message in caplog.messages if message.startswith("tracker")]


@pytest.mark.parametrize("cut", [5, 12, 20, 24])
def test_resumed_run_goes_on_with_the_same_runs(
    small_run: list[Event], tmp_path: Path, client: Any, request: pytest.FixtureRequest, cut: int
) -> None:
    show(small_run[:cut], tmp_path)
    assert runs(client, request)[tmp_path.name].info.status == "KILLED"
    first = {name: run.info.run_id for name, run in runs(client, request).items()}
    # After the checkpoint some events are lost, and come again at other times.
    later = [
        event | {"time": event["time"] + (100 if number > cut - 3 else 0)} for number, event in enumerate(small_run)
    ]
    show(json.loads(json.dumps(later)), tmp_path)
    found = runs(client, request)
    assert first.items() <= {name: run.info.run_id for name, run in found.items()}.items()
    assert {run.info.status for run in found.values()} == {"FINISHED"}
    assert history(client, found["d"], "train/loss") == [(step, 2.0) for step in range(1, 101)]
    assert history(client, found["c"], "train/loss") == [(step, 2.0) for step in range(1, 51)]
    assert history(client, found["b"], "eval/loss") == [(10, 3.0)]


def test_jobs_that_had_ended_are_left_alone(
    small_run: list[Event], tmp_path: Path, client: Any, request: pytest.FixtureRequest
) -> None:
    show(small_run[:-2], tmp_path)
    ended_at = runs(client, request)["a"].info.end_time
    show(small_run, tmp_path)
    assert runs(client, request)["a"].info.end_time == ended_at
