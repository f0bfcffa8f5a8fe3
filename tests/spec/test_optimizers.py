"""Optimizers by transformers' names, and their ``optim_args``."""

from __future__ import annotations

from typing import Any

import pytest

from alto.errors import SpecError, UnsupportedError
from alto.spec import JobConfig, Task


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optim": "lion_32bit"}, "expected one of adamw_torch, .*sgd, .* found 'lion_32bit': of bitsandbytes'"),
        ({"optim": "galore_adamw"}, "projects the gradients"),
        ({"optim": "schedule_free_sgd"}, "two sets of weights"),
    ],
)
def test_other_optimizers_are_refused_with_the_reason(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        JobConfig(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optim_args": "momentum=0.9"}, "of optim 'adamw_torch' \\(none\\), found 'momentum'"),
        ({"optim": "adagrad", "optim_args": {"alpha": 0.9}}, "of optim 'adagrad' \\(eps, lr_decay\\)"),
        ({"optim": "sgd", "optim_args": "weight_decay=0.1"}, "Set the key"),
        ({"optim": "sgd", "optim_args": "momentum"}, "should map settings of the optimizer"),
        ({"optim": "sgd", "optim_args": "momentum=0.1,momentum=0.2"}, "should map settings of the optimizer"),
        ({"optim": "sgd", "optim_args": "momentun=0.9"}, "found 'momentun'"),
        ({"optim": "sgd", "optim_args": "momentum=-1"}, "a finite number >= 0 for momentum, found '-1'"),
        ({"optim": "sgd", "optim_args": {"momentum": True}}, "a finite number >= 0 for momentum, found True"),
        ({"optim": "sgd", "optim_args": "nesterov=maybe,momentum=0.9"}, "true or false for nesterov"),
        ({"optim": "sgd", "optim_args": "nesterov=true"}, "momentum above 0 and no dampening"),
        ({"optim": "adafactor", "optim_args": "eps=1e-3"}, "of optim 'adafactor' \\(none\\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        JobConfig(**given)


def test_arguments_are_written_as_a_mapping() -> None:
    config = JobConfig(optim="sgd", optim_args="nesterov=yes, momentum=0.9")
    assert config.to_dict()["optim_args"] == {"momentum": 0.9, "nesterov": True}
    assert JobConfig(**config.to_dict()) == config


def test_optimizers_and_their_arguments_are_searched_together() -> None:
    space = {
        "paired": {"optim": ["adamw_torch", "sgd", "sgd"], "optim_args": [{}, "momentum=0.9", {"momentum": 0.5}]},
        "learning_rate": [1e-3, 1e-2],
    }
    jobs = Task(model="alto-tiny", dataset="rows.jsonl", search_space=space).jobs
    assert {(job.config.optim, job.config.optim_args) for job in jobs} == {
        ("adamw_torch", ()),
        ("sgd", (("momentum", 0.9),)),
        ("sgd", (("momentum", 0.5),)),
    }
    assert len(jobs) == 6


def test_the_place_of_an_error_is_written_as_in_a_task_file() -> None:
    def message(**keys: Any) -> str:
        with pytest.raises(SpecError) as caught:
            Task(model="alto-tiny", dataset="rows.jsonl", **keys)
        return str(caught.value)

    space = {"optim": ["sgd", "adamw_torch"], "optim_args": [{"momentum": 0.9}]}
    assert message(search_space=space).startswith("In job-001 (optim=adamw_torch, optim_args={'momentum': 0.9}): optim")
    assert message(method="kto", batch_size=1).startswith("In job-000: per_device_train_batch_size should be above 1")
