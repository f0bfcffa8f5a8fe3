"""By what a task may choose its adapter, and what an evaluation is worth to it."""

from __future__ import annotations

import math

import pytest

from alto.errors import SpecError
from alto.spec import Task
from alto.spec.scoring import LOSS, check_metric, loss_scale, metric_notes, score_of

ROWS = {"model": "alto-tiny", "dataset": "pairs.jsonl"}


def test_a_task_chooses_by_the_loss_unless_told_otherwise() -> None:
    assert Task(**ROWS).metric == LOSS
    assert Task(**ROWS, method="dpo").metric == LOSS


@pytest.mark.parametrize(("method", "metric"), [("dpo", "reward_accuracy"), ("orpo", "reward_margin"), ("sft", "loss")])
def test_a_metric_of_the_method_is_kept_in_its_file(method: str, metric: str) -> None:
    task = Task(**ROWS, method=method, metric=metric)
    assert task.metric == metric
    assert Task(**task.to_dict()) == task


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"metric": "reward_accuracy"},
            "metric should be loss with method 'sft', found 'reward_accuracy'.*dpo or orpo",
        ),
        (
            {"method": "dpo", "metric": "wins"},
            "metric should be loss or reward_accuracy or reward_margin with method 'dpo', found 'wins'.*correct it",
        ),
        ({"method": "dpo", "metric": "accuracy"}, "found 'accuracy'.*change the method to classification"),
        ({"method": "dpo", "metric": "kl"}, "found 'kl'"),
        ({"method": "dpo", "metric": 3}, "metric"),
        ({"method": "dpo", "metric": ""}, "metric"),
    ],
)
def test_a_metric_that_the_method_does_not_measure_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Task(**ROWS, **settings)


def test_a_method_of_a_package_has_scores_of_its_own() -> None:
    check_metric("win_rate", "my_method", ("win_rate",))
    with pytest.raises(SpecError, match="loss or win_rate with method 'my_method', found 'reward_accuracy'"):
        check_metric("reward_accuracy", "my_method", ("win_rate",))


@pytest.mark.parametrize(
    ("metric", "space", "said"),
    [
        (LOSS, {"beta": [0.1, 0.2]}, "Jobs differ in beta, "),
        (LOSS, {"beta": [0.1, 0.2], "loss_type": ["ipo", "sigmoid"]}, "Jobs differ in beta and loss_type, "),
        (
            LOSS,
            {"label_smoothing": [0.0, 0.2]},
            "Jobs differ in label_smoothing, ",
        ),
        (LOSS, {"lr": [1e-4, 2e-4]}, ""),
        ("reward_margin", {"beta": [0.1, 0.2]}, "Jobs differ in beta, and therefore in the scale of the reward margin"),
        ("reward_margin", {"label_smoothing": [0.0, 0.2]}, ""),
        ("reward_accuracy", {"beta": [0.1, 0.2]}, ""),
    ],
)
def test_who_compares_losses_of_other_scales_is_told(metric: str, space: dict[str, list[object]], said: str) -> None:
    task = Task(**ROWS, method="dpo", metric=metric, search_space=space)
    notes = metric_notes(task.metric, task.method, [job.config for job in task.jobs])
    assert "".join(notes).startswith(said)
    assert bool(notes) is bool(said)


def test_what_an_evaluation_is_worth() -> None:
    assert score_of("reward_accuracy", {"reward_accuracy": 0.75, "kl": 3.0}) == 0.75
    assert score_of(LOSS, {"reward_accuracy": 0.75}) == score_of(LOSS, {}) == 0.0
    with pytest.raises(KeyError):
        score_of("reward_accuracy", {})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "inf"])
def test_a_value_that_is_not_finite_is_worth_the_least_and_can_be_compared(value: float | str) -> None:
    score = score_of("reward_margin", {"reward_margin": value})
    assert math.isfinite(score)
    assert score < -1e300


def test_settings_of_the_method_decide_the_scale_of_a_loss_and_no_others() -> None:
    task = Task(**ROWS, method="dpo", search_space={"beta": [0.1, 0.2], "lr": [1e-4, 2e-4]})
    scales = [loss_scale(job.config.to_dict()) for job in task.jobs]
    assert scales[0] == scales[1] != scales[2] == scales[3]
    # Of a method that a package registers.
    assert loss_scale({"r": 8, "target_margin": 0.5}) != loss_scale({"r": 8, "target_margin": 1.0})
    # As version 0.1 wrote the configuration of a job of orpo.
    assert loss_scale({"r": 8, "beta": 0.1, "loss_type": None}) == loss_scale({"r": 16, "beta": 0.1})
