"""What a task's rungs become once the steps of its jobs are known."""

from __future__ import annotations

import pytest

from alto.early_exit import policy_from
from alto.executor import resolve_rungs
from alto.spec import Task


def rungs_of(num_rows: int = 720, **changes: object) -> list[tuple[float, float]]:
    settings = {"model": "alto-tiny", "dataset": "rows.jsonl", "num_train_epochs": 1} | changes
    resolved = resolve_rungs(Task(**settings), num_rows).early_exit
    assert resolved.preset is None
    return [(rung.progress, rung.keep) for rung in resolved.selection_rungs]


@pytest.mark.parametrize(("space", "selects"), [({}, False), ({"seed": [1, 2]}, False), ({"lr": [1e-3, 1e-4]}, True)])
def test_a_single_configuration_is_not_selected_from(space: dict[str, list[float]], selects: bool) -> None:
    task = Task(model="alto-tiny", dataset="rows.jsonl", search_space=space)
    assert bool(policy_from(resolve_rungs(task, 720).early_exit).rungs) is selects


def test_a_run_that_an_earlier_version_began_selects_as_it_did() -> None:
    task = Task(model="alto-tiny", dataset="rows.jsonl")
    assert resolve_rungs(task, 720, begins=False).early_exit == task.early_exit.resolved()


def test_without_a_rise_the_rungs_of_the_preset_stay() -> None:
    assert [progress for progress, _ in rungs_of(7200)] == [0.01, 0.025, 0.05, 0.1, 0.25, 0.6]


def test_the_longest_rise_of_all_jobs_counts() -> None:
    """720 rows are 720 steps of batch size 1 and 90 of 8: 18 steps are 2.5 % and a fifth, whose quarter is 5 %."""
    found = rungs_of(warmup_steps=18, search_space={"batch_size": [1, 8]})
    assert found == [(0.05, pytest.approx(1 / 6 / 4)), (0.1, 0.5), (0.25, 0.5), (0.6, 1.0)]


def test_a_rise_that_never_ends_leaves_two_rungs() -> None:
    assert [progress for progress, _ in rungs_of(warmup_steps=100, batch_size=8)] == [0.25, 0.6]


def test_rungs_at_which_answers_are_scored_stay() -> None:
    scored = {"scorer": "exact", "at": [0.1]}
    assert 0.1 in [at for at, _ in rungs_of(12, select_by=scored, search_space={"lr": [1e-3, 1e-4]})]


def test_a_run_of_few_steps_that_is_resumed_keeps_its_rungs() -> None:
    task = Task(model="alto-tiny", dataset="rows.jsonl", num_train_epochs=1, search_space={"lr": [1e-3, 1e-4]})
    begun = resolve_rungs(task, 12)
    assert resolve_rungs(begun, 12, begins=False) == resolve_rungs(begun, 12) == begun


def test_rungs_of_a_user_and_of_the_paper_stay() -> None:
    assert rungs_of(warmup_ratio=0.1, early_exit={"policy": "paper"}) == [(0.05, 0.25)]
    assert rungs_of(warmup_ratio=0.1, early_exit={"rungs": [[0.02, 0.5]]}) == [(0.02, 0.5)]
    assert [at for at, _ in rungs_of(warmup_ratio=0.1, early_exit={"finish_from": 0.08})] == [0.025, 0.05, 0.08]


def test_where_answers_choose_all_finalists_train_to_their_end() -> None:
    asked = {"select_by": "eval_accuracy", "search_space": {"lr": [1e-3, 1e-4]}}
    assert [progress for progress, _ in rungs_of(7200, **asked)] == [0.01, 0.025, 0.05, 0.1, 0.25]
    assert rungs_of(7200, **asked, early_exit={"finish_from": 0.5})[-1] == (0.5, 1.0)
