"""Completions of many prompts by many adapters in shared batches: greedy, or sampled.

Each completion equals the one that its adapter would write alone, unless rounding decides between two tokens of equal
likelihood. A sampled completion draws from random numbers of its own, so it does not depend on the rest of its batch
either.

Shapes: ``B`` texts of a batch, ``V`` vocabulary, ``T`` new tokens of a text, ``L`` all of its tokens.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, TopKLogitsWarper, TopPLogitsWarper
from transformers.cache_utils import DynamicLayer

from alto.backbone import Backbone, end_tokens, is_out_of_memory, limits_of, release_memory
from alto.data import LabelledText, Message, Pair, Row, encode_prompt
from alto.errors import DataError, DeviceMemoryError
from alto.evaluation.scorers import Answer


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


Schedule = TypeVar("Schedule")

NO_TOKEN = -1
"""The next token of a text if the logits are not finite."""


class Adapters(Protocol[Schedule]):
    """Adapters on a model, one per slot: :class:`alto.lora.ServedAdapters`, or the jobs that train."""

    def __len__(self) -> int: ...

    def schedule(self, num_tokens: Sequence[int]) -> Schedule:
        """Return the schedule of forward passes with ``num_tokens`` tokens per slot, slot after slot."""
        ...

    def use(self, schedule: Schedule) -> AbstractContextManager[None]:
        """Run the enclosed forward pass under ``schedule``."""
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of sampled tokens, applied in this order: the temperature; the ``top_k`` most likely tokens (0: all);
    the most likely tokens until the sum of their probabilities is ``top_p``."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def tokens(self, logits_BV: Tensor, numbers_B: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Draw a token for every row.

        Returns:
            The tokens ``[B]``, and the entropy of each row's distribution ``[B]`` in nats, before tokens are left out.
            A token is the first one at which the sum of probabilities exceeds the row's uniform number in [0, 1). It is
            :data:`NO_TOKEN` if the logits of the row are not finite.
        """
        scores_BV = logits_BV.float() / self.temperature
        entropies_B = torch.special.entr(scores_BV.softmax(-1)).sum(-1)
        if self.top_k == 1:
            largest_B, most_likely_B = scores_BV.max(-1)
            return most_likely_B.where(largest_B.isfinite(), NO_TOKEN), entropies_B
        if self.top_k:
            scores_BV = TopKLogitsWarper(min(self.top_k, scores_BV.shape[1]))(None, scores_BV)
        if self.top_p < 1:
            scores_BV = TopPLogitsWarper(self.top_p)(None, scores_BV)
        sums_BV = scores_BV.softmax(-1).double().cumsum(-1)
        drawn_B1 = torch.tensor(numbers_B, dtype=torch.float64, device=sums_BV.device)[:, None] * sums_BV[:, -1:]
        drawn_B = torch.searchsorted(sums_BV, drawn_B1, right=True).squeeze(1).clamp_(max=sums_BV.shape[1] - 1)
        return drawn_B.where(drawn_B1.squeeze(1).isfinite(), NO_TOKEN), entropies_B


def uniform_numbers(count: int, *seeds: int) -> list[float]:
    """Return ``count`` numbers in [0, 1) that depend on ``seeds`` alone."""
    digest = hashlib.sha256("/".join(map(str, seeds)).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.rand(count, generator=generator, dtype=torch.float64).tolist()


@dataclass(slots=True)
class Text:
    """A completion of ``prompt`` by the adapter in ``slot``.

    Attributes:
        budget: Maximum number of tokens.
        sampling: How tokens are drawn; None for the most likely ones, without their entropies.
        numbers: A uniform number for every token, if they are drawn; a ``top_k`` of 1 needs none.
        tokens: The generated tokens, without the end token.
        end: The end token; None if the text was cut at its budget, or is not finished.
        is_broken: Whether it was cut because logits were not finite.
        entropy: Sum of the entropies of the distributions that its tokens were drawn from, in nats.
    """

    slot: int
    prompt: Sequence[int]
    budget: int
    sampling: Sampling | None = None
    numbers: Sequence[float] = ()
    tokens: list[int] = field(default_factory=list)
    end: int | None = None
    is_broken: bool = False
    is_finished: bool = False
    entropy: float = 0.0

    def take(self, token: int, ends: AbstractSet[int]) -> bool:
        """Add the next token, and return whether the text needs another one."""
        if token in ends:
            self.end = token
        elif token == NO_TOKEN:
            self.is_broken = True
        else:
            self.tokens.append(token)
        self.is_finished = token in ends or self.is_broken or len(self.tokens) == self.budget
        return not self.is_finished

    def start_again(self) -> bool:
        """Clear the generated tokens, and return whether the text was finished."""
        self.tokens.clear()
        self.entropy = 0.0
        was_finished, self.is_finished, self.is_broken, self.end = self.is_finished, False, False, None
        return was_finished


def budget_of(prompt: Sequence[int], max_new_tokens: int, limit: int | None) -> int:
    """Return how many tokens may follow ``prompt`` on a model with ``limit`` positions."""
    return max_new_tokens if limit is None else min(max_new_tokens, limit - len(prompt))


def complete(
    backbone: Backbone,
    served: Adapters[Any],
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
        batch_size, on_done: See :func:`write`.

    Returns:
        For each adapter, the new tokens for each prompt, without the end token.

    Raises:
        DeviceMemoryError: Memory is too small for a single text.
    """
    limit = max_positions(backbone)
    texts = [
        [Text(slot, prompt, budget_of(prompt, max_new_tokens, limit)) for prompt in prompts]
        for slot in range(len(served))
    ]
    # Prompts of similar length share a batch, because shorter prompts are padded.
    by_length = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    write(
        backbone,
        served,
        [of_slot[number] for number in by_length for of_slot in texts],
        batch_size=batch_size,
        on_done=on_done,
    )
    return [[text.tokens for text in of_slot] for of_slot in texts]


@torch.no_grad()
def write(
    backbone: Backbone,
    adapters: Adapters[Any],
    texts: Sequence[Text],
    *,
    batch_size: int,
    on_done: Callable[[int], None] = lambda num_texts: None,
) -> int:
    """Generate ``texts``, in batches of consecutive ones.

    Args:
        texts: Texts with a budget of at least one token. Texts of one slot with the same prompt (the same object) that
            follow each other compute it once.
        batch_size: Number of texts generated at a time; halved whenever memory runs out.
        on_done: Called after every forward pass with the number of texts that it finished, often 0. If memory runs out,
            it is called with a negative number: finished texts that must be generated again.

    Returns:
        The batch size that fitted into memory.

    Raises:
        DeviceMemoryError: Memory is too small for a single text.
    """
    queue = list(texts)
    ends = end_tokens(backbone.model.generation_config, backbone.tokenizer)
    with backbone.own_attention():
        while queue:
            batch = sorted(queue[:batch_size], key=lambda text: text.slot)
            write_batch = _write_uncached if backbone.is_padded else _write
            if _has_room(partial(write_batch, backbone, adapters, batch, ends, on_done)):
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
    return batch_size


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
    adapters: Adapters[Any],
    texts: Sequence[Text],
    ends: AbstractSet[int],
    on_done: Callable[[int], None],
) -> None:
    """Generate ``texts``, which are sorted by slot, in one batch. Finished texts leave the batch."""
    device = backbone.device
    firsts = [text for before, text in zip([None, *texts], texts, strict=False) if not _is_same_prompt(before, text)]
    width = max(len(text.prompt) for text in firsts)
    lengths = [len(text.prompt) for text in firsts]
    padded = [[0] * (width - len(text.prompt)) + list(text.prompt) for text in firsts]
    ids_BT = torch.tensor(padded, device=device)
    mask_BL = torch.tensor([[0] * (width - length) + [1] * length for length in lengths], device=device)
    positions_BT = (mask_BL.cumsum(1) - 1).clamp(min=0)
    cache = roomy_cache(backbone.model.config)
    cache_setting = {cache_argument(backbone.model): cache}
    schedule = adapters.schedule(_tokens_of_slots(firsts, width, len(adapters)))
    going = _rows_of_prompts(texts)
    while True:
        with adapters.use(schedule):
            logits_B1V = backbone.model(
                input_ids=ids_BT,
                attention_mask=mask_BL,
                position_ids=positions_BT,
                use_cache=True,
                logits_to_keep=1,
                **cache_setting,
            ).logits
        logits_BV, positions_B = logits_B1V[:, -1], positions_BT[:, -1] + 1
        if len(texts) > len(logits_BV):  # after the prompts, every text has a row of its own
            rows = torch.tensor(going, device=device)
            cache.batch_select_indices(rows)
            logits_BV, mask_BL, positions_B = logits_BV[rows], mask_BL[rows], positions_B[rows]
        next_B = _next_tokens(logits_BV, texts)
        going = [row for row, token in enumerate(next_B.tolist()) if texts[row].take(token, ends)]
        on_done(len(texts) - len(going))
        if not going:
            return
        is_first, is_smaller = ids_BT.shape[1] > 1, len(going) < len(texts)
        if is_smaller:
            rows = torch.tensor(going, device=device)
            cache.batch_select_indices(rows)
            texts = [texts[row] for row in going]
            next_B, mask_BL, positions_B = next_B[rows], mask_BL[rows], positions_B[rows]
        if is_first or is_smaller or len(texts) > len(ids_BT):
            schedule = adapters.schedule(_tokens_of_slots(texts, 1, len(adapters)))
        ids_BT, positions_BT = next_B[:, None], positions_B[:, None]
        mask_BL = torch.cat([mask_BL, mask_BL.new_ones(len(texts), 1)], 1)


def _is_same_prompt(before: Text | None, text: Text) -> bool:
    return before is not None and before.slot == text.slot and before.prompt is text.prompt


def _rows_of_prompts(texts: Sequence[Text]) -> list[int]:
    """Return the index of each text's prompt among the prompts that are computed."""
    is_new = [not _is_same_prompt(before, text) for before, text in zip([None, *texts], texts, strict=False)]
    return [number - 1 for number in itertools.accumulate(is_new)]


def _write_uncached(
    backbone: Backbone,
    adapters: Adapters[Any],
    texts: Sequence[Text],
    ends: AbstractSet[int],
    on_done: Callable[[int], None],
) -> None:
    """Generate ``texts`` without a cache: every token is computed from its whole text.

    This is for models whose cached states would change with padding before a prompt.
    """
    while texts:
        rows = [[*text.prompt, *text.tokens] for text in texts]
        lengths = [len(row) for row in rows]
        counts = [0] * len(adapters)
        for text, length in zip(texts, lengths, strict=True):
            counts[text.slot] += length
        ids_T = torch.tensor([token for row in rows for token in row], device=backbone.device)
        positions_T = torch.cat([torch.arange(length) for length in lengths]).to(backbone.device)
        with adapters.use(adapters.schedule(counts)):
            hidden_TH = backbone.hidden_states(ids_T, positions_T, lengths)
        lasts = [end - 1 for end in itertools.accumulate(lengths)]
        with adapters.use(adapters.schedule(_tokens_of_slots(texts, 1, len(adapters)))):
            next_B = _next_tokens(backbone.logits(hidden_TH[lasts]), texts)
        going = [text for text, token in zip(texts, next_B.tolist(), strict=True) if text.take(token, ends)]
        on_done(len(texts) - len(going))
        texts = going


def _next_tokens(logits_BV: Tensor, texts: Sequence[Text]) -> Tensor:
    """Return the next token of every text, ``[B]``."""
    largest_B, next_B = logits_BV.max(-1)
    next_B = next_B.where(largest_B.isfinite(), NO_TOKEN)
    for sampling in {text.sampling for text in texts} - {None}:
        assert sampling is not None
        drawn = [row for row, text in enumerate(texts) if text.sampling == sampling]
        for start in range(0, len(drawn), _DRAWN_AT_ONCE):
            part = drawn[start : start + _DRAWN_AT_ONCE]
            rows = torch.tensor(part, device=logits_BV.device)
            numbers = [texts[row].numbers[len(texts[row].tokens)] for row in part] if sampling.top_k != 1 else []
            next_B[rows], entropies_B = sampling.tokens(logits_BV[rows], numbers)
            for row, entropy in zip(part, entropies_B.tolist(), strict=True):
                texts[row].entropy += entropy
    return next_B


_DRAWN_AT_ONCE = 64
"""Number of texts whose tokens are drawn at a time: sums of probabilities are in float64, over the vocabulary."""


def _tokens_of_slots(texts: Sequence[Text], num_tokens: int, num_slots: int) -> list[int]:
    """Return the number of tokens of every slot in a forward pass with ``num_tokens`` tokens per text."""
    counts = [0] * num_slots
    for text in texts:
        counts[text.slot] += num_tokens
    return counts
