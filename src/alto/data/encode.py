"""Conversations become token ids with a mask of the tokens that are trained: once per task, shared by all jobs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from alto.data.conversation import Conversation, Message, Pair
from alto.errors import DataError

__all__ = [
    "EncodedDataset",
    "EncodedRow",
    "Span",
    "closing_text",
    "digest_of",
    "encode_conversation",
    "encode_dataset",
    "encode_pairs",
    "encode_prompt",
]

_IGNORED = -100


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """Token ids of one conversation, and for each whether it is trained (replies and their end)."""

    input_ids: tuple[int, ...]
    is_trained: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A sequence of a row: as many tokens of it as ``length``, which go on behind the first ``prefix`` tokens of the
    span before this one."""

    length: int
    prefix: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDataset:
    """All rows of a split, tokenised.

    A row of talk is one sequence. A pair is two, the chosen and the rejected one, laid end to end; what both begin with
    stands there once, except for its last token, which predicts the first token of each reply.

    Attributes:
        input_ids: One vector of token ids per row.
        targets: Per row, the token each position has to predict; -100 where nothing is trained.
        num_truncated: Rows cut at ``max_length``.
        num_skipped: Rows left out because no trained token was left in them.
        num_masked: Those of them in which nothing was to be trained, however long.
        num_unrolled: Conversations that became a row for every reply.
        num_alike: Pairs left out because both replies have the same tokens.
        spans: The sequences of every row; by default one each.
        references: ``[rows, 2]`` float64, nats: what the frozen base gives the chosen and the rejected reply of every
            pair; None until somebody has asked it.
        num_trained: Trained tokens of every row.
        weights: What every row counts for in a mean over rows: its trained tokens; of pairs, each the same.
    """

    input_ids: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    num_truncated: int
    num_skipped: int
    num_masked: int = 0
    num_unrolled: int = 0
    num_alike: int = 0
    spans: tuple[tuple[Span, ...], ...] = ()
    references: Tensor | None = None
    num_trained: tuple[int, ...] = field(init=False)
    weights: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_trained", tuple(int((targets != _IGNORED).sum()) for targets in self.targets))
        if not self.spans:
            object.__setattr__(self, "spans", tuple((Span(ids.numel()),) for ids in self.input_ids))
        object.__setattr__(self, "weights", (1,) * len(self) if self.is_paired else self.num_trained)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def is_paired(self) -> bool:
        """Whether its rows are pairs."""
        return len(self.spans[0]) == 2

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(span.prefix + span.length for spans in self.spans for span in spans)

    @property
    def num_tokens(self) -> int:
        return sum(ids.numel() for ids in self.input_ids)

    @property
    def num_trained_tokens(self) -> int:
        return sum(self.num_trained)


def digest_of(*datasets: EncodedDataset) -> str:
    """A digest of every token and every target, in order, and of how pairs are laid out."""
    digest = hashlib.sha256()
    for dataset in datasets:
        for rows in (dataset.input_ids, dataset.targets):
            for row in rows:
                digest.update(row.numel().to_bytes(8, "little"))
                digest.update(row.numpy().tobytes())
        if dataset.is_paired:
            digest.update(repr([[(span.length, span.prefix) for span in spans] for spans in dataset.spans]).encode())
    return digest.hexdigest()


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
            ids, shifted = _shifted(row, max_length)
            if (shifted != _IGNORED).any():
                input_ids.append(ids)
                targets.append(shifted)
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


def encode_pairs(
    pairs: Sequence[Pair], tokenizer: Any, max_length: int, what: str, *, share_prompts: bool = True
) -> EncodedDataset:
    """Tokenise ``pairs``, cutting each talk at ``max_length`` tokens; a pair that has lost a reply is left out.

    Args:
        what: Name of the split for messages, e.g. ``"training"``.
        share_prompts: Whether what both talks begin with goes through the model once.

    Raises:
        DataError: No pair is left; or after the talks part, one has several replies, which the chat template shows the
            model in different ways.
    """
    input_ids, targets, spans = [], [], []
    num_truncated = num_alike = num_masked = 0
    for pair in pairs:
        sides = [_encode_side(talk, tokenizer) for talk in (pair.chosen, pair.rejected)]
        num_truncated += any(len(side.input_ids) > max_length for side in sides)
        if sides[0].input_ids == sides[1].input_ids:
            num_alike += 1
            continue
        if not all(any(side.is_trained[1:]) for side in sides):
            num_masked += 1
            continue
        shared = _num_shared(*sides) if share_prompts else 0
        ids_of, targets_of = zip(*(_shifted(side, max_length) for side in sides), strict=True)
        if not all((part != _IGNORED).any() for part in targets_of):
            continue
        input_ids.append(torch.cat([ids_of[0], ids_of[1][shared:]]))
        targets.append(torch.cat([targets_of[0], targets_of[1][shared:]]))
        spans.append((Span(ids_of[0].numel()), Span(ids_of[1].numel() - shared, shared)))
    if not input_ids:
        raise DataError(
            f"expected pairs to learn from in the {what} data, found none of {len(pairs)} with two different replies "
            f"in max_length {max_length}; raise max_length or check that replies differ and are not empty"
        )
    return EncodedDataset(
        input_ids=tuple(input_ids),
        targets=tuple(targets),
        num_truncated=num_truncated,
        num_skipped=len(pairs) - len(input_ids),
        num_masked=num_masked,
        num_alike=num_alike,
        spans=tuple(spans),
    )


def _encode_side(talk: Conversation, tokenizer: Any) -> EncodedRow:
    rows = encode_conversation(talk, tokenizer) or [EncodedRow((), ())]
    if len(rows) > 1:
        raise DataError(
            f"expected one reply where a pair parts, found {len(rows)}, and the model's chat template rewrites earlier "
            "ones; move all but the last into the prompt"
        )
    return rows[0]


def _num_shared(chosen: EncodedRow, rejected: EncodedRow) -> int:
    """Tokens that both begin with and neither trains, without the last of them: it predicts the first of a reply."""
    shared = 0
    for first, second, is_trained in zip(chosen.input_ids, rejected.input_ids, chosen.is_trained, strict=False):
        if first != second or is_trained or rejected.is_trained[shared]:
            break
        shared += 1
    return max(0, shared - 1)


def _shifted(row: EncodedRow, max_length: int) -> tuple[Tensor, Tensor]:
    """Token ids of ``row``, cut, and what each position has to predict: position t predicts token t + 1."""
    ids = torch.tensor(row.input_ids[:max_length], dtype=torch.long)
    trained = torch.tensor(row.is_trained[:max_length], dtype=torch.bool)
    targets = torch.full_like(ids, _IGNORED)
    targets[:-1] = torch.where(trained[1:], ids[1:], _IGNORED)
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
