"""The adapters of linear modules that read the same input, in the form that the ops use.

``M`` modules that read the same input (q, k and v of an attention, gate and up of an MLP; often a single module) form a
group, which the ops treat as one wide linear layer. In a slot's row, the ``A`` of all members lie side by side as one
``[K, Q]``, where ``Q`` is the sum of the slot's ranks over the members it targets, and each ``B`` is stored separately
as ``[r, N]``. Nothing is padded, so offsets depend only on the slot's own adapter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from alto.kernels.forward_table import upload

# The step in which each gradient of a bank was written: the first product of a step overwrites, later ones are added.
#
# So gradients need not be zeroed after a step, and none is read before the first product of the next step. Kernels may
# also store the sum of squares of every gradient tile they write, so that a gradient's norm needs no extra pass over
# it.


class GradientTiles(NamedTuple):
    """The tiles in which kernels write gradients.

    Attributes:
        wide: Number of features per tile.
        narrow: Largest number of ranks per tile.
        many, wide_of_many: If a bank may have more than ``many`` ranks side by side, tiles have ``wide_of_many``
            features.
    """

    wide: int
    narrow: int
    many: int
    wide_of_many: int

    def num_sums(
        self, in_features: int, out_features: Sequence[int], ranks: Sequence[int], max_rank: int
    ) -> tuple[int, ...]:
        """Return the number of tiles of a group's ``A`` and of every member's ``B``, for an adapter with these ranks in
        a bank with up to ``max_rank``."""
        a = self._num_tiles(in_features, sum(ranks), max_rank * len(ranks))
        bs = (self._num_tiles(wide, rank, max_rank) for wide, rank in zip(out_features, ranks, strict=True))
        return a, *bs

    def _num_tiles(self, wide: int, narrow: int, most: int) -> int:
        columns = self.wide_of_many if most > self.many else self.wide
        return -(-wide // columns) * -(-narrow // self.narrow)


class GradientSteps:
    """Step numbers of all slots, shared by all groups of modules of a bank."""

    def __init__(self, num_slots: int) -> None:
        self.of_slots = [0] * num_slots

    def end(self, slots: Sequence[int]) -> None:
        """End the current step of ``slots``; their gradients are no longer needed."""
        for slot in slots:
            self.of_slots[slot] += 1


class GroupGradients:
    """The gradients of one group of modules that were already written in the current step."""

    def __init__(self, steps: GradientSteps) -> None:
        self._steps = steps.of_slots
        self._written = [-1] * len(steps.of_slots)

    def begin(self, slots: Sequence[int]) -> tuple[bool, ...]:
        """Return whether each of ``slots`` already has a gradient of its current step, and mark all of them as having
        one."""
        steps, written = self._steps, self._written
        found = tuple([written[slot] == steps[slot] for slot in slots])
        if not all(found):
            for slot in slots:
                written[slot] = steps[slot]
        return found

    def has(self, slot: int) -> bool:
        """Return whether ``slot`` has a gradient of its current step."""
        return self._written[slot] == self._steps[slot]


class RowParts(NamedTuple):
    """Ends of the parts of an adapter's row; each part begins where the previous one ends, and may be empty.

    Attributes:
        a_end: End of ``A``, which has weight decay and the learning rate of ``A``.
        decayed_end: End of ``B`` and of vectors with weight decay, which have the learning rate of ``B`` (LoRA+).
        vectors_end: End of vectors without weight decay, which have the learning rate of ``B``.
        end: End of all other tensors, which have weight decay and the learning rate of ``A``. Equals the number of
            parameters of the adapter.
    """

    a_end: int
    decayed_end: int
    vectors_end: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStep:
    """The next AdamW step of one row.

    Attributes:
        step: Number of this step in the row's own count, 1 for the first.
        rates: Learning rates of ``A`` and of ``B``.
        clears: Whether the row's gradient is set to zero.
        rounding_key: Key for stochastic rounding of bfloat16 moments
            (:func:`alto.kernels.stochastic_rounding.rounding_key`); None rounds to nearest, in all rows of a bank.
    """

    slot: int
    parts: RowParts
    step: int
    rates: tuple[float, float]
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    clears: bool
    rounding_key: int | None = None

    def spans(self) -> Iterator[tuple[int, int, float, float]]:
        """Yield start, end, learning rate and weight decay of as few runs of elements as possible."""
        (rate_of_a, rate_of_b), weight_decay = self.rates, self.weight_decay
        first, settings = 0, (rate_of_a, weight_decay)
        parts = ((rate_of_a, weight_decay), (rate_of_b, weight_decay), (rate_of_b, 0.0), (rate_of_a, weight_decay))
        start = 0
        for end, of_part in zip(self.parts, parts, strict=True):
            if end > start and of_part != settings:
                if start > first:
                    yield first, start, *settings
                first, settings = start, of_part
            start = end
        if start > first:
            yield first, start, *settings


VECTOR_SIZE = 8
"""Largest number of two-byte elements that one GPU instruction can move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMatrices:
    """One slot's adapter on a group, as views of its row.

    Attributes:
        a_KQ, da_KQ: Down-projections of the targeted members side by side, and their gradients.
        bs, dbs: Up-projection ``[r, N]`` of every member, and their gradients; ``r`` is 0 if the member is not
            targeted.
        a_QK, b_NRs: ``a_KQ`` and ``bs`` transposed, as views of the same memory.
        columns: First column and end of every member's ranks in ``Q``.
        ratios: Scale of every member's output divided by the segment's scale; empty if all are 1.
    """

    a_KQ: Tensor
    da_KQ: Tensor
    bs: tuple[Tensor, ...]
    dbs: tuple[Tensor, ...]
    a_QK: Tensor
    b_NRs: tuple[Tensor, ...]
    columns: tuple[tuple[int, int], ...]
    ratios: tuple[float, ...] = ()

    @property
    def width(self) -> int:
        """``Q``."""
        return self.a_KQ.shape[1]


@dataclass(kw_only=True, eq=False)
class LoraOperands:
    """A group's view of the bank; the bank updates it when a slot is assigned or freed.

    Attributes:
        number: Number of the group in the model, part of the key of its dropout masks. It is not the group's index in
            the bank, which depends on the targets of other jobs.
        out_features: ``N`` of every member.
        params_ZP, grads_ZP: The bank, contiguous in ``P``.
        working_ZP: Copies of ``params_ZP`` in the dtype of matrix products
            (:func:`alto.kernels.reference.working_dtype`); None if kernels read the bank directly.
        max_rank: The largest rank that a slot may hold.
        rank_step: A common divisor of all ranks that a slot may hold.
        alignment: A power of two, at most ``VECTOR_SIZE``, that divides the offset and row length of every matrix, and
            the rank and first column of every member. Kernels are compiled for it and move that many elements at a
            time. It never rises when an adapter leaves, so changes of adapters cause no recompilation. If every rank is
            a multiple of ``rank_step`` and placed by the bank, it never falls either.
        gradients: The step in which each slot's gradient was last written; None if gradients are always added.
        sums_ZC: Last written sums of squares of gradient tiles, for all groups of the bank; None if none are kept.
        slots: The adapters by slot; a slot that targets no member is absent.
    """

    number: int
    in_features: int
    out_features: Sequence[int]
    params_ZP: Tensor
    grads_ZP: Tensor
    max_rank: int
    rank_step: int = VECTOR_SIZE
    gradients: GroupGradients | None = None
    working_ZP: Tensor | None = None
    sums_ZC: Tensor | None = None
    tiles: GradientTiles | None = None
    slots: dict[int, SlotMatrices] = field(default_factory=dict, init=False)
    alignment: int = field(init=False)
    _places: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False)
    _table: Tensor | None = field(default=None, init=False)
    _ratios: Tensor | None = field(default=None, init=False)
    _has_ratios: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        assert self.params_ZP.stride(1) == self.grads_ZP.stride(1) == 1
        self.out_features = tuple(self.out_features)
        self.alignment = math.gcd(VECTOR_SIZE, self.rank_step, self.params_ZP.shape[1], *self.out_features)

    @property
    def max_width(self) -> int:
        """The largest ``Q`` that a slot may have."""
        return len(self.out_features) * self.max_rank

    def assign(
        self,
        slot: int,
        ranks: Sequence[int],
        a_start: int,
        b_starts: Sequence[int],
        ratios: Sequence[float] | None = None,
        sums_start: int = 0,
    ) -> None:
        """Set the offsets of ``slot``'s adapter in its row.

        Args:
            ranks: Rank of every member; 0 if it is not targeted.
            a_start, b_starts: Offsets of the ``[K, Q]`` and of every member's ``[r, N]``.
            ratios: Scale of every member's output divided by the segment's scale in the token schedule; None if all are
                1.
            sums_start: Offset of its sums of squares in its row of :attr:`sums_ZC`.
        """
        self.clear(slot)
        width = sum(ranks)
        if not width:
            return
        ends = [sum(ranks[: member + 1]) for member in range(len(ranks))]
        a_end = a_start + self.in_features * width
        b_shapes = list(zip(b_starts, ranks, self.out_features, strict=True))

        def views(row_P: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            a_KQ = row_P[a_start:a_end].view(self.in_features, width)
            return a_KQ, tuple(row_P[start : start + rank * n].view(rank, n) for start, rank, n in b_shapes)

        (a_KQ, bs), (da_KQ, dbs) = views(self.params_ZP[slot]), views(self.grads_ZP[slot])
        columns = tuple((end - rank, end) for end, rank in zip(ends, ranks, strict=True))
        ratios = tuple(ratios or (1.0,) * len(ranks))
        self.slots[slot] = SlotMatrices(
            a_KQ=a_KQ,
            da_KQ=da_KQ,
            bs=bs,
            dbs=dbs,
            a_QK=a_KQ.T,
            b_NRs=tuple(b_RN.T for b_RN in bs),
            columns=columns,
            ratios=() if all(ratio == 1.0 for ratio in ratios) else ratios,
        )
        members = (
            place
            for (first, _), rank, start in zip(columns, ranks, b_starts, strict=True)
            for place in (first, rank, start)
        )
        places = (width, a_start, *members)
        counts = (0,) * (1 + len(ranks))
        if self.tiles is not None:
            counts = self.tiles.num_sums(self.in_features, self.out_features, ranks, self.max_rank)
        self._places[slot] = (*places, *accumulate(counts[:-1], initial=sums_start))
        self.alignment = math.gcd(self.alignment, *places)
        self._has_ratios = self._has_ratios or bool(self.slots[slot].ratios)

    def adds_gradients(self, slots: Sequence[int]) -> tuple[bool, ...]:
        """Return for each of ``slots`` whether its next gradient is added to the current step's, or overwrites an
        earlier step's.

        Call this exactly once before each write.
        """
        return (True,) * len(slots) if self.gradients is None else self.gradients.begin(slots)

    def clear(self, slot: int) -> None:
        """Mark ``slot`` as free."""
        self.slots.pop(slot, None)
        self._places.pop(slot, None)
        self._table = self._ratios = None
        self._has_ratios = any(own.ratios for own in self.slots.values())

    def table(self) -> Tensor:
        """Return all offsets, ``[Z, 3 + 4 M]`` int64, on the bank's device.

        A row holds ``Q`` and the offset of ``A``; then for every member its first column in ``Q``, its rank, and the
        offset of its ``B``; then the offsets of the sums of squares of ``A`` and of every member's ``B``. It is zero if
        a slot targets no member. The table is uploaded again after a slot is assigned or freed.
        """
        if self._table is None:
            free = (0,) * (3 + 4 * len(self.out_features))
            rows = [self._places.get(slot, free) for slot in range(self.params_ZP.shape[0])]
            self._table = upload(rows, torch.int64, self.params_ZP.device)
        return self._table

    def gathered_a(self, member: int, slots_D: Tensor, features: range) -> Tensor:
        """Return rows ``features`` of the ``A`` of ``slots_D`` for one member, ``[D, len(features), max_rank]``;
        columns past a slot's own rank are zero."""
        places_D = self.table()[slots_D]
        width_D, a_start_D, first_D, rank_D = (places_D[:, index] for index in (0, 1, 2 + 3 * member, 3 + 3 * member))
        k_K = torch.arange(features.start, features.stop, device=slots_D.device)
        r_R = torch.arange(self.max_rank, device=slots_D.device)
        starts_D = slots_D * self.params_ZP.shape[1] + a_start_D + first_D
        places_DKR = starts_D[:, None, None] + k_K[:, None] * width_D[:, None, None] + r_R
        return self._gathered(places_DKR, (r_R < rank_D[:, None])[:, None, :])

    def gathered_b(self, member: int, slots_D: Tensor) -> Tensor:
        """Return the ``B`` of ``slots_D`` for one member, ``[D, max_rank, N]``; rows past a slot's own rank are
        zero."""
        places_D = self.table()[slots_D]
        rank_D, b_start_D = places_D[:, 3 + 3 * member], places_D[:, 4 + 3 * member]
        num_out = self.out_features[member]
        r_R = torch.arange(self.max_rank, device=slots_D.device)
        starts_D = slots_D * self.params_ZP.shape[1] + b_start_D
        n_N = torch.arange(num_out, device=slots_D.device)
        places_DRN = starts_D[:, None, None] + r_R[:, None] * num_out + n_N
        return self._gathered(places_DRN, (r_R < rank_D[:, None])[:, :, None])

    def places_of_a(self, slots_T: Tensor, features_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the offsets of row ``features_T[t]`` of the first member's ``A`` in slot ``slots_T[t]``, and which
        columns belong to the slot.

        Both have shape ``[T, max_rank]``. Offsets are int64 and count from the start of the bank; other columns have
        offset 0.
        """
        places_T = self.table()[slots_T]
        width_T, a_start_T, first_T, rank_T = (places_T[:, index] for index in range(4))
        r_R = torch.arange(self.max_rank, device=slots_T.device)
        starts_T = slots_T * self.params_ZP.shape[1] + a_start_T + features_T * width_T + first_T
        is_own_TR = r_R < rank_T[:, None]
        return torch.where(is_own_TR, starts_T[:, None] + r_R, 0), is_own_TR

    def scale_ratio(self, slot: int, member: int) -> float:
        """Return the scale of a member's output divided by the segment's scale."""
        ratios = self.slots[slot].ratios
        return ratios[member] if ratios else 1.0

    def _gathered(self, places: Tensor, is_own: Tensor) -> Tensor:
        values = self.params_ZP.view(-1)[torch.where(is_own, places, 0)]
        return torch.where(is_own, values, 0.0)

    def column_ratios(self) -> Tensor | None:
        """Return the ratio of every column, ``[Z, max_width]``, on the bank's device and in its dtype; None if all are
        1.

        Columns that a slot does not have get 1. The tensor is uploaded again after a slot is assigned or freed.
        """
        if not self._has_ratios:
            return None
        if self._ratios is None:
            rows = [[1.0] * self.max_width for _ in range(self.params_ZP.shape[0])]
            for slot, own in self.slots.items():
                for ratio, (first, end) in zip(own.ratios, own.columns, strict=False):
                    rows[slot][first:end] = [ratio] * (end - first)
            self._ratios = upload(rows, self.params_ZP.dtype, self.params_ZP.device)
        return self._ratios
