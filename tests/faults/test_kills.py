"""A run that is killed at any instant, however often, ends with the winner, curves and files of one that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from budgets import kills
from forks import run_code

SEEDS = (1,)
"""Seeds of the instants; others by hand: each kill takes five seconds."""


def outcome_of_trials(folder: Path, seed: int, num_kills: int, *kinds: str) -> dict[str, Any]:
    """What ``kill_trials.py`` found; no run differed from one that was left alone."""
    arguments = ["kill_trials.py", str(folder), str(seed), str(num_kills), *kinds]
    # One thread: what it forks has no others.
    code = "import os, sys, torch; torch.set_num_threads(1); os.environ['TOKENIZERS_PARALLELISM'] = 'false'\n"
    code += f"sys.argv = {arguments!r}; import kill_trials; kill_trials.main()"
    done = run_code(code)
    assert done.returncode == 0, done.stderr[-5000:]
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert outcome["problems"] == {}, done.stderr[-5000:]
    assert sum(outcome["kills"].values()) >= num_kills
    return outcome


def test_jobs_that_ran_ahead_of_a_rung_go_on_from_where_they_were(tmp_path: Path) -> None:
    outcome = outcome_of_trials(tmp_path, 1, 3, "ahead")
    assert outcome["kills"]["ahead"] >= 3
    assert outcome["counts"]["seen"]["ahead"] >= 3


@pytest.mark.slow("campaigns")
@pytest.mark.parametrize("seed", SEEDS)
def test_killed_runs_are_resumed_as_if_nothing_had_happened(seed: int, tmp_path: Path) -> None:
    outcome = outcome_of_trials(tmp_path, seed, kills(30))
    kinds = ("file", "line", "weights", "ahead", "time", "command")
    assert all(outcome["kills"][kind] for kind in kinds), outcome["kills"]
    # What the instants were drawn from: hundreds of file operations, every journal line, every checkpoint's weights.
    assert outcome["counts"]["seen"]["file"] > 200
    assert outcome["counts"]["seen"]["line"] > 50
