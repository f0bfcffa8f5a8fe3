"""What the first event of a run says about its rungs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import make_task, read_journal, run_task

from alto.executor import resolve_rungs
from alto.runs import RunDir

SEEDS = [1, 2, 3]
NUM_ROWS = 24


@pytest.mark.parametrize(
    ("space", "early_exit", "is_noted"),
    [
        ({"lr": [1e-3]}, {"rungs": [[0.1, 0.5], [0.15, 0.5]]}, False),
        ({"lr": [1e-3, 1e-2], "seed": SEEDS}, {"rungs": [[0.1, 0.5], [0.15, 0.5]], "min_kept": 2}, False),  # none of 2
        ({"lr": [1e-3, 2e-3, 1e-2], "r": [1, 2]}, {"rungs": [[0.1, 0.5], [0.15, 0.5]]}, True),
        ({"lr": [1e-3, 2e-3, 1e-2], "r": [1, 2]}, {"rungs": [[0.1, 0.5]]}, False),  # no other at its step
        ({"lr": [1e-3, 2e-3, 1e-2], "r": [1, 2]}, {}, False),  # the preset fits itself to the steps
    ],
)
def test_few_steps_are_noted_where_a_user_s_rungs_on_one_step_end_jobs(
    space: dict[str, Any], early_exit: dict[str, Any], is_noted: bool, tmp_path: Path
) -> None:
    task = make_task(tmp_path, num_train_epochs=2, search_space=space, early_exit=early_exit)
    run = RunDir.create(tmp_path / "runs", task)
    run_task(resolve_rungs(task, NUM_ROWS), run)
    started, *later = read_journal(run.root)
    assert ("have so few steps (the shortest 6)" in " ".join(started["notes"])) is is_noted
    ends = [event["step"] for event in later if event["event"] == "job_exited"]
    assert early_exit or min(ends) == 2, (
        "rungs at the first, second and fourth step; the first has a place for every job"
    )
