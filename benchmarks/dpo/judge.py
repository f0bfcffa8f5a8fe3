"""Judges a finished adapter on pairs with PEFT and the model's own forward pass, without any of ALTO's arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import Tensor
from torch.nn import functional as F

from benchmarks.baselines.job import IGNORED
from benchmarks.baselines.pairs import PreparedPairs

__all__ = ["Judge", "Worth"]

BATCH_SIZE = 32
"""Number of sequences in one forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """The quality of an adapter on some pairs.

    Attributes:
        loss: Loss of DPO (``sigmoid``), nats per pair.
        accuracy: Share of the pairs, in [0, 1], whose chosen reply has gained more on the base than the rejected one.
    """

    loss: float
    accuracy: float


class Judge:
    """Judges adapters on ``pairs``; the base is evaluated only once."""

    def __init__(self, prepared: PreparedPairs, pairs: Sequence[Mapping[str, list[int]]], beta: float) -> None:
        self._base = prepared.model
        self._pad_id = prepared.tokenizer.pad_token_id
        self._pairs = pairs
        self._beta = beta
        self._references_Q2 = reply_log_probs(self._base, pairs, self._pad_id)

    def worth(self, adapter_dir: str) -> Worth:
        """Return the quality of the adapter in ``adapter_dir``."""
        model = PeftModel.from_pretrained(copy.deepcopy(self._base), adapter_dir).eval()
        log_ratios_Q2 = reply_log_probs(model, self._pairs, self._pad_id) - self._references_Q2
        margins_Q = log_ratios_Q2[:, 0] - log_ratios_Q2[:, 1]
        return Worth(
            loss=float(-F.logsigmoid(self._beta * margins_Q).mean()),
            accuracy=float((margins_Q > 0).double().mean()),
        )


@torch.no_grad()
def reply_log_probs(model: torch.nn.Module, pairs: Sequence[Mapping[str, list[int]]], pad_id: int) -> Tensor:
    """Return log-probabilities of the chosen and the rejected reply of every pair, ``[Q, 2]`` float64 nats."""
    sequences = [(pair["prompt_ids"], pair[f"{reply}_ids"]) for pair in pairs for reply in ("chosen", "rejected")]
    by_length = sorted(range(len(sequences)), key=lambda index: sum(map(len, sequences[index])))
    found = torch.zeros(len(sequences), dtype=torch.float64)
    for first in range(0, len(sequences), BATCH_SIZE):
        batch = by_length[first : first + BATCH_SIZE]
        longest = sum(map(len, sequences[batch[-1]]))
        ids, mask = torch.full((len(batch), longest), pad_id), torch.zeros(len(batch), longest, dtype=torch.long)
        targets = torch.full((len(batch), longest), IGNORED)
        for row, index in enumerate(batch):
            prompt, reply = sequences[index]
            length = len(prompt) + len(reply)
            ids[row, :length], mask[row, :length] = torch.tensor([*prompt, *reply]), 1
            targets[row, len(prompt) : length] = torch.tensor(reply)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        losses = F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED, reduction="none")
        found[batch] = -losses.view(len(batch), -1).double().sum(1)
    return found.view(-1, 2)
