"""Jobs of one bank that differ in everything that a job may train beside low-rank matrices, and in their optimizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeAlias

from noise import same_noise
from oracle import SoloJob, StepFacts
from resident_jobs import DATA, Bank, assert_same_step, state_of
from transformers import PreTrainedModel

from alto.data import TaskData

__all__ = ["KINDS", "ON_BLOOM", "Config", "compare", "kinds_on", "same_but_rounding"]

Config: TypeAlias = dict[str, Any]


def kinds_on(query: str, value: str) -> dict[str, Config]:
    """Return the jobs by name; all can be compared with PEFT alone: those with noise train one row per step.

    Args:
        query, value: Names of two kinds of linear layers of the model.
    """
    found: dict[str, Config] = {
        "plain": {"lr": 1e-3, "r": 4, "batch_size": 3, "weight_decay": 0.1},
        "bias-sgd": {
            **{"lr": 1e-2, "r": 8, "batch_size": 2, "bias": "all", "weight_decay": 0.1},
            **{"optim": "sgd", "optim_args": {"momentum": 0.9}},
        },
        "dora-rmsprop-noise": {
            **{"lr": 1e-3, "r": 4, "batch_size": 1, "use_dora": True, "use_rslora": True, "optim": "rmsprop"},
            **{"rank_pattern": {query: 6}, "alpha_pattern": {value: 3.0}, "neftune_noise_alpha": 5.0},
        },
        "dora-bias-adafactor": {
            **{"lr": 5e-4, "r": 8, "batch_size": 4, "use_dora": True, "bias": "lora_only", "optim": "adafactor"},
            **{"loraplus_lr_ratio": 4.0, "max_grad_norm": 0.05},
        },
        "some-bias-adagrad": {
            **{"lr": 1e-2, "r": 4, "batch_size": 2, "bias": "all", "optim": "adagrad"},
            "target_modules": [query, value],
        },
        "everything-adamw": {
            **{"lr": 1e-3, "r": 8, "batch_size": 1, "use_dora": True, "bias": "all", "use_rslora": True},
            **{"rank_pattern": {value: 2}, "neftune_noise_alpha": 15.0, "weight_decay": 0.1},
        },
    }
    if find_spec("bitsandbytes") is not None:
        found["dora-bias-8bit"] = {
            **{"lr": 1e-3, "r": 8, "batch_size": 3, "use_dora": True, "bias": "all", "optim": "adamw_8bit"}
        }
    return {name: {**config, "seed": 20 + number} for number, (name, config) in enumerate(found.items())}


KINDS = kinds_on("q_proj", "v_proj")

ON_BLOOM = kinds_on("query_key_value", "dense")
# The gradient of its key biases is zero up to rounding, by which Adafactor would scale the whole step.
ON_BLOOM["dora-bias-adafactor"]["bias"] = "none"

same_but_rounding = partial(assert_same_step, rounding=1e-4)
"""Optimizers that divide by the size of gradients, so that a gradient of mere rounding moves a weight as far as any
other."""


def compare(
    model: Callable[[], PreTrainedModel],
    bank: Bank,
    num_steps: int = 3,
    *,
    data: TaskData = DATA,
    solo: type[SoloJob] = SoloJob,
    same: Callable[[StepFacts, StepFacts], None] = same_but_rounding,
    **settings: Any,
) -> None:
    """Check that every job's next steps are those of ``solo``, each from equal state.

    Args:
        model: Makes the base that PEFT adapts.
        bank: The jobs together.
        data: Training data of the jobs.
        same: Compares the results of a step.
        settings: Settings of ``solo``.
    """
    for _ in range(num_steps):
        states = [state_of(bank, job) for job in bank.jobs]
        found = bank.step()
        for job, state in zip(bank.jobs, states, strict=True):
            alone = solo(model(), data.train, job.config, **settings)
            alone.load(*state)
            with same_noise(alone):
                expected = alone.train_step()
            same(found[job.id], expected)
