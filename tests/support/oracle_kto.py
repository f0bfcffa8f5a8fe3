"""The oracle of law 1 on labelled replies: one job alone, whose loss TRL's ``KTOTrainer`` computes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from architectures import build_tiny
from oracle import SoloJob, as_trl_has_it, padded_batch
from resident_jobs import make_dataset
from tiny import load_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from alto.data import EncodedDataset, TaskData
from alto.spec import JobConfig
from alto.spec.objective_settings import KtoSettings


def make_labelled(num_rows: int, seed: int) -> EncodedDataset:
    """Return rows of the counting language, about two thirds of them desirable."""
    labels = tuple((row * 5 + seed) % 3 != 0 for row in range(num_rows))
    return replace(make_dataset(num_rows, seed), labels=labels)


LABELLED = TaskData(train=make_labelled(28, seed=1), validation=make_labelled(9, seed=2))


class SoloKto(SoloJob):
    """One job on labelled replies, whose loss TRL computes.

    Args:
        trl: Trainer from :func:`make_kto_trainer`; several jobs may share it.
        reference: Model from :func:`oracle.reference_model`.
        shift: Number of rows by which the replies of the estimate are rotated, for tests that must fail.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        dataset: EncodedDataset,
        config: JobConfig,
        *,
        trl: Any,
        reference: PreTrainedModel,
        shift: int = 1,
        **settings: Any,
    ) -> None:
        from trl.trainer.utils import add_fused_lm_head

        super().__init__(base, dataset, config, **settings)
        self._trl, self._reference, self._shift = trl, reference, shift
        add_fused_lm_head(self.model.get_base_model(), outputs=("log_probs", "entropy", "mean_logits", "is_top1"))

    @torch.no_grad()
    def evaluate(self, dataset: EncodedDataset) -> dict[str, float]:
        """Return TRL's metrics, and ``loss``, of all rows of ``dataset`` as one batch."""
        self._trl._metrics["eval"].clear()
        own, self._dataset = self._dataset, dataset
        rows = range(len(dataset))
        self._rows = rows
        loss = self._loss(padded_batch(dataset, rows))
        self._dataset = own
        return {"loss": float(loss)} | {name: values[-1] for name, values in self._trl._metrics["eval"].items()}

    def train_step(self) -> Any:
        self._rows = self._order.rows_of_step(self.step + self._first_step)
        return super().train_step()

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        trl, settings = self._trl, self.config.objective
        assert isinstance(settings, KtoSettings)
        assert self._dataset.labels is not None
        trl.ref_model, trl.beta, trl.loss_type = self._reference, settings.beta, settings.loss_type
        trl.desirable_weight, trl.undesirable_weight = settings.desirable_weight, settings.undesirable_weight
        trl.calculate_KL = settings.loss_type == "kto"
        mismatched = as_trl_has_it(
            padded_batch(_rotated(self._dataset, self._rows, self._shift), range(len(self._rows)))
        )
        given = as_trl_has_it(batch) | {f"KL_{name}": tensor for name, tensor in mismatched.items()}
        given["label"] = torch.tensor([self._dataset.labels[row] for row in self._rows])
        loss: Tensor = trl._compute_loss(self.model, given, return_outputs=False)
        return loss


def _rotated(dataset: EncodedDataset, rows: Sequence[int], shift: int) -> EncodedDataset:
    """Return each prompt with the reply ``shift`` rows before it; written without ALTO's own function."""
    prompts, replies = [], []
    for row in rows:
        ids, begin = dataset.input_ids[row].tolist(), int((dataset.targets[row] >= 0).nonzero()[0]) + 1
        prompts.append(ids[:begin])
        replies.append(ids[begin:])
    replies = replies[-shift:] + replies[:-shift] if shift else replies
    input_ids, targets = [], []
    for prompt, reply in zip(prompts, replies, strict=True):
        input_ids.append(torch.tensor(prompt + reply))
        targets.append(torch.tensor([-100] * (len(prompt) - 1) + reply + [-100]))
    return EncodedDataset(input_ids=tuple(input_ids), targets=tuple(targets))


def make_kto_trainer(folder: Path) -> Any:
    """Return TRL's trainer, of which only the loss is used, not its model and data."""
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    model, tokenizer = build_tiny("llama"), load_tokenizer()
    settings = KTOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
    )
    rows = Dataset.from_list([{"prompt": "1", "completion": str(n), "label": n > 2} for n in (2, 3)])
    trainer = KTOTrainer(model, copy.deepcopy(model), args=settings, train_dataset=rows, processing_class=tokenizer)
    trainer.model.eval()  # its metrics are computed in evaluation mode
    return trainer
