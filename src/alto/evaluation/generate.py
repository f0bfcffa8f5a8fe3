"""Completions of many prompts by many adapters in shared batches: greedy, or sampled.

Each completion equals the one that its adapter would write alone, unless rounding decides between two tokens of equal
likelihood. A sampled completion draws from random numbers of its own, so it does not depend on the rest of its batch
either.

Shapes: ``B`` texts of a batch, ``V`` vocabulary, ``T`` new tokens of a text, ``L`` all of its tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from transformers import TopKLogitsWarper, TopPLogitsWarper

from alto.backbone import Backbone, end_tokens, is_out_of_memory, limits_of, release_memory
from alto.data import LabelledText, Message, Pair, Row, encode_prompt
from alto.errors import DataError, DeviceMemoryError
from alto.evaluation.key_value_cache import RoomyLayer, cache_argument, roomy_cache
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


def answers_of(prompts: Sequence[Prompt], texts: Sequence[Text], tokenizer: Any) -> list[Answer]:
    """Return the answers that one model has generated."""
    return [
        Answer(
            prompt=tokenizer.decode(prompt.ids),
            reference=prompt.reference,
            answer=tokenizer.decode(text.tokens, skip_special_tokens=True),
        )
        for prompt, text in zip(prompts, texts, strict=True)
    ]


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

    @property
    def ids(self) -> list[int]:
        """The generated tokens with the end token, if there is one."""
        return self.tokens if self.end is None else [*self.tokens, self.end]

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

    def start_again(self) -> None:
        """Clear the tokens of a text that is not finished."""
        self.tokens.clear()
        self.entropy = 0.0


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
) -> list[list[Text]]:
    """Complete every prompt with every adapter, by greedy decoding.

    A text ends with an end token, after ``max_new_tokens``, or at the model's last position.

    Args:
        prompts: Token ids of each prompt, checked by :func:`check_prompts`.
        batch_size, on_done: See :func:`write`.

    Returns:
        The texts of each adapter, one for each prompt.

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
    return texts


@torch.no_grad()
def write(
    backbone: Backbone,
    adapters: Adapters[Any],
    texts: Sequence[Text],
    *,
    batch_size: int,
    on_done: Callable[[int], None] = lambda num_texts: None,
) -> int:
    """Generate ``texts``, at most ``batch_size`` at a time; when some have ended, the next ones join.

    Args:
        texts: Texts with a budget of at least one token. Texts of one slot with the same prompt (the same object) that
            follow each other compute it once.
        batch_size: Maximum number of texts at a time; lowered whenever memory runs out.
        on_done: Called after every forward pass with the number of texts that it finished, often 0.

    Returns:
        The batch size that fitted into memory.

    Raises:
        DeviceMemoryError: Memory is too small for a single text.
    """
    queue = _Queue(texts, batch_size)
    ends = end_tokens(backbone.model.generation_config, backbone.tokenizer)
    write_queue = _write_uncached if backbone.is_padded else _write
    with backbone.own_attention():
        while not _has_room(partial(write_queue, backbone, adapters, queue, ends, on_done)):
            release_memory()
            if len(queue.running) == 1:
                (text,) = queue.running
                raise DeviceMemoryError(
                    f"expected memory for one answer of up to {text.budget} tokens after a prompt of "
                    f"{len(text.prompt)} tokens, found too little on {backbone.device}; free memory, evaluate fewer "
                    "adapters at a time, or lower max_new_tokens"
                )
            on_done(queue.halve())
    return queue.batch_size


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


_WORTH_JOINING = 4.0
"""Idle passes from which on other texts join. Fewer slow down batches whose texts are about equally long."""


class _Queue:
    """Texts to be generated, at most ``batch_size`` at a time.

    Attributes:
        waiting: Texts that have not begun.
        running: Texts that have begun and not ended.
        idle_passes: Sum over the passes since texts joined of the share of the batch that had ended.
    """

    def __init__(self, texts: Iterable[Text], batch_size: int) -> None:
        self.waiting = deque(texts)
        self.running: list[Text] = []
        self.idle_passes = 0.0
        self.batch_size = batch_size

    @property
    def is_empty(self) -> bool:
        return not self.waiting and not self.running

    @property
    def has_room(self) -> bool:
        """Whether other texts should join now: half of the batch has ended, and the last texts take long.

        Texts that join end later than those that run, so from then on a part of the batch is always idle. If all texts
        of a batch are about equally long, it is faster to wait for its end.
        """
        is_half_empty = len(self.running) <= self.batch_size // 2
        return is_half_empty and self.idle_passes >= _WORTH_JOINING and self._num_joining > 0

    @property
    def _num_joining(self) -> int:
        """Number of texts that fit into the batch; those with the same prompt join together, unless too many."""
        most = count = min(len(self.waiting), self.batch_size - len(self.running))
        while 0 < count < len(self.waiting) and _is_same_prompt(self.waiting[count - 1], self.waiting[count]):
            count -= 1
        return count if count or self.running else most

    def begin(self) -> list[Text]:
        """Move the texts that join from ``waiting`` to ``running``, and return them sorted by slot."""
        joining = sorted((self.waiting.popleft() for _ in range(self._num_joining)), key=lambda text: text.slot)
        self.running = [*self.running, *joining]
        self.idle_passes = 0.0
        return joining

    def passed(self, running: list[Text]) -> None:
        """Take note of a pass after which ``running`` are left."""
        self.running = running
        self.idle_passes += 1.0 - len(running) / self.batch_size

    def halve(self) -> int:
        """Halve the number of texts at a time. Running texts start again, but for those that ended in the pass that
        failed; return their number."""
        left = [text for text in self.running if not text.is_finished]
        num_ended = len(self.running) - len(left)
        self.batch_size = len(self.running) // 2
        for text in left:
            text.start_again()
        self.waiting.extendleft(reversed(left))
        self.running = []
        return num_ended


def _write(
    backbone: Backbone,
    adapters: Adapters[Any],
    queue: _Queue,
    ends: AbstractSet[int],
    on_done: Callable[[int], None],
) -> None:
    """Generate all texts of ``queue``."""
    batch: _Batch | None = None
    while not queue.is_empty:
        if batch is None:
            batch = _Batch(backbone, adapters, queue.begin(), ends)
        elif queue.has_room and batch.can_join:
            batch.join(_Batch(backbone, adapters, queue.begin(), ends))
        else:
            batch.step()
        on_done(len(queue.running) - len(batch.texts))
        queue.passed(batch.texts)
        batch = batch if batch.texts else None


class _Batch:
    """Texts that are generated together, sorted by slot. Texts that end leave it.

    Every text has a row of the cache, at whose end its tokens are, and a token that is drawn but not yet computed.

    Args:
        texts: Texts that have not begun; their prompts are computed, and their first tokens drawn.
    """

    def __init__(
        self, backbone: Backbone, adapters: Adapters[Any], texts: Sequence[Text], ends: AbstractSet[int]
    ) -> None:
        self._backbone, self._adapters, self._ends = backbone, adapters, ends
        self._cache = roomy_cache(backbone.model.config)
        self._cache_setting = {cache_argument(backbone.model): self._cache}
        self.texts = list(texts)
        is_first = [not _is_same_prompt(before, text) for before, text in zip([None, *texts], texts, strict=False)]
        firsts = list(itertools.compress(texts, is_first))
        width = max(len(text.prompt) for text in firsts)
        padded = [[0] * (width - len(text.prompt)) + list(text.prompt) for text in firsts]
        masks = [[0] * (width - len(text.prompt)) + [1] * len(text.prompt) for text in firsts]
        self._mask_BL = torch.tensor(masks, device=backbone.device)
        positions_BT = (self._mask_BL.cumsum(1) - 1).clamp(min=0)
        self._schedule: Any = adapters.schedule(_tokens_of_slots(firsts, width, len(adapters)))
        self._next_B: Tensor
        self._positions_B: Tensor
        self._compute(
            torch.tensor(padded, device=backbone.device),
            positions_BT,
            [number - 1 for number in itertools.accumulate(is_first)],
        )
        self._schedule = None

    @property
    def can_join(self) -> bool:
        """Whether other texts can join; the rows of sliding windows have no padding to move them by."""
        return len(self._layers) == len(self._cache.layers)

    @property
    def _layers(self) -> list[RoomyLayer]:
        """The layers of the cache whose rows can be moved."""
        return [layer for layer in self._cache.layers if isinstance(layer, RoomyLayer)]

    def step(self) -> None:
        """Compute the last token of every text, and draw the next one."""
        if self._schedule is None:
            self._schedule = self._adapters.schedule(_tokens_of_slots(self.texts, 1, len(self._adapters)))
        self._mask_BL = torch.cat([self._mask_BL, self._mask_BL.new_ones(len(self.texts), 1)], 1)
        self._compute(self._next_B[:, None], self._positions_B[:, None], range(len(self.texts)))

    def join(self, other: _Batch) -> None:
        """Add the texts of another batch."""
        if not other.texts:
            return
        texts = [*self.texts, *other.texts]
        order = sorted(range(len(texts)), key=lambda row: texts[row].slot)
        self.texts, self._schedule = [texts[row] for row in order], None
        rows_B = torch.tensor(order, device=self._backbone.device)
        width = self._width
        for layer, others in zip(self._layers, other._layers, strict=True):
            layer.join(others, rows_B.argsort(), width)
        masks = [functional.pad(mask, (width - mask.shape[1], 0)) for mask in (self._mask_BL, other._mask_BL)]
        self._mask_BL = torch.cat(masks)[rows_B]
        self._next_B = torch.cat([self._next_B, other._next_B])[rows_B]
        self._positions_B = torch.cat([self._positions_B, other._positions_B])[rows_B]

    @property
    def _width(self) -> int:
        """Number of computed tokens of the longest text."""
        return max(len(text.prompt) + len(text.tokens) for text in self.texts) - 1

    def _compute(self, ids_BT: Tensor, positions_BT: Tensor, rows: Sequence[int]) -> None:
        """Compute tokens, and draw the next one of every text.

        Args:
            rows: The row of each text in ``ids_BT``.
        """
        with self._adapters.use(self._schedule):
            logits_B1V = self._backbone.model(
                input_ids=ids_BT,
                attention_mask=self._mask_BL,
                position_ids=positions_BT,
                use_cache=True,
                logits_to_keep=1,
                **self._cache_setting,
            ).logits
        logits_BV = logits_B1V[:, -1]
        next_B = _next_tokens(logits_BV if len(rows) == len(logits_BV) else logits_BV[list(rows)], self.texts)
        going = [
            number
            for number, (text, token) in enumerate(zip(self.texts, next_B.tolist(), strict=True))
            if text.take(token, self._ends)
        ]
        num_texts, self.texts = len(self.texts), [self.texts[number] for number in going]
        self._next_B, self._positions_B = next_B, positions_BT[:, -1] + 1
        if len(going) < num_texts:
            self._next_B = next_B[torch.tensor(going, dtype=torch.int64, device=next_B.device)]
        if going and (kept := [rows[number] for number in going]) != list(range(len(logits_BV))):
            self._keep(torch.tensor(kept, device=next_B.device))

    def _keep(self, rows_B: Tensor) -> None:
        """Keep only ``rows_B``, without the padding that all of them have."""
        width = self._mask_BL.shape[1]
        if self.can_join:
            width = self._width
            for layer in self._layers:
                layer.keep(rows_B, width)
        else:
            self._cache.batch_select_indices(rows_B)
        self._mask_BL = self._mask_BL[rows_B, -width:]
        self._positions_B, self._schedule = self._positions_B[rows_B], None


def _is_same_prompt(before: Text | None, text: Text) -> bool:
    return before is not None and before.slot == text.slot and before.prompt is text.prompt


def _write_uncached(
    backbone: Backbone,
    adapters: Adapters[Any],
    queue: _Queue,
    ends: AbstractSet[int],
    on_done: Callable[[int], None],
) -> None:
    """Generate all texts of ``queue`` without a cache: every token is computed from its whole text.

    This is for models whose cached states would change with padding before a prompt.
    """
    while not queue.is_empty:
        queue.begin()
        texts = sorted(queue.running, key=lambda text: text.slot)
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
        queue.running = [text for text, token in zip(texts, next_B.tolist(), strict=True) if text.take(token, ends)]
        on_done(len(texts) - len(queue.running))


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
