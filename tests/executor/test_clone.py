"""A clone's configuration is checked as a task's own is, settings of the method included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from alto.errors import JobCommandError, SpecError, UnknownKeyError
from alto.executor.exploration import clone_job, describe_changes
from alto.spec import Job, Task
from alto.spec.objective_settings import OrpoSettings


def clone(changes: dict[str, Any], **keys: Any) -> tuple[Job, Job]:
    """The only job of a task, and a clone of it."""
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
