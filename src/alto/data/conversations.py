"""Converts the conversations of a split into token ids with their targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alto.data.conversation import Conversation, LabelledConversation, place_of
from alto.data.dataset import IGNORED, EncodedDataset, MemoryWriter, RowWriter, Span
from alto.data.encode import EncodedRow, Encoder
from alto.data.faults import FaultList
from alto.data.limits import check_token_ids, row_limit
from alto.data.rows import ConversationError, FaultKind, RowFault
from alto.errors import DataError
from alto.records import ModelLimits
from alto.spec import OnBadRow, TrainOn

__all__ = ["encode_dataset", "ids_and_targets"]


def encode_dataset(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    max_length: int,
    what: str,
    *,
    limits: ModelLimits | None = None,
    on_bad_row: OnBadRow = "error",
    train_on: TrainOn = "completion",
    writer: RowWriter | None = None,
) -> EncodedDataset:
    """Tokenise ``conversations``; cut each at ``max_length`` tokens, or at the model's positions if fewer.

    Args:
        conversations: The rows; all have a label, or none has.
        tokenizer: Tokenizer of the base model.
        what: Name of the split for messages, e.g. ``"training"``.
        on_bad_row: Treatment of conversations that the chat template refuses.
        train_on: The tokens that are trained: those of all replies, of the last reply, or all.
        writer: Receives the tokenised rows; None keeps them in memory.

    Raises:
        BadRowsError: The chat template refuses conversations and bad rows are not skipped, or it refuses all.
        DataError: No row has a trained token left; or all rows are conversations that were cut, so that the model would
            never see the end of a reply.
        ModelError: The model has no embedding for a token.
    """
    limits = limits or ModelLimits()
    limit = row_limit(max_length, limits)
    is_labelled = bool(conversations) and isinstance(conversations[0], LabelledConversation)
    encoder = Encoder(tokenizer, train_on, follows_marks=not is_labelled)
    writer = MemoryWriter() if writer is None else writer
    num_rows = num_truncated = num_masked = num_unrolled = 0
    faults = FaultList(f"the {what} data")
    for number, (conversation, found) in enumerate(encoder.all_rows(conversations), start=1):
        where = place_of(conversation, f"conversation {number} of the {what} data")
        if isinstance(found, ConversationError):
            faults.add(where, RowFault(FaultKind.REFUSED, str(found)))
            continue
        rows = found or [EncodedRow((), ())]
        num_unrolled += len(rows) > 1
        for row in rows:
            num_rows += 1
            check_token_ids(row.input_ids, limits, tokenizer, where)
            num_truncated += len(row.input_ids) > limit.num_tokens
            num_masked += not any(row.is_trained[1:])
            ids, sought = ids_and_targets(row, limit.num_tokens)
            if (sought != IGNORED).any():
                is_desirable = getattr(conversation, "is_desirable", True)
                writer.add(ids, sought, (Span(ids.numel()),), is_desirable=is_desirable)
    refused = faults.settle(len(conversations), on_bad_row)
    if not len(writer):
        raise DataError(
            f"expected rows to train on in the {what} data, found none of {num_rows} with a completion in "
            f"{limit.name}; {limit.remedy} or check that completions are not empty"
        )
    if num_truncated == num_rows and conversations[0][-1].role != "text":
        raise DataError(
            f"expected rows of the {what} data to fit into {limit.name}, found all {num_rows} longer, so "
            f"that the end of a reply would never be learned; {limit.remedy}"
        )
    return EncodedDataset.of(
        writer.rows(),
        is_labelled=is_labelled,
        num_truncated=num_truncated,
        num_skipped=num_rows - len(writer),
        num_masked=num_masked,
        num_unrolled=num_unrolled,
        num_shortened=encoder.num_shortened,
        refused=() if refused is None else (refused,),
        unread=encoder.unread,
        max_length=limit.num_tokens,
    )


def ids_and_targets(row: EncodedRow, max_length: int) -> tuple[Tensor, Tensor]:
    """Return the token ids of ``row``, cut, and the target of each position: position t predicts token t + 1."""
    ids = torch.tensor(row.input_ids[:max_length], dtype=torch.long)
    trained = torch.tensor(row.is_trained[:max_length], dtype=torch.bool)
    targets = torch.full_like(ids, IGNORED)
    targets[:-1] = torch.where(trained[1:], ids[1:], IGNORED)
    return ids, targets
