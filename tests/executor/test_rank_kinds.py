"""Isolation on several ranks for jobs with biases, magnitudes and noise under every optimizer: on each rank, on all of
them together, and moved from one number of ranks to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from job_kinds import KINDS
from rank_kinds import steps_of_all_kinds_are_those_of_peft_alone, train_all_kinds
from ranks import failures_on_ranks
from resident_jobs import make_task

from alto.lora import read_adapter
from alto.runs import RunDir, read_events, read_history

pytestmark = [
    pytest.mark.slow("campaigns"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_steps_on_two_ranks_are_those_of_peft_alone(name: str, tmp_path: Path) -> None:
    """``test_ranks.py`` checks another model."""
    checks = [("steps", steps_of_all_kinds_are_those_of_peft_alone, (name,))]
    assert failures_on_ranks(2, checks, tmp_path) == {}


def make_run(folder: Path) -> RunDir:
    """Create a run whose jobs end one after the other, until there are fewer jobs than ranks."""
    longer = {"everything-adamw": 10, "dora-bias-adafactor": 12}
    configs = [{**config, "max_steps": longer.get(name, 4)} for name, config in KINDS.items()]
    exits = {"rungs": [[0.5, 1.0]], "detect_divergence": False, "detect_overfitting": False}
    return RunDir.create(folder, make_task(configs, eval_steps=0.5, early_exit=exits))


def test_a_run_on_four_ranks_that_two_resume_is_that_of_one_process(tmp_path: Path) -> None:
    runs = []
    for lives in (((1, ()),), ((4, (5,)), (2, ()))):
        run = make_run(tmp_path / str(len(lives)) / "runs")
        for number, (num_ranks, turns) in enumerate(lives):
            folder = tmp_path / str(len(lives)) / str(number)
            folder.mkdir()
            checks: list[Any] = [("train", train_all_kinds, (str(run.root), *turns))]
            assert failures_on_ranks(num_ranks, checks, folder) == {}
        runs.append(run)
    alone, moved = (read_history(run.root) for run in runs)
    events = list(read_events(runs[1].journal_file))
    admitted = [event for event in events if event["event"] in ("job_admitted", "job_resumed")]
    assert {len(event["ranks"]) for event in admitted} >= {1, 2}, "some are trained by both"
    for job, expected in alone.jobs.items():
        found = moved.jobs[job]
        assert list(found.train_losses) == pytest.approx(list(expected.train_losses), rel=1e-3), job
        ours, theirs = (read_adapter(run.job(job, "last")).extras for run in runs)
        for name, tensor in theirs.items():
            assert float((ours[name] - tensor).norm() / tensor.norm()) < 1e-3, (job, name)
