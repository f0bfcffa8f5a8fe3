"""Measurement of adapters on held-out rows without generation: the loss, and the preference between two replies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.backbone import Backbone, is_out_of_memory, limits_of, release_memory
from alto.data import (
    Conversation,
    EncodedDataset,
    Encoding,
    JobRows,
    Message,
    TokenBatch,
    collate,
    split_into_micro_batches,
    tokenize,
)
from alto.errors import DataError, DeviceMemoryError, NoResultError
from alto.evaluation.generate import max_positions
from alto.evaluation.scorers import OnTurn, reply_position
from alto.lora import ServedAdapters
from alto.objectives import read_states, token_losses
from alto.objectives.base import run_sums
from alto.objectives.labelled import label_f1
from alto.records import LabelSet, RowLabel


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutPass:
    """The measurement of adapters on every row of a dataset.

    Attributes:
        names: Names of the adapters in error messages.
        on_done: Called after every micro-batch with its number of rows; a row counts once per adapter.
    """

    backbone: Backbone
    served: ServedAdapters
    dataset: EncodedDataset
    names: Sequence[str]
    max_tokens_per_pass: int
    on_done: Callable[[int], None]

    def losses(self) -> list[float]:
        """Return the validation loss of each adapter, computed as in training: nats per trained token over all rows.

        Raises:
            NoResultError: A loss is not a finite number.
        """
        totals = [0.0] * len(self.served)
        for batch, losses_S in self._micro_batches(token_losses):
            for slot, total in zip(batch.slots, run_sums(losses_S, batch.job_targets).tolist(), strict=True):
                totals[slot] += total
        losses = [total / self.dataset.num_trained_tokens for total in totals]
        self._check_finite(losses)
        return losses

    def log_probs(self) -> list[Tensor]:
        """Return each adapter's log-probability of the trained tokens of every sequence, float64, nats.

        A row has one sequence, a pair has two.

        Raises:
            NoResultError: A log-probability is not a finite number.
        """
        parts: list[list[Tensor]] = [[] for _ in range(len(self.served))]
        for batch, losses_S in self._micro_batches(token_losses):
            of_sequences = -run_sums(losses_S, batch.sequence_targets)
            for slot, of_slot in zip(batch.slots, of_sequences.split(batch.job_sequences), strict=True):
                parts[slot].append(of_slot)
        return self._joined(parts)

    def logits(self, heads: Sequence[Tensor]) -> list[Tensor]:
        """Return the logits of all rows for each adapter with its head ``[K, H]``, ``[Q, K]`` float64.

        Raises:
            NoResultError: A logit is not a finite number.
        """
        on_device = [head_KH.to(self.backbone.device) for head_KH in heads]
        parts: list[list[Tensor]] = [[] for _ in heads]
        for batch, states_QH in self._micro_batches(read_states):
            for slot, of_slot_QH in zip(batch.slots, states_QH.split(batch.job_rows), strict=True):
                head_KH = on_device[slot]
                parts[slot].append(F.linear(of_slot_QH.to(head_KH.dtype), head_KH).double().cpu())
        return self._joined(parts)

    @torch.no_grad()
    def _micro_batches(self, compute: Callable[[Backbone, TokenBatch], Tensor]) -> Iterator[tuple[TokenBatch, Tensor]]:
        """Run every row with every adapter; yield each micro-batch and the result of ``compute`` for it."""
        backbone, served = self.backbone, self.served
        rows, shares_beginnings = tuple(range(len(self.dataset))), backbone.shares_beginnings
        everything = [
            JobRows(self.dataset, slot, rows, shares_beginnings=shares_beginnings) for slot in range(len(served))
        ]
        for jobs in split_into_micro_batches(
            everything, self.max_tokens_per_pass, split_jobs=True, is_padded=backbone.is_padded
        ):
            batch = collate(jobs, backbone.device)
            counts = dict(zip(batch.slots, batch.job_tokens, strict=True))
            with served.use(served.schedule([counts.get(slot, 0) for slot in range(len(served))])):
                found_S = compute(backbone, batch)
            yield batch, found_S
            self.on_done(sum(batch.job_rows))

    def _joined(self, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        joined = [torch.cat(list(of_slot)) for of_slot in parts]
        self._check_finite([float(of_slot.sum()) for of_slot in joined])
        return joined

    def _check_finite(self, values: Sequence[float]) -> None:
        broken = [(name, value) for name, value in zip(self.names, values, strict=True) if not math.isfinite(value)]
        if broken:
            raise NoResultError(
                f"expected a finite held-out loss, found {broken[0][1]} for {', '.join(name for name, _ in broken)}; "
                "the weights of these adapters or of the base model are broken, or the base model's precision is too "
                "low; leave these adapters out"
            )


# Evaluation of classifiers and regressors: predictions of their heads for held-out texts, compared with the labels.
#
# Shapes: ``Q`` rows, ``H`` hidden size, ``K`` labels.


def label_metrics(logits_QK: Tensor, dataset: EncodedDataset) -> Mapping[str, Any]:
    """Compare predictions with labels, and return the fields of :class:`alto.records.Evaluation` for this kind of
    label."""
    assert dataset.classes is not None, "texts have labels"
    assert dataset.label_set is not None, "texts have labels"
    labels = dataset.label_set
    actual = torch.tensor(dataset.classes, dtype=torch.float64)
    if labels.problem_type == "regression":
        return {"loss": None, "mse": float(F.mse_loss(logits_QK, actual)), "spearman": _spearman(logits_QK, actual)}
    if labels.problem_type == "multi_label_classification":
        loss = F.binary_cross_entropy_with_logits(logits_QK, actual)
        return {"loss": float(loss), **_agreement(logits_QK > 0, actual > 0, labels)}
    predicted_Q, actual_Q = logits_QK.argmax(1), actual.long()
    every_K = torch.arange(labels.num_labels)
    pairs = Counter(zip(actual_Q.tolist(), predicted_Q.tolist(), strict=True))
    confusion: dict[str, dict[str, int]] = {}
    for (one, other), count in sorted(pairs.items()):
        confusion.setdefault(labels.names[one], {})[labels.names[other]] = count
    return {
        "loss": float(F.cross_entropy(logits_QK, actual_Q)),
        **_agreement(predicted_Q[:, None] == every_K, actual_Q[:, None] == every_K, labels),
        "confusion": confusion,
    }


def predicted_labels(logits_QK: Tensor, labels: LabelSet) -> list[tuple[RowLabel, float | tuple[float, ...] | None]]:
    """Return the predicted label of every row, with the probability of each predicted class; None for a regression."""
    if labels.problem_type == "regression":
        return [(tuple(row), None) for row in logits_QK.tolist()]
    if labels.problem_type == "multi_label_classification":
        chances, marks = logits_QK.sigmoid().tolist(), (logits_QK > 0).double().tolist()
        return [
            (tuple(own), tuple(chance for chance, mark in zip(of_row, own, strict=True) if mark))
            for of_row, own in zip(chances, marks, strict=True)
        ]
    chances_Q, predicted_Q = logits_QK.softmax(1).max(1)
    return list(zip(predicted_Q.tolist(), chances_Q.tolist(), strict=True))


def _agreement(predicted_QK: Tensor, actual_QK: Tensor, labels: LabelSet) -> dict[str, Any]:
    kinds = (predicted_QK & actual_QK, predicted_QK & ~actual_QK, ~predicted_QK & actual_QK)
    scores = label_f1(torch.cat([kind_QK.sum(0) for kind_QK in kinds]).tolist(), labels)
    present = [score for score in scores if score is not None]
    return {
        "accuracy": float((predicted_QK == actual_QK).all(1).double().mean()),
        "macro_f1": sum(present) / len(present),
        "label_f1": dict(zip(labels.names, scores, strict=True)),
    }


def _spearman(predicted_QK: Tensor, actual_QK: Tensor) -> float | None:
    """Return Spearman's rank correlation, averaged over outputs; None if all numbers of a column are equal."""
    found = []
    for columns in zip(predicted_QK.T, actual_QK.T, strict=True):
        x_Q, y_Q = (_centred_ranks(values_Q) for values_Q in columns)
        size = float(x_Q.norm() * y_Q.norm())
        if not size:
            return None
        found.append(float(x_Q @ y_Q) / size)
    return sum(found) / len(found)


def _centred_ranks(values_Q: Tensor) -> Tensor:
    """Return the rank of every number minus the mean rank; equal numbers get the mean of their ranks."""
    _, places_Q, counts = values_Q.unique(return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0) - (counts - 1) / 2
    return ranks.double()[places_Q] - (len(values_Q) + 1) / 2


MAX_OPTIONS = 26
"""Maximum number of distinct replies to choose from."""

_MAX_TOKENS = 8192
"""Initial number of tokens in a forward pass; halved whenever memory runs out."""


def options_of(rows: Sequence[Conversation]) -> tuple[str, ...]:
    """Return the distinct replies of ``rows``, in alphabetical order.

    Raises:
        DataError: There are fewer than 2, or more than 26, distinct replies.
    """
    options = sorted({_reply(row).content for row in rows})
    if not 2 <= len(options) <= MAX_OPTIONS:
        raise DataError(
            f"expected validation rows with 2 to {MAX_OPTIONS} distinct replies to choose from, found "
            f"{len(options)} in {len(rows)} rows; use another scorer, or other rows"
        )
    return tuple(options)


class Choices:
    """A scorer that compares the likelihoods of all options as the reply to each row; it generates nothing.

    The likelihood of an option covers all its tokens and the token that ends the reply. If several options are equally
    likely, the first one in ``options`` wins.

    Args:
        rows: Rows with a reply.
        options: Options for all rows; every row's own reply is one of them.

    Raises:
        DataError: A row has no prompt, or a row with one of the options does not fit into the model's positions.
    """

    def __init__(self, rows: Sequence[Conversation], options: Sequence[str], backbone: Backbone) -> None:
        self._options = tuple(options)
        self._right = torch.tensor([self._options.index(_reply(row).content) for row in rows])
        tried = [_with_reply(row, option) for row in rows for option in options]
        limit = max_positions(backbone)
        limits = limits_of(backbone.model.config)
        encoding = Encoding(tokenizer=backbone.tokenizer, max_length=limit or 2**31, limits=limits)
        self._dataset = tokenize(tried, encoding, "validation")
        if self._dataset.num_truncated or len(self._dataset) != len(tried):
            number = self._dataset.num_truncated or len(tried) - len(self._dataset)
            raise DataError(
                f"expected rows that fit into the model's {limit} positions with every option, found {number} of "
                f"{len(tried)} combinations of a row and an option that do not; leave long rows out, or use a base "
                "model with more positions"
            )
        self._backbone = backbone

    def scores(self, served: ServedAdapters, names: Sequence[str], on_turn: OnTurn) -> list[Sequence[float]]:
        """Return each adapter's scores of all rows: 1 if the row's own reply is the most likely option, else 0.

        Args:
            names: Names of the adapters in error messages.
            on_turn: Called after every forward pass.

        Raises:
            DeviceMemoryError: Memory is too small for a single row.
            NoResultError: A likelihood is not a finite number.
        """
        log_probs = self._log_probs(served, names, on_turn)
        shape = (len(self._right), len(self._options))
        return [(of_adapter.view(shape).argmax(1) == self._right).double().tolist() for of_adapter in log_probs]

    def _log_probs(self, served: ServedAdapters, names: Sequence[str], on_turn: OnTurn) -> list[torch.Tensor]:
        longest = self._dataset.longest_sequence
        max_tokens = max(_MAX_TOKENS, longest)
        while True:
            try:
                heldout = HeldoutPass(
                    backbone=self._backbone,
                    served=served,
                    dataset=self._dataset,
                    names=names,
                    max_tokens_per_pass=max_tokens,
                    on_done=lambda _: on_turn(),
                )
                return [of_adapter.cpu() for of_adapter in heldout.log_probs()]
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if max_tokens <= longest:
                    raise DeviceMemoryError(
                        f"not enough memory on {self._backbone.device} for a row of {longest} tokens; free memory"
                    ) from None
            release_memory()
            max_tokens = max(longest, max_tokens // 2)


def _reply(row: Conversation) -> Message:
    position = reply_position(row)
    assert position is not None, "the row has a reply"
    return row[position]


def _with_reply(row: Conversation, option: str) -> Conversation:
    """Return ``row`` with ``option`` as its last reply. The likelihood is computed only for this turn."""
    position = reply_position(row)
    assert position is not None, "the row has a reply"
    before = (replace(turn, is_context=True) if turn.role == "assistant" else turn for turn in row[:position])
    return Conversation((*before, Message("assistant", option)), row.template_arguments)
