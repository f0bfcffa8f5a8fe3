"""Runs and shared executors killed at any instant, however often, end with the same results as undisturbed ones."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from budgets import kills
from forks import run_code
from shared_runs import SharedRuns, assert_as_alone, shared_tasks
from tiny import save_model

from alto.cluster import AttemptEnded, Outcome
from alto.cluster.local import LocalCluster
from alto.engine.runner import TaskRunner
from alto.spec import Task

SEEDS = (1,)
"""Seeds of the instants; pass others by hand, since each kill takes five seconds."""


def outcome_of_trials(folder: Path, seed: int, num_kills: int, *kinds: str) -> dict[str, Any]:
    """Return the counts of ``kill_trials.py``, and check that no run differed from an undisturbed one."""
    arguments = ["kill_trials.py", str(folder), str(seed), str(num_kills), *kinds]
    # One thread, because it forks.
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
    # The instants were drawn from hundreds of file operations, all journal lines, and the weights of all checkpoints.
    assert outcome["counts"]["seen"]["file"] > 200
    assert outcome["counts"]["seen"]["line"] > 50


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Task]:
    model = save_model(tmp_path_factory.mktemp("model"))
    tasks = shared_tasks(model, tmp_path_factory.mktemp("rows"), checkpoint_interval_s=0.01)
    return {**tasks, "dogwood": tasks["cedar"].replace(name="dogwood", early_exit={"enabled": True})}


@pytest.fixture(scope="module")
def alone(tasks: Mapping[str, Task], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    folder = tmp_path_factory.mktemp("alone")
    return {name: TaskRunner().begin(task, folder).run_dir for name, task in tasks.items()}


def killed_after(runs: SharedRuns, num_entries: int, attempt: int) -> bool:
    """Kill the process after its tasks have written this many journal lines; return whether any was not done by
    then."""
    if runs.until_written(num_entries, attempt):
        os.kill(runs.pid, signal.SIGKILL)
    return any(runs.until_ended(name, attempt).outcome is Outcome.LOST for name in runs.attached)


@pytest.mark.slow("campaigns")
def test_four_tasks_whose_process_is_killed_again_and_again(
    tasks: Mapping[str, Task], alone: Mapping[str, str], tmp_path: Path
) -> None:
    draw = random.Random(20)
    num_kills, trial, wanted = 0, 0, kills(18)  # each takes two to five seconds
    while num_kills < wanted:
        trial += 1
        (tmp_path / str(trial)).mkdir()
        cluster = LocalCluster()
        runs = SharedRuns(cluster, tmp_path / str(trial), tasks)
        is_open, attempt = dict.fromkeys(tasks, True), 0
        while any(is_open.values()):
            attempt += 1
            runs.attached = [name for name, open_ in is_open.items() if open_]
            for name in runs.attached:
                runs.attach(name, attempt)
            num_kills += killed_after(runs, draw.randrange(0, 80) if num_kills < wanted else 10**9, attempt)
            for name in runs.attached:
                ended = runs.until_ended(name, attempt)
                assert isinstance(ended, AttemptEnded)
                assert ended.outcome in (Outcome.LOST, Outcome.FINISHED), ended
                is_open[name] = ended.outcome is Outcome.LOST
        cluster.close()
        for name in tasks:
            assert_as_alone(runs.roots[name], alone[name])
