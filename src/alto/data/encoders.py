"""Datasets of conversations, preference pairs and labelled texts, encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alto.data.dataset import IGNORED, EncodedDataset, MemoryWriter, RowWriter, Span
from alto.data.encode import EncodedRow, Encoder
from alto.data.messages import Conversation, LabelledConversation, LabelledText, Pair, place_of
from alto.data.rows import ConversationError, FaultKind, FaultList, RowFault, check_token_ids, quoted, row_limit
from alto.data.template import ChatTemplate
from alto.errors import DataError
from alto.records import LabelSet, ModelLimits
from alto.spec import OnBadRow, TrainOn


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
            ids, row_targets = ids_and_targets(row, limit.num_tokens)
            if (row_targets != IGNORED).any():
                is_desirable = getattr(conversation, "is_desirable", True)
                writer.add(ids, row_targets, (Span(ids.numel()),), is_desirable=is_desirable)
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
        row_targets = torch.full((len(ids),), IGNORED)
        row_targets[_last_token(ids, padding)] = 0
        input_ids.append(torch.tensor(ids))
        targets.append(row_targets)
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


# Converts preference pairs into token ids: two sequences per row, whose common beginning goes through the model once.


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
        is_cut_off = any(not (row_targets != IGNORED).any() for row_targets in (chosen_targets, rejected_targets))
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
