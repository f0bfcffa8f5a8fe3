"""The ``sequential`` baseline, which people use today: TRL's ``SFTTrainer`` with a PEFT LoRA, one job at a time.

TRL's defaults are kept, except for float32 in place of bfloat16 autocast, so that losses can be compared (on CPUs with
bfloat16 instructions, autocast is faster at batch 8 and slower at batch 1), and except for these choices in its favour:

- gradient checkpointing is off (TRL's default is on);
- rows are tokenised once for all jobs, the base model is loaded once for all jobs, and only the best adapter is saved;
- there is no progress bar and no printing; validation rows are sorted by length.

These properties of TRL are kept: per-batch padding, the fused AdamW, logging every 10 steps, and TRL's own head, which
on a CPU scores every position, prompts included, and computes entropy and token accuracy in each step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch.utils.data import Sampler
from transformers import PrinterCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.baselines.job import (
    IGNORED,
    BaselineJob,
    Evaluation,
    JobSettings,
    Order,
    Prepared,
    check_eval_steps,
    epoch_order,
)
from benchmarks.baselines.stacked import share
from benchmarks.baselines.trl_parts import EvaluateAt, OrderedSampler, training_arguments

__all__ = ["train_one"]


def train_one(
    prepared: Prepared,
    config: Mapping[str, Any],
    *,
    eval_at_steps: Sequence[int],
    eval_batch_size: int = 8,
    order: Order | None = None,
    on_evaluation: Callable[[PeftModel, Evaluation], bool] | None = None,
) -> BaselineJob:
    """Train one job to its end.

    Args:
        config: Canonical keys, see ``JobSettings``.
        eval_at_steps: Optimizer steps after which the whole validation set is evaluated.
        order: Rows of each epoch; by default the shuffle that the job's seed determines, as in ``bare_peft``.
        on_evaluation: Called after every evaluation; its result is ignored.
    """
    start = time.perf_counter()
    settings = JobSettings.of(config)
    order = order or epoch_order(len(prepared.train), settings.seed)
    steps = check_eval_steps(eval_at_steps, settings.total_steps(len(prepared.train)))
    with tempfile.TemporaryDirectory() as folder:
        trainer = _Trainer(
            model=share(prepared.model),
            args=_arguments(settings, folder, eval_batch_size),
            train_dataset=Dataset.from_list(list(prepared.train)),
            eval_dataset=Dataset.from_list(list(prepared.validation)),
            processing_class=prepared.tokenizer,
            peft_config=settings.lora(),
            callbacks=[EvaluateAt(steps)],
            order=order,
            on_evaluation=on_evaluation,
        )
        trainer.remove_callback(PrinterCallback)
        train_start = time.perf_counter()
        trainer.train()
        train_and_eval_s = time.perf_counter() - train_start
    return BaselineJob(
        duration_s=time.perf_counter() - start,
        train_s=train_and_eval_s - trainer.eval_s,
        eval_s=trainer.eval_s,
        train_losses=tuple(torch.stack(trainer.step_losses).tolist()),
        evaluations=tuple(trainer.evaluations),
        samples=trainer.num_samples,
    )


def _arguments(settings: JobSettings, folder: str, eval_batch_size: int) -> SFTConfig:
    shared = training_arguments(SFTConfig, settings, folder, eval_batch_size)
    return SFTConfig(**shared, dataset_kwargs={"skip_prepare_dataset": True})


class _Trainer(SFTTrainer):
    """TRL's trainer with additions for the comparison, which cost a few scalar operations per batch.

    The additions are rows in a given order, the loss of each step, evaluation time, and the validation loss as the mean
    over all trained tokens. TRL's own validation loss weights the mean of each batch by its rows, so it changes with
    the evaluation batch size.
    """

    def __init__(
        self,
        *args: Any,
        order: Order,
        on_evaluation: Callable[[PeftModel, Evaluation], bool] | None,
        **kwargs: Any,
    ) -> None:
        self._order = order
        self._on_evaluation = on_evaluation
        self._num_rows = len(kwargs["train_dataset"])
        self.step_losses: list[torch.Tensor] = []
        self.evaluations: list[Evaluation] = []
        self.eval_s = 0.0
        self.num_samples = 0
        super().__init__(*args, **kwargs)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int]:
        return OrderedSampler(self._order, self._num_rows)

    def training_step(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], *args: Any) -> torch.Tensor:
        self.num_samples += len(inputs["input_ids"])
        loss: torch.Tensor = super().training_step(model, inputs, *args)
        self.step_losses.append(loss)
        return loss

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        num_tokens = (inputs["labels"][:, 1:] != IGNORED).sum()
        self._eval_loss_sum += loss.double().cpu() * num_tokens.cpu()
        self._eval_tokens += num_tokens.cpu()
        return loss, logits, labels

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        start = time.perf_counter()
        self._eval_loss_sum = torch.zeros((), dtype=torch.float64)
        self._eval_tokens = torch.zeros((), dtype=torch.int64)
        metrics = super().evaluate(*args, **kwargs)
        self.evaluations.append(Evaluation(self.state.global_step, float(self._eval_loss_sum / self._eval_tokens)))
        self.eval_s += time.perf_counter() - start
        if self._on_evaluation is not None:
            self._on_evaluation(self.model, self.evaluations[-1])
        return metrics
