"""Conversations become token ids with a mask of the tokens that are trained: once per task, shared by all jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from alto.data.formats import Conversation
from alto.errors import DataError

__all__ = ["EncodedDataset", "EncodedRow", "encode_conversation", "encode_dataset"]

_IGNORED = -100


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """Token ids of one conversation, and for each whether it is trained (the assistant's turns and their end)."""

    input_ids: tuple[int, ...]
    is_trained: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDataset:
    """All rows of a split, tokenised.

    Attributes:
        input_ids: One vector of token ids per row.
        targets: Per row, the token each position has to predict; -100 where nothing is trained.
        num_truncated: Rows cut at ``max_length``.
        num_skipped: Rows left out because no trained token was left in them.
    """

    input_ids: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    num_truncated: int
    num_skipped: int

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(ids.numel() for ids in self.input_ids)

    @property
    def num_tokens(self) -> int:
        return sum(ids.numel() for ids in self.input_ids)

    @property
    def num_trained_tokens(self) -> int:
        return sum(int((targets != _IGNORED).sum()) for targets in self.targets)


def encode_dataset(conversations: Sequence[Conversation], tokenizer: Any, max_length: int, what: str) -> EncodedDataset:
    """Tokenise ``conversations``, cutting each at ``max_length`` tokens.

    Args:
        what: Name of the split for messages, e.g. ``"training"``.

    Raises:
        DataError: No row has a trained token left.
    """
    input_ids, targets, num_truncated = [], [], 0
    for conversation in conversations:
        row = encode_conversation(conversation, tokenizer)
        num_truncated += len(row.input_ids) > max_length
        ids = torch.tensor(row.input_ids[:max_length], dtype=torch.long)
        trained = torch.tensor(row.is_trained[:max_length])
        # Position t predicts token t + 1; the first token is predicted by nobody.
        shifted = torch.full_like(ids, _IGNORED)
        shifted[:-1] = torch.where(trained[1:], ids[1:], _IGNORED)
        if (shifted != _IGNORED).any():
            input_ids.append(ids)
            targets.append(shifted)
    if not input_ids:
        raise DataError(
            f"expected rows to train on in the {what} data, found none of {len(conversations)} with a completion in "
            f"max_length {max_length}; raise max_length or check that completions are not empty"
        )
    return EncodedDataset(
        input_ids=tuple(input_ids),
        targets=tuple(targets),
        num_truncated=num_truncated,
        num_skipped=len(conversations) - len(input_ids),
    )


def encode_conversation(conversation: Conversation, tokenizer: Any) -> EncodedRow:
    """Token ids of one conversation through the tokenizer's chat template (or plainly, where it has none).

    A turn of the assistant is trained from its first token through the token that ends it; what follows the last such
    turn is left out. A row always ends with the EOS token.

    Raises:
        DataError: The template refuses the turns, or rewrites earlier ones, so that the assistant's tokens cannot be
            told apart.
    """
    last = max(position for position, message in enumerate(conversation) if message.role == "assistant")
    encode = _encode_with_template if getattr(tokenizer, "chat_template", None) else _encode_plainly
    ids, trained = encode(conversation[: last + 1], tokenizer)
    eos = tokenizer.eos_token_id
    # Some templates put a newline after the token that ends a turn.
    if eos is not None and eos not in ids[-2:]:
        ids, trained = [*ids, eos], [*trained, True]
    return EncodedRow(tuple(ids), tuple(trained))


def _encode_with_template(conversation: Conversation, tokenizer: Any) -> tuple[list[int], list[bool]]:
    text = _render(tokenizer, conversation, open_turn=False)
    spans = []
    for position, message in enumerate(conversation):
        if message.role == "assistant":
            before = _render_before(tokenizer, conversation, position)
            through = _render(tokenizer, conversation[: position + 1], open_turn=False)
            if not (text.startswith(through) and through.startswith(before)):
                raise DataError(
                    "expected the chat template to leave earlier turns as they are when a turn is added, found that it "
                    "rewrites them; use single-turn rows, or set another chat template on the tokenizer"
                )
            spans.append((len(before), len(through)))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
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
        is_reply = message.role == "assistant"
        text = message.content if is_reply else message.content + "\n"
        turn = tokenizer(text, add_special_tokens=position == 0)["input_ids"]
        ids += turn
        trained += [is_reply] * len(turn)
    return ids, trained
