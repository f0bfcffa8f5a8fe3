"""Conversations become token ids with a mask of the tokens that are trained: once per task, shared by all jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from alto.data.conversation import Conversation, Message
from alto.data.dataset import IGNORED, EncodedDataset
from alto.errors import DataError

__all__ = [
    "EncodedRow",
    "closing_text",
    "encode_conversation",
    "encode_dataset",
    "encode_prompt",
    "ids_and_targets",
]


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """Token ids of one conversation, and for each whether it is trained (replies and their end)."""

    input_ids: tuple[int, ...]
    is_trained: tuple[bool, ...]


def encode_dataset(conversations: Sequence[Conversation], tokenizer: Any, max_length: int, what: str) -> EncodedDataset:
    """Tokenise ``conversations``, cutting each at ``max_length`` tokens.

    Args:
        what: Name of the split for messages, e.g. ``"training"``.

    Raises:
        DataError: No row has a trained token left, or no row of talk is left whole: the model would never see the end
            of a reply.
    """
    input_ids, targets = [], []
    num_rows = num_truncated = num_masked = num_unrolled = 0
    for conversation in conversations:
        rows = encode_conversation(conversation, tokenizer) or [EncodedRow((), ())]
        num_unrolled += len(rows) > 1
        for row in rows:
            num_rows += 1
            num_truncated += len(row.input_ids) > max_length
            num_masked += not any(row.is_trained[1:])
            ids, sought = ids_and_targets(row, max_length)
            if (sought != IGNORED).any():
                input_ids.append(ids)
                targets.append(sought)
    if not input_ids:
        raise DataError(
            f"expected rows to train on in the {what} data, found none of {num_rows} with a completion in "
            f"max_length {max_length}; raise max_length or check that completions are not empty"
        )
    if num_truncated == num_rows and not any(message.role == "text" for message in conversations[0]):
        raise DataError(
            f"expected rows of the {what} data to fit into max_length {max_length}, found all {num_rows} longer, so "
            "that the end of a reply would never be learned; raise max_length"
        )
    return EncodedDataset(
        input_ids=tuple(input_ids),
        targets=tuple(targets),
        num_truncated=num_truncated,
        num_skipped=num_rows - len(input_ids),
        num_masked=num_masked,
        num_unrolled=num_unrolled,
    )


def ids_and_targets(row: EncodedRow, max_length: int) -> tuple[Tensor, Tensor]:
    """Token ids of ``row``, cut, and what each position has to predict: position t predicts token t + 1."""
    ids = torch.tensor(row.input_ids[:max_length], dtype=torch.long)
    trained = torch.tensor(row.is_trained[:max_length], dtype=torch.bool)
    targets = torch.full_like(ids, IGNORED)
    targets[:-1] = torch.where(trained[1:], ids[1:], IGNORED)
    return ids, targets


def encode_conversation(conversation: Conversation, tokenizer: Any) -> list[EncodedRow]:
    """Token ids of one conversation through the tokenizer's chat template (or plainly, where it has none).

    A trained turn is trained from its first token through the token that ends it; what follows the last such turn is
    left out. A row always ends with the EOS token, where there is one.

    Returns:
        One row; none where nothing is to be trained; and where the template rewrites earlier turns when another is
        added (Qwen3 takes thoughts out of them), a row for every trained turn, with the turns before it as the model
        is shown them when it writes that turn.

    Raises:
        DataError: The template refuses the turns, or rewrites what stands before a reply, so that the reply's tokens
            cannot be told apart.
    """
    trained = [position for position, message in enumerate(conversation) if message.is_trained]
    if not trained:
        return []
    conversation = conversation[: trained[-1] + 1]
    if conversation[0].role == "text" or not getattr(tokenizer, "chat_template", None):
        return [_ended(*_encode_plainly(conversation, tokenizer), tokenizer)]
    text = _render(tokenizer, conversation, open_turn=False)
    replies = [_reply(tokenizer, conversation, position) for position in trained]
    if all(text.startswith(through) for _, through in replies):
        spans = [(len(before), len(through)) for before, through in replies]
        return [_ended(*_encode_text(text, spans, tokenizer), tokenizer)]
    return [
        _ended(*_encode_text(through, [(len(before), len(through))], tokenizer), tokenizer)
        for before, through in replies
    ]


def encode_prompt(turns: Conversation, tokenizer: Any) -> list[int]:
    """Token ids of ``turns`` and of the opening of a reply: what :func:`encode_conversation` puts before that reply.

    Raises:
        DataError: There is no turn, or the chat template refuses the turns.
    """
    if not turns:
        raise DataError("expected a turn before the assistant's reply, found the reply alone: there is no question")
    if not getattr(tokenizer, "chat_template", None):
        return _encode_plainly(turns, tokenizer)[0]
    return _encode_text(_render(tokenizer, turns, open_turn=True), (), tokenizer)[0]


def closing_text(tokenizer: Any) -> str:
    """What the chat template writes behind a reply, without blanks; empty where it writes nothing."""
    reply = "a reply"
    turns = (Message("user", "a question"), Message("assistant", reply))
    return _render(tokenizer, turns, open_turn=False).rpartition(reply)[2].strip()


def _ended(ids: list[int], trained: list[bool], tokenizer: Any) -> EncodedRow:
    eos = tokenizer.eos_token_id
    # Some templates put a newline after the token that ends a turn.
    if eos is not None and eos not in ids[-2:]:
        ids, trained = [*ids, eos], [*trained, True]
    return EncodedRow(tuple(ids), tuple(trained))


def _reply(tokenizer: Any, conversation: Conversation, position: int) -> tuple[str, str]:
    """What the model is shown before it writes turn ``position``, and the same with that turn."""
    before = _render_before(tokenizer, conversation, position)
    through = _render(tokenizer, conversation[: position + 1], open_turn=False)
    if not through.startswith(before):
        raise DataError(
            "expected the chat template to leave what stands before a reply as it is when the reply is added, found "
            "that it rewrites it; set another chat template on the tokenizer"
        )
    return before, through


def _encode_text(text: str, spans: Sequence[tuple[int, int]], tokenizer: Any) -> tuple[list[int], list[bool]]:
    # Not verbose: the tokenizer would warn of rows beyond the model's length before they are cut.
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    trained = [any(start <= first < end for start, end in spans) for first, _ in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), trained


def _render_before(tokenizer: Any, conversation: Conversation, position: int) -> str:
    """What the model is shown before it writes turn ``position``."""
    if position:
        return _render(tokenizer, conversation[:position], open_turn=True)
    # Templates refuse an empty conversation, so the opening of a turn is read off behind the first turn.
    first = conversation[:1]
    return _render(tokenizer, first, open_turn=True).removeprefix(_render(tokenizer, first, open_turn=False))


def _render(tokenizer: Any, conversation: Conversation, *, open_turn: bool) -> str:
    messages = [{"role": message.role, "content": message.content} for message in conversation]
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_turn)
    except TemplateError as error:
        raise DataError(
            f"expected turns that the model's chat template takes, found {', '.join(m.role for m in conversation)} "
            f"({error}); change the rows, or set another chat template on the tokenizer"
        ) from error
    return text


def _encode_plainly(conversation: Conversation, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Turns are tokenised one by one, so that a turn's tokens do not depend on what follows it."""
    ids: list[int] = []
    trained: list[bool] = []
    for position, message in enumerate(conversation):
        text = message.content if message.role in ("assistant", "text") else message.content + "\n"
        turn = tokenizer(text, add_special_tokens=position == 0, verbose=False)["input_ids"]
        ids += turn
        trained += [message.is_trained] * len(turn)
    return ids, trained
