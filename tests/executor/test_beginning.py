"""What the first event of a run says about its rungs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import make_task, read_journal, run_task

from alto.runs import RunDir

SEEDS = [1, 2, 3]


@pytest.mark.parametrize(
    ("space", "is_noted"),
    [
        ({"lr": [1e-3]}, False),
        ({"lr": [1e-3, 1e-2], "seed": SEEDS}, False),  # 2 configurations: only the rung at 50 % ends one
        ({"lr": [1e-3, 2e-3, 1e-2], "r": [1, 2]}, True),  # the rung at 5 %, on the first step, ends one of 6
    ],
)
def test_few_steps_are_noted_where_a_rung_on_the_first_one_ends_jobs(
    space: dict[str, Any], is_noted: bool, tmp_path: Path
) -> None:
    task = make_task(tmp_path, num_train_epochs=2, search_space=space)
    run = RunDir.create(tmp_path / "runs", task)
    run_task(task, run)
    notes = " ".join(read_journal(run.root)[0]["notes"])
    assert ("have so few steps (the shortest 6)" in notes) is is_noted
