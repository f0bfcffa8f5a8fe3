"""Keys of tasks whose method generates: rewards, their weights, and settings with TRL's names."""

from __future__ import annotations

import re
from typing import Any

import pytest

from alto.errors import SpecError, UnsupportedError
from alto.spec import GrpoSettings, Task, loss_scale, metric_notes


def score(**_: Any) -> list[float]:
    return []


def task(**changes: Any) -> Task:
    return Task(**({"model": "m", "dataset": "d", "method": "grpo", "reward_funcs": ["numeric"]} | changes))


def test_rewards_are_names_mappings_or_functions() -> None:
    found = task(reward_funcs=["exact", {"scorer": "regex", "pattern": "<a>(.*)</a>"}, "my.module:score", score])
    assert [scoring.scorer for scoring in found.reward_funcs] == ["exact", "regex", "python", "python"]
    assert found.reward_funcs[2].function == "my.module:score"
    assert found.reward_funcs[3].function == f"{__name__}:score"
    assert task(reward_funcs="numeric") == task()
    assert Task(**found.to_dict()) == found


def test_a_task_that_calls_a_function_needs_trust() -> None:
    assert not task().needs_trust
    assert task(reward_funcs=["numeric", "my.module:score"]).needs_trust


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_funcs": []}, "reward_funcs is missing"),
        (
            {"reward_funcs": None},
            "reward_funcs should be scorers, mappings of their settings, or functions, found None",
        ),
        ({"reward_funcs": ["nonsense"]}, "should be the dotted name of a function in a module, found 'nonsense'"),
        ({"reward_funcs": ["multiple_choice"]}, "expected scorers of generated text, found multiple_choice"),
        (
            {"reward_funcs": [{"scorer": "exact", "num_rows": 3}]},
            "expected only settings of the scorer, found num_rows",
        ),
        ({"reward_weights": [1.0, 2.0]}, "should be 1 numbers, one for each of reward_funcs, found [1.0, 2.0]"),
        ({"reward_weights": [float("nan")]}, "found nan (a number). Write a finite number"),
        ({"method": "sft"}, "reward_funcs should come with a method that generates, found method 'sft'"),
        ({"num_iterations": 2}, "num_iterations should be 1, found 2"),
        ({"per_device_train_batch_size": 6}, "should be a multiple of num_generations"),
        ({"num_generations": 1}, "num_generations"),
        ({"top_p": 0}, "top_p"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        task(**changes)


def test_several_gpus_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="num_gpus should be 1 with method grpo, found 2"):
        task(num_gpus=2)


@pytest.mark.parametrize(("given", "found"), [(True, "group"), (False, "none"), ("batch", "batch")])
def test_scale_rewards_has_trls_spellings(given: object, found: str) -> None:
    assert GrpoSettings(scale_rewards=given).scale_rewards == found


def test_mean_rewards_of_all_settings_are_comparable() -> None:
    configs = [job.config for job in task(search_space={"num_generations": [4, 8], "beta": [0.0, 0.1]}).jobs]
    assert {loss_scale(config.model_dump()) for config in configs} == {""}
    assert metric_notes("loss", "grpo", configs) == ()


def test_tasks_of_other_methods_are_written_as_before() -> None:
    assert not {"reward_funcs", "reward_weights"} & Task(model="m", dataset="d").to_dict().keys()


def test_rungs_come_late() -> None:
    assert task().early_exit.preset == "preferences"
