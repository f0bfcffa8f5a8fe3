"""The ``sequential`` baseline on preference pairs: TRL's ``DPOTrainer`` with a PEFT LoRA, one job at a time.

TRL's defaults are kept, except for float32 in place of bfloat16 autocast, so that losses can be compared, and except
for these choices in its favour:

- reference log-probabilities are computed before training (``precompute_ref_log_probs``), and kept where TRL itself
  finds them again, so that jobs of one rank and seed compute them once;
- gradient checkpointing is off (TRL's default is on);
- rows are tokenised once for all jobs, the base model is loaded once and copied in memory, and nothing is saved;
- there is no progress bar and no printing; validation rows are sorted by length.

These properties of TRL are kept: per-batch padding of chosen and rejected sequences, each with its prompt; the fused
AdamW; logging every 10 steps; and TRL's own head, which on a CPU scores every position and computes entropy, token
accuracy and mean logits each time.

A job begins with a given adapter, so that its curve can be compared with ALTO's step by step.
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from torch.utils.data import Sampler
from transformers import PrinterCallback
from trl import DPOConfig, DPOTrainer

from alto.lora import AdapterWeights
from benchmarks.baselines.job import BaselineJob, Evaluation, JobSettings, Order, check_eval_steps, epoch_order
from benchmarks.baselines.pairs import PreparedPairs
from benchmarks.baselines.trl_parts import EvaluateAt, OrderedSampler, training_arguments

__all__ = ["train_on_pairs"]


def train_on_pairs(
    prepared: PreparedPairs,
    config: Mapping[str, Any],
    *,
    start: AdapterWeights,
    eval_at_steps: Sequence[int],
    eval_batch_size: int = 8,
) -> BaselineJob:
    """Train one job to its end.

    Args:
        config: Canonical keys, see ``JobSettings``.
        start: The adapter with which the job begins.
        eval_at_steps: Optimizer steps after which the whole validation set is evaluated.
    """
    began = time.perf_counter()
    settings = JobSettings.of(config)
    steps = check_eval_steps(eval_at_steps, settings.total_steps(len(prepared.train)))
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TQDM_DISABLE="1"):
        trainer = _Trainer(
            model=copy.deepcopy(prepared.model),
            args=_arguments(settings, folder, eval_batch_size, prepared.max_length),
            train_dataset=prepared.train,
            eval_dataset=prepared.validation,
            processing_class=prepared.tokenizer,
            peft_config=settings.lora(),
            callbacks=[EvaluateAt(steps)],
            order=epoch_order(len(prepared.train), settings.seed),
        )
        trainer.remove_callback(PrinterCallback)
        _begin_with(trainer.model, start)
        train_began = time.perf_counter()
        trainer.train()
        train_and_eval_s = time.perf_counter() - train_began
    return BaselineJob(
        duration_s=time.perf_counter() - began,
        train_s=train_and_eval_s - trainer.eval_s,
        eval_s=trainer.eval_s,
        train_losses=tuple(torch.stack(trainer.step_losses).tolist()),
        evaluations=tuple(trainer.evaluations),
        samples=trainer.num_samples,
    )


def _arguments(settings: JobSettings, folder: str, eval_batch_size: int, max_length: int) -> DPOConfig:
    return DPOConfig(
        **training_arguments(DPOConfig, settings, folder, eval_batch_size),
        beta=settings.beta,
        loss_type=[settings.loss_type],
        label_smoothing=settings.label_smoothing,
        max_length=max_length,
        precompute_ref_log_probs=True,
    )


@torch.no_grad()
def _begin_with(model: torch.nn.Module, start: AdapterWeights) -> None:
    for name, (a, b) in start.items():
        for part, matrix in (("lora_A", a), ("lora_B", b)):
            model.get_parameter(f"base_model.model.{name}.{part}.default.weight").copy_(matrix.T)


class _Trainer(DPOTrainer):
    """TRL's trainer with additions for the comparison: rows in a given order, the loss of each step, evaluation
    time."""

    def __init__(self, *args: Any, order: Order, **kwargs: Any) -> None:
        self._order = order
        self.step_losses: list[torch.Tensor] = []
        self.evaluations: list[Evaluation] = []
        self.eval_s = 0.0
        self.num_samples = 0
        super().__init__(*args, **kwargs)

    def _prepare_dataset(self, dataset: Dataset, *args: Any) -> Dataset:
        return dataset  # tokenised once for all jobs

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int]:
        return OrderedSampler(self._order, len(self.train_dataset))

    def training_step(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], *args: Any) -> torch.Tensor:
        self.num_samples += len(inputs["input_ids"]) // 2
        loss: torch.Tensor = super().training_step(model, inputs, *args)
        self.step_losses.append(loss)
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        began = time.perf_counter()
        metrics = super().evaluate(*args, **kwargs)
        worth = Evaluation(self.state.global_step, metrics["eval_loss"], metrics["eval_rewards/accuracies"])
        self.evaluations.append(worth)
        self.eval_s += time.perf_counter() - began
        return metrics
