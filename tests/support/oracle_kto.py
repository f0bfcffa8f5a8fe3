"""The oracle of law 1 on labelled replies: one job alone, whose loss TRL's ``KTOTrainer`` computes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from architectures import build_tiny
from oracle import SoloWithReference, as_trl_has_it, padded_batch, quiet_settings
from resident_jobs import make_dataset
from tiny import load_tokenizer
from torch import Tensor

from alto.data import EncodedDataset, TaskData
from alto.spec.objective_settings import KtoSettings


def make_labelled(num_rows: int, seed: int) -> EncodedDataset:
    """Return rows of the counting language, about two thirds of them desirable."""
    labels = tuple((row * 5 + seed) % 3 != 0 for row in range(num_rows))
    return replace(make_dataset(num_rows, seed), labels=labels)


LABELLED = TaskData(train=make_labelled(28, seed=1), validation=make_labelled(9, seed=2))


class SoloKto(SoloWithReference):
    """One job on labelled replies, whose loss TRL's ``KTOTrainer`` computes.

    Args:
        shift: Number of rows by which the replies of the estimate are rotated, for tests that must fail.
    """

    def __init__(self, *args: Any, shift: int = 1, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._shift = shift

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
    settings = KTOConfig(**quiet_settings(folder))
    rows = Dataset.from_list([{"prompt": "1", "completion": str(n), "label": n > 2} for n in (2, 3)])
    trainer = KTOTrainer(model, copy.deepcopy(model), args=settings, train_dataset=rows, processing_class=tokenizer)
    trainer.model.eval()  # its metrics are computed in evaluation mode
    return trainer
