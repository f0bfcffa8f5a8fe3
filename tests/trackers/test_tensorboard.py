"""Real TensorBoard: what its own reader finds in the event files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from journals import entry
from tiny import make_task, read_journal, save_model

import alto
from alto.trackers import tracking
from alto.trackers.tensorboard import TensorBoardTracker

pytest.importorskip("tensorboard", reason="tensorboard is not installed")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

Event = dict[str, Any]


def show(events: list[Event], run_dir: Path) -> None:
    with tracking({"tensorboard": TensorBoardTracker()}, run_dir) as (observe,):
        for event in events:
            observe(entry(event))


def read(run_dir: Path, job: str) -> Any:
    return EventAccumulator(str(run_dir / "tensorboard" / job), size_guidance={"scalars": 0}).Reload()


def scalars(run_dir: Path, job: str, tag: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in read(run_dir, job).Scalars(tag)]


def outcome(run_dir: Path, job: str) -> bytes:
    (text,) = read(run_dir, job).Tensors("outcome/text_summary")
    return bytes(text.tensor_proto.string_val[0])


def hyperparameters(run_dir: Path, job: str) -> dict[str, Any]:
    content = read(run_dir, job).PluginTagToContent("hparams")["_hparams_/session_start_info"]
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    return {key: getattr(value, value.WhichOneof("kind")) for key, value in values.items()}


def test_curves_and_outcomes(small_run: list[Event], tmp_path: Path) -> None:
    show(small_run, tmp_path)
    assert scalars(tmp_path, "d", "train/loss") == [(step, 2.0) for step in range(1, 101)]
    assert scalars(tmp_path, "d", "eval/loss") == [(10, pytest.approx(2.1)), (100, pytest.approx(1.9))]
    assert scalars(tmp_path, "d", "eval/train_ema") == [(10, 2.0), (100, 2.0)]
    assert scalars(tmp_path, "b", "eval/best_loss") == [(10, 3.0)]
    assert [outcome(tmp_path, job) for job in "abcd"] == [
        b"diverging",
        b"underperforming",
        b"overfitting",
        b"completed",
    ]


def test_losses_that_are_not_finite_are_shown_as_such(small_run: list[Event], tmp_path: Path) -> None:
    show(small_run, tmp_path)
    assert scalars(tmp_path, "a", "train/loss")[0] == (1, math.inf)
    ((step, loss),) = scalars(tmp_path, "a", "eval/loss")
    assert step == 10
    assert math.isnan(loss)
    assert "eval/best_loss" not in read(tmp_path, "a").Tags()["scalars"]


def test_hyperparameters_are_what_varies(small_run: list[Event], tmp_path: Path) -> None:
    show(small_run, tmp_path)
    assert hyperparameters(tmp_path, "d") == {"learning_rate": 2e-4, "r": 8, "lora_alpha": 16}


def test_single_job_has_no_hyperparameters(small_run: list[Event], tmp_path: Path) -> None:
    start = small_run[0] | {"jobs": small_run[0]["jobs"][:1]}
    show([start, *(event for event in small_run if event.get("job") == "a")], tmp_path)
    assert scalars(tmp_path, "a", "train/loss")
    assert list(read(tmp_path, "a").summary_metadata) == ["outcome/text_summary"]


def test_resumed_run_is_written_from_scratch(small_run: list[Event], tmp_path: Path) -> None:
    show(small_run, tmp_path)
    replayed = [event for event in small_run if event.get("job") in (None, "d")]
    show(replayed, tmp_path)
    assert [path.name for path in (tmp_path / "tensorboard").iterdir()] == ["d"]
    assert scalars(tmp_path, "d", "train/loss") == [(step, 2.0) for step in range(1, 101)]


def test_engine_shows_a_task_s_curves_by_default(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    task = make_task(tmp_path, model=str(model), search_space={"lr": [1e-3, 1e-2]}, r=4, max_steps=4, early_exit=False)
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task)
    evaluated: dict[str, list[tuple[int, float]]] = {"job-000": [], "job-001": []}
    for event in read_journal(result.run_dir):
        if event["event"] == "eval":
            evaluated[event["job"]].append((event["step"], pytest.approx(event["validation_loss"])))
    for job, points in evaluated.items():
        assert scalars(Path(result.run_dir), job, "eval/loss") == points
        assert len(scalars(Path(result.run_dir), job, "train/loss")) == 4
