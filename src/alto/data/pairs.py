"""Converts preference pairs into token ids: two sequences per row, whose common beginning goes through the model
once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from alto.data.conversation import Conversation, Pair, place_of
from alto.data.conversations import ids_and_targets
from alto.data.dataset import IGNORED, EncodedDataset, MemoryWriter, RowWriter, Span
from alto.data.encode import EncodedRow, Encoder
from alto.data.faults import FaultList
from alto.data.limits import check_token_ids, row_limit
from alto.data.rows import ConversationError, FaultKind, RowFault, quoted
from alto.errors import DataError
from alto.records import ModelLimits
from alto.spec import OnBadRow

__all__ = ["encode_pairs"]


def encode_pairs(
    pairs: Sequence[Pair],
    tokenizer: Any,
    max_length: int,
    what: str,
    *,
    limits: ModelLimits | None = None,
    share_prompts: bool = True,
    on_bad_row: OnBadRow = "error",
    writer: RowWriter | None = None,
) -> EncodedDataset:
    """Tokenise ``pairs``; cut each conversation at ``max_length`` tokens, or at the model's positions if fewer.

    A pair is left out and counted if a reply is empty or not trained (it would teach the length of replies, not their
    content), if both replies have the same tokens, or if no difference between them is left after the cut. Trained
    tokens are those of TRL's ``DPOTrainer``: ``{% generation %}`` in the template is ignored, and both replies begin at
    the same token, the first that is trained in either.

    Args:
        tokenizer: Tokenizer of the base model.
        what: Name of the split for messages, e.g. ``"training"``.
        share_prompts: Whether the common beginning of both conversations goes through the model only once.
        on_bad_row: Treatment of pairs that the chat template refuses.
        writer: Receives the tokenised rows; None keeps them in memory.

    Raises:
        BadRowsError: The chat template refuses a pair, or rewrites earlier replies of a conversation that has several
            where the pair differs, and bad rows are not skipped; or this is so for all pairs.
        DataError: No pair is left.
        ModelError: The model has no embedding for a token.
    """
    limits = limits or ModelLimits()
    limit = row_limit(max_length, limits)
    encoder = Encoder(tokenizer, follows_marks=False)
    writer = MemoryWriter() if writer is None else writer
    num_truncated = num_alike = num_masked = 0
    faults = FaultList(f"the {what} data")
    for number, pair in enumerate(pairs, start=1):
        where = place_of(pair, f"pair {number} of the {what} data")
        if not all(
            any(turn.is_trained and not turn.is_empty for turn in conversation) for conversation in pair.conversations
        ):
            num_masked += 1
            continue
        try:
            rows = _begun_together([_encode_conversation(conversation, encoder) for conversation in pair.conversations])
        except ConversationError as error:
            faults.add(where, RowFault(FaultKind.REFUSED, str(error)))
            continue
        for row in rows:
            check_token_ids(row.input_ids, limits, tokenizer, where)
        if rows[0].input_ids == rows[1].input_ids:
            num_alike += 1
            continue
        num_truncated += any(len(row.input_ids) > limit.num_tokens for row in rows)
        (chosen, chosen_targets), (rejected, rejected_targets) = (
            ids_and_targets(row, limit.num_tokens) for row in rows
        )
        is_cut_off = any(not (sought != IGNORED).any() for sought in (chosen_targets, rejected_targets))
        if is_cut_off or torch.equal(chosen, rejected):
            continue
        prefix = _num_shared(*rows) if share_prompts else 0
        writer.add(
            torch.cat([chosen, rejected[prefix:]]),
            torch.cat([chosen_targets, rejected_targets[prefix:]]),
            (Span(chosen.numel()), Span(rejected.numel() - prefix, prefix)),
        )
    refused = faults.settle(len(pairs), on_bad_row)
    if not len(writer):
        raise DataError(
            f"expected pairs to learn from in the {what} data, found none of {len(pairs)} with two different replies "
            f"in {limit.name}; {limit.remedy} or check that replies differ and are not empty"
        )
    return EncodedDataset.of(
        writer.rows(),
        num_truncated=num_truncated,
        num_skipped=len(pairs) - len(writer) - (refused.num_bad if refused else 0),
        num_masked=num_masked,
        num_alike=num_alike,
        num_shortened=encoder.num_shortened,
        refused=() if refused is None else (refused,),
        unread=encoder.unread,
    )


def _encode_conversation(conversation: Conversation, encoder: Encoder) -> EncodedRow:
    rows = encoder.rows(conversation)
    if len(rows) > 1:
        raise ConversationError(
            f"expected one reply where the conversations of a pair first differ, found {len(rows)} in the conversation "
            f"that begins with {quoted(conversation[0].content)}, and the model's chat template rewrites earlier "
            "replies; make the last one the reply, and the others part of the prompt"
        )
    return rows[0]


def _begun_together(rows: list[EncodedRow]) -> list[EncodedRow]:
    """Return both conversations, trained from the first token on that is trained in either.

    If one reply merges with the end of the prompt, the other is trained from that token on as well, so that both are
    compared after the same prompt.
    """
    begins = [row.is_trained.index(True) for row in rows if any(row.is_trained)]
    if len(begins) < len(rows):
        return rows
    first = min(begins)
    return [
        EncodedRow(row.input_ids, (*row.is_trained[:first], *[True] * (begin - first), *row.is_trained[begin:]))
        for row, begin in zip(rows, begins, strict=True)
    ]


def _num_shared(chosen: EncodedRow, rejected: EncodedRow) -> int:
    """Return the number of untrained tokens that both begin with, without the last: it predicts a reply's first."""
    shared = 0
    for first, second in zip(
        zip(chosen.input_ids, chosen.is_trained, strict=True),
        zip(rejected.input_ids, rejected.is_trained, strict=True),
        strict=False,
    ):
        if first != second or first[1]:
            break
        shared += 1
    return max(0, shared - 1)
