"""Common parts of the baselines on TRL's trainers: their arguments, rows in a given order, evaluation at given
steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from benchmarks.baselines.job import JobSettings, Order

__all__ = ["EvaluateAt", "OrderedSampler", "training_arguments"]


def training_arguments(
    config_class: type[TrainingArguments], settings: JobSettings, folder: str, eval_batch_size: int
) -> dict[str, Any]:
    """Return arguments of ``config_class``: the job's own settings; float32 on a CPU; no recomputation, saving or
    printing."""
    # Transformers 5 has renamed the option; versions with the new name warn about the old one.
    names = {item.name for item in fields(config_class)}
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    return {
        "output_dir": folder,
        "learning_rate": settings.learning_rate,
        "per_device_train_batch_size": settings.per_device_train_batch_size,
        "per_device_eval_batch_size": eval_batch_size,
        "num_train_epochs": settings.num_train_epochs,
        "lr_scheduler_type": settings.scheduler,
        "warmup_steps": settings.warmup_steps,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm or 0.0,
        "seed": settings.seed,
        checkpointing: False,
        "bf16": torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


class OrderedSampler(Sampler[int]):
    """The rows of every epoch in a given order."""

    def __init__(self, order: Order, num_rows: int) -> None:
        self._order = order
        self._num_rows = num_rows
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self._num_rows

    def __iter__(self) -> Iterator[int]:
        return iter(self._order(self._epoch))


class EvaluateAt(TrainerCallback):
    """Evaluation at given steps, because fractions of a job's own steps are no fixed interval."""

    def __init__(self, steps: frozenset[int]) -> None:
        self._steps = steps

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        control.should_evaluate = state.global_step in self._steps
        return control
