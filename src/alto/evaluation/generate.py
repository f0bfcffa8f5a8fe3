"""Greedy completions of many prompts by many adapters in shared batches.

Each completion equals the one that its adapter would write alone, unless rounding decides between two tokens of equal
likelihood.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from alto.backbone import Backbone, end_tokens, is_out_of_memory, limits_of, release_memory
from alto.data import LabelledText, Message, Pair, Row, encode_prompt
from alto.errors import DataError, DeviceMemoryError
from alto.evaluation.scorers import Answer
from alto.lora import ServedAdapters


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt of one row, and the row's own reply.

    Attributes:
        reference: Text of the reply, with its tool calls (see :func:`reply_text`).
    """

    ids: tuple[int, ...]
    reference: str


def reply_text(reply: Message) -> str:
    """Return the text of a reply, followed by its tool calls, one per line as JSON with ``name`` and ``arguments``."""
    calls = [call["function"] for call in reply.other_keys().get("tool_calls", ())]
    lines = [
        json.dumps({"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False, default=str)
        for call in calls
    ]
    return "\n".join([*([reply.content] if reply.content.strip() else []), *lines])


def prompt_of(row: Row, tokenizer: Any) -> Prompt | None:
    """Return the turns before the last trained reply of ``row`` (for a pair, of its chosen side), encoded as a prompt.

    Returns:
        The prompt; None if the row is plain text or a labelled text, or if the reply has neither text nor a tool call.

    Raises:
        DataError: There is nothing before the reply, or the chat template refuses the turns.
    """
    if isinstance(row, LabelledText):
        return None
    turns = row.chosen if isinstance(row, Pair) else row
    position = max((at for at, turn in enumerate(turns) if turn.is_trained), default=None)
    if position is None or (position == 0 and turns[0].role == "text"):
        return None
    reference = reply_text(turns[position])
    if not reference:
        return None
    return Prompt(ids=tuple(encode_prompt(turns[:position], tokenizer)), reference=reference)


def prompts_of(rows: Iterable[Row], tokenizer: Any) -> list[Prompt]:
    """Return the prompt of every row.

    Raises:
        DataError: A row has no prompt.
    """
    prompts = []
    for number, row in enumerate(rows, start=1):
        try:
            prompt = prompt_of(row, tokenizer)
        except DataError as error:
            raise DataError(f"row {number}: {error}") from error
        if prompt is None:
            raise DataError(f"row {number}: expected a text reply after a prompt, found none; name other rows")
        prompts.append(prompt)
    return prompts


def answers_of(prompts: Sequence[Prompt], texts: Sequence[Sequence[int]], tokenizer: Any) -> list[Answer]:
    """Return the answers that one model has generated, given the token ids of each."""
    return [
        Answer(
            prompt=tokenizer.decode(prompt.ids),
            reference=prompt.reference,
            answer=tokenizer.decode(text, skip_special_tokens=True),
        )
        for prompt, text in zip(prompts, texts, strict=True)
    ]


_GROWTH = 1.5


def roomy_cache(config: PreTrainedConfig) -> DynamicCache:
    """Return a cache for a model with ``config``; sliding-window layers keep the cache of transformers."""
    cache = DynamicCache(config=config)
    cache.layers = [_RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def cache_argument(model: nn.Module) -> str:
    """Return the name of the argument through which ``model`` takes a cache.

    It is ``cache`` since transformers 5.24, and ``past_key_values`` in earlier versions and in models with custom code.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class _RoomyLayer(DynamicLayer):
    """The cache of one layer; ``keys`` and ``values``, ``[rows, heads, tokens, head size]``, are views of larger
    buffers."""

    def __init__(self) -> None:
        super().__init__()
        self._rooms: tuple[Tensor, ...] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add tokens, and return the keys and values of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new, first = (key_states, value_states), self.get_seq_length()
        end = first + key_states.shape[2]
        if not self._rooms or self._rooms[0].shape[2] < end:
            self._rooms = tuple(_with_room(known, states) for known, states in zip(self._known(), new, strict=True))
        for room, states in zip(self._rooms, new, strict=True):
            room[:, :, first:end] = states
        self._set_length(end)
        return self._known()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows in ``indices``."""
        if not self._rooms:
            return
        self._rooms = tuple(room.index_select(0, indices) for room in self._rooms)
        self._set_length(self.get_seq_length())

    def _known(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def _set_length(self, num_tokens: int) -> None:
        self.keys, self.values = (room[:, :, :num_tokens] for room in self._rooms)


def _with_room(known: Tensor, new: Tensor) -> Tensor:
    """Return a buffer that starts with ``known``, and has room for ``new`` and further tokens."""
    num_tokens = (known.shape[2] if known.numel() else 0) + new.shape[2]
    rows, heads, _, size = new.shape
    room = torch.empty(rows, heads, int(num_tokens * _GROWTH) + 1, size, dtype=new.dtype, device=new.device)
    if known.numel():
        room[:, :, : known.shape[2]] = known
    return room


def max_positions(backbone: Backbone) -> int | None:
    """Return the maximum number of tokens in a text; None means no limit.

    The limit is the model's number of positions, or less if longer texts would depend on the rest of their batch.
    """
    limits = (limits_of(backbone.model.config).max_positions, backbone.max_length)
    return min((limit for limit in limits if limit is not None), default=None)


def check_prompts(prompts: Sequence[Sequence[int]], limit: int | None) -> None:
    """Check that every prompt is shorter than ``limit``.

    Raises:
        DataError: A prompt is too long.
    """
    for number, prompt in enumerate(prompts, start=1):
        if limit is not None and len(prompt) >= limit:
            raise DataError(
                f"expected prompts shorter than {limit} tokens, which this model can compute, found {len(prompt)} in "
                f"row {number}; leave the row out, or use a base model with more positions"
            )


@torch.no_grad()
def complete(
    backbone: Backbone,
    served: ServedAdapters,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    on_done: Callable[[int], None],
) -> list[list[list[int]]]:
    """Complete every prompt with every adapter, by greedy decoding.

    A text ends with an end token, after ``max_new_tokens``, or at the model's last position.

    Args:
        prompts: Token ids of each prompt, checked by :func:`check_prompts`.
        batch_size: Number of texts generated at a time; halved whenever memory runs out.
        on_done: Called after every forward pass with the number of texts that it finished, often 0. If memory runs out,
            it is called with a negative number: finished texts that must be generated again.

    Returns:
        For each adapter, the new tokens for each prompt, without the end token.

    Raises:
        DeviceMemoryError: Memory is too small for a single text.
    """
    limit = max_positions(backbone)
    texts = [
        [
            _Text(slot, prompt, max_new_tokens if limit is None else min(max_new_tokens, limit - len(prompt)))
            for prompt in prompts
        ]
        for slot in range(len(served))
    ]
    # Prompts of similar length share a batch, because shorter prompts are padded.
    by_length = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    queue = [of_slot[number] for number in by_length for of_slot in texts]
    ends = end_tokens(backbone.model.generation_config, backbone.tokenizer)
    with backbone.own_attention():
        while queue:
            batch = sorted(queue[:batch_size], key=lambda text: text.slot)
            write = _write_uncached if backbone.is_padded else _write
            if _has_room(partial(write, backbone, served, batch, ends, on_done)):
                del queue[:batch_size]
                continue
            release_memory()
            if len(batch) == 1:
                raise DeviceMemoryError(
                    f"expected memory for one answer of up to {batch[0].budget} tokens after a prompt of "
                    f"{len(batch[0].prompt)} tokens, found too little on {backbone.device}; free memory, evaluate "
                    "fewer adapters at a time, or lower max_new_tokens"
                )
            on_done(-sum(text.start_again() for text in batch))
            batch_size = len(batch) // 2
    return [[text.tokens for text in of_slot] for of_slot in texts]


@dataclass(slots=True)
class _Text:
    """A completion of ``prompt`` by the adapter in ``slot``; ``budget`` is its maximum number of tokens."""

    slot: int
    prompt: Sequence[int]
    budget: int
    tokens: list[int] = field(default_factory=list)
    is_finished: bool = False

    def take(self, token: int, ends: AbstractSet[int]) -> bool:
        """Add the next token, and return whether the text needs another one."""
        if token not in ends:
            self.tokens.append(token)
        self.is_finished = token in ends or len(self.tokens) == self.budget
        return not self.is_finished

    def start_again(self) -> bool:
        """Clear the generated tokens, and return whether the text was finished."""
        self.tokens.clear()
        was_finished, self.is_finished = self.is_finished, False
        return was_finished


def _has_room(work: Callable[[], None]) -> bool:
    """Run ``work``, and return whether memory was sufficient.

    After the return, no traceback of an out-of-memory error keeps a tensor alive.
    """
    try:
        work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def _write(
    backbone: Backbone,
    served: ServedAdapters,
    texts: Sequence[_Text],
    ends: AbstractSet[int],
    on_done: Callable[[int], None],
) -> None:
    """Generate ``texts``, which are sorted by slot, in one batch. Finished texts leave the batch."""
    device, width = backbone.device, max(len(text.prompt) for text in texts)
    lengths = [len(text.prompt) for text in texts]
    padded = [[0] * (width - len(text.prompt)) + list(text.prompt) for text in texts]
    ids_BT = torch.tensor(padded, device=device)
    mask_BL = torch.tensor([[0] * (width - length) + [1] * length for length in lengths], device=device)
    positions_BT = (mask_BL.cumsum(1) - 1).clamp(min=0)
    cache = roomy_cache(backbone.model.config)
    cache_setting = {cache_argument(backbone.model): cache}
    schedule = served.schedule(_tokens_of_slots(texts, width, len(served)))
    while True:
        with served.use(schedule):
            logits_B1V = backbone.model(
                input_ids=ids_BT,
                attention_mask=mask_BL,
                position_ids=positions_BT,
                use_cache=True,
                logits_to_keep=1,
                **cache_setting,
            ).logits
        next_B = logits_B1V[:, -1].argmax(-1)
        going = [row for row, token in enumerate(next_B.tolist()) if texts[row].take(token, ends)]
        on_done(len(texts) - len(going))
        if not going:
            return
        is_first, is_smaller = ids_BT.shape[1] > 1, len(going) < len(texts)
        positions_B = positions_BT[:, -1] + 1
        if is_smaller:
            rows = torch.tensor(going, device=device)
            cache.batch_select_indices(rows)
            texts = [texts[row] for row in going]
            next_B, mask_BL, positions_B = next_B[rows], mask_BL[rows], positions_B[rows]
        if is_first or is_smaller:
            schedule = served.schedule(_tokens_of_slots(texts, 1, len(served)))
        ids_BT, positions_BT = next_B[:, None], positions_B[:, None]
        mask_BL = torch.cat([mask_BL, mask_BL.new_ones(len(texts), 1)], 1)


def _write_uncached(
    backbone: Backbone,
    served: ServedAdapters,
    texts: Sequence[_Text],
    ends: AbstractSet[int],
    on_done: Callable[[int], None],
) -> None:
    """Generate ``texts`` without a cache: every token is computed from its whole text.

    This is for models whose cached states would change with padding before a prompt.
    """
    while texts:
        rows = [[*text.prompt, *text.tokens] for text in texts]
        lengths = [len(row) for row in rows]
        counts = [0] * len(served)
        for text, length in zip(texts, lengths, strict=True):
            counts[text.slot] += length
        ids_T = torch.tensor([token for row in rows for token in row], device=backbone.device)
        positions_T = torch.cat([torch.arange(length) for length in lengths]).to(backbone.device)
        with served.use(served.schedule(counts)):
            hidden_TH = backbone.hidden_states(ids_T, positions_T, lengths)
        lasts = [end - 1 for end in itertools.accumulate(lengths)]
        with served.use(served.schedule(_tokens_of_slots(texts, 1, len(served)))):
            next_B = backbone.logits(hidden_TH[lasts]).argmax(-1)
        going = [text for text, token in zip(texts, next_B.tolist(), strict=True) if text.take(token, ends)]
        on_done(len(texts) - len(going))
        texts = going


def _tokens_of_slots(texts: Sequence[_Text], num_tokens: int, num_slots: int) -> list[int]:
    """Return the number of tokens of every slot in a forward pass with ``num_tokens`` tokens per text."""
    counts = [0] * num_slots
    for text in texts:
        counts[text.slot] += num_tokens
    return counts
