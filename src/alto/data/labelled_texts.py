"""Converts labelled texts into token ids, as transformers' text classification example does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from alto.data.conversation import LabelledText, place_of
from alto.data.dataset import IGNORED, EncodedDataset
from alto.data.faults import FaultList
from alto.data.limits import check_token_ids, row_limit
from alto.data.rows import ConversationError, FaultKind, RowFault
from alto.data.template import ChatTemplate
from alto.errors import DataError
from alto.records import LabelSet, ModelLimits
from alto.spec import OnBadRow

__all__ = ["encode_labelled_texts"]


def encode_labelled_texts(
    rows: Sequence[LabelledText],
    labels: LabelSet,
    tokenizer: Any,
    max_length: int,
    what: str,
    *,
    limits: ModelLimits | None = None,
    on_bad_row: OnBadRow = "error",
) -> EncodedDataset:
    """Tokenise texts with the tokenizer's special tokens.

    Rows are cut at ``max_length`` tokens, or at the model's positions if fewer. The longer of two texts is cut first,
    at the side that the tokenizer says. Conversations are written by the chat template, and their first tokens are
    kept. The classification head reads a row's last token that is not padding; the padding token is that of the
    model's configuration, or else of the tokenizer.

    Args:
        tokenizer: Tokenizer of the base model.
        what: Name of the split for messages, e.g. ``"training"``.
        on_bad_row: Treatment of rows without a token, and of conversations that the chat template refuses.

    Raises:
        BadRowsError: Rows cannot be used and bad rows are not skipped, or no row can be used.
        DataError: The tokenizer marks each token with its text (``token_type_ids``), which the model does not get here.
        ModelError: The model has no embedding for a token.
    """
    limits = limits or ModelLimits()
    limit = row_limit(max_length, limits)
    padding = tokenizer.pad_token_id if limits.pad_token_id is None else limits.pad_token_id
    faults = FaultList(f"the {what} data")
    input_ids, targets, classes = [], [], []
    num_truncated = 0
    for number, row in enumerate(rows, start=1):
        where = place_of(row, f"row {number} of the {what} data")
        try:
            ids = _token_ids(row, tokenizer)
        except ConversationError as error:
            faults.add(where, RowFault(FaultKind.REFUSED, str(error)))
            continue
        if not ids:
            reason = "expected a text with at least one token, found none; correct the row"
            faults.add(where, RowFault(FaultKind.EMPTY_REPLY, reason))
            continue
        if len(ids) > limit.num_tokens:
            num_truncated += 1
            ids = _token_ids(row, tokenizer, limit.num_tokens)
        check_token_ids(ids, limits, tokenizer, where)
        sought = torch.full((len(ids),), IGNORED)
        sought[_last_token(ids, padding)] = 0
        input_ids.append(torch.tensor(ids))
        targets.append(sought)
        classes.append(row.label)
    refused = faults.settle(len(rows), on_bad_row)
    return EncodedDataset(
        input_ids=tuple(input_ids),
        targets=tuple(targets),
        num_truncated=num_truncated,
        num_skipped=0,
        refused=() if refused is None else (refused,),
        classes=tuple(classes),
        label_set=labels,
        max_length=limit.num_tokens,
    )


def _token_ids(row: LabelledText, tokenizer: Any, max_length: int | None = None) -> list[int]:
    """Return the token ids of a row, cut at ``max_length`` tokens if that is given."""
    if not isinstance(row.text, str):
        if not getattr(tokenizer, "chat_template", None):
            raise ConversationError(
                "expected a tokenizer with a chat template, which conversations need, found one without; set "
                "chat_template, or give texts"
            )
        text = ChatTemplate(tokenizer).text(row.text, open_turn=False)
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids[:max_length]
    cut = {} if max_length is None else {"truncation": True, "max_length": max_length}
    encoded = tokenizer(row.text, row.text_pair, verbose=False, **cut)
    if any(encoded.get("token_type_ids", ())):
        raise DataError(
            "model: expected a tokenizer whose tokens alone tell two texts apart, found one that marks each token with "
            "its text (token_type_ids); put both texts into one column"
        )
    return list(encoded["input_ids"])


def _last_token(ids: Sequence[int], padding: int | None) -> int:
    """Return the position of the last token that is not padding; 0 if all are padding, as in transformers."""
    if padding is None:
        return len(ids) - 1
    return max((position for position, token in enumerate(ids) if token != padding), default=0)
