"""Planned jobs: their rungs once their steps are known, and configurations of clones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from alto.early_exit import policy_from
from alto.errors import JobCommandError, SpecError, UnknownKeyError
from alto.executor import resolve_rungs
from alto.executor.exploration import clone_job, describe_changes
from alto.spec import Job, Task
from alto.spec.objective_settings import OrpoSettings


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
    """720 rows are 720 steps of batch size 1 and 90 of 8. 18 steps are 2.5 % and 20 %; a quarter of 20 % is 5 %."""
    found = rungs_of(warmup_steps=18, search_space={"batch_size": [1, 8]})
    assert found == [(0.05, pytest.approx(1 / 6 / 4)), (0.1, 0.5), (0.25, 0.5), (0.6, 1.0)]


def test_jobs_of_few_steps_are_ranked_after_a_step_that_learns() -> None:
    """150 rows are 19 steps of batch size 8, and the learning rate of the first is 0. So two of the 19 come first."""
    found = rungs_of(150, warmup_ratio=0.03, search_space={"batch_size": [2, 8]})
    assert [progress for progress, _ in found] == [pytest.approx(2 / 19), 0.25, 0.6]
    search = {"algorithm": "tpe", "num_initial_jobs": 2}
    found = rungs_of(150, warmup_ratio=0.03, search=search, search_space={"batch_size": [1, 40], "lr": [1e-4, 1e-3]})
    assert [progress for progress, _ in found] == [0.5, 0.6], "the search may choose jobs of four steps"


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
    keys = {"select_by": "eval_accuracy", "search_space": {"lr": [1e-3, 1e-4]}}
    assert [progress for progress, _ in rungs_of(7200, **keys)] == [0.01, 0.025, 0.05, 0.1, 0.25]
    assert rungs_of(7200, **keys, early_exit={"finish_from": 0.5})[-1] == (0.5, 1.0)


def clone(changes: dict[str, Any], **keys: Any) -> tuple[Job, Job]:
    task = Task(**{"model": "alto-tiny", "dataset": "rows.jsonl"} | keys)
    [origin] = task.jobs
    others = [SimpleNamespace(id=origin.id, config=origin.config)]
    return origin, clone_job(origin, changes, others, warm=False, task=task)


def test_settings_of_the_method_can_be_changed() -> None:
    origin, other = clone({"rl_beta": 0.5, "loss_type": "ipo"}, method="dpo", beta=0.2)
    assert other.id == "job-001"
    assert describe_changes(origin, other) == "beta=0.5, loss_type=ipo"
    assert other.config.replace(beta=0.2, loss_type="sigmoid") == origin.config


def test_a_setting_taken_away_is_the_default_again() -> None:
    _, other = clone({"beta": None}, method="orpo", beta=0.2)
    assert other.config.objective == OrpoSettings(beta=0.1)


def test_weights_taken_away_are_those_of_the_sources_again() -> None:
    sources = [{"path": "maths.jsonl", "weight": 3}, {"path": "chat.jsonl"}]
    _, other = clone({"mixture_weights": None}, dataset=sources, mixture_weights={"maths": 1, "chat": 1})
    assert dict(other.config.mixture_weights or ()) == {"maths": 0.75, "chat": 0.25}


MIXTURE = {"dataset": [{"path": "maths.jsonl"}, {"path": "chat.jsonl"}]}


@pytest.mark.parametrize(
    ("keys", "changes", "error", "reason"),
    [
        (MIXTURE, {"mixture_weights": {"maths": 1}}, SpecError, "a weight for every source .maths, chat., found"),
        (MIXTURE, {"mixture_weights": {"maths": 1, "chat": 1, "code": 2}}, SpecError, "found 'maths', 'chat', 'code'"),
        ({}, {"mixture_weights": {"maths": 1}}, SpecError, "found one dataset"),
        ({}, {"beta": 0.2}, UnknownKeyError, "found with method 'sft'"),
        ({"method": "orpo"}, {"loss_type": "ipo"}, UnknownKeyError, "found with method 'orpo'"),
        ({"method": "dpo"}, {"loss_type": "simpo"}, SpecError, "found 'simpo'"),
        ({"method": "dpo", "label_smoothing": 0.1}, {"loss_type": "ipo"}, SpecError, "label_smoothing should be 0"),
        ({"method": "dpo"}, {"beta": -1}, SpecError, r"^beta .* >= 1e-06"),
        ({"method": "dpo"}, {"beta": 0.1}, JobCommandError, "found that job-000 has it"),
    ],
)
def test_refused(keys: dict[str, Any], changes: dict[str, Any], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        clone(changes, **keys)
