"""The adapter bank: all adapters resident in an executor, in one flat tensor with one row per slot.

Shapes: ``Z`` slots, ``P`` parameters of the largest adapter, ``K`` in-features, ``N`` out-features, ``r`` an adapter's
rank. An adapter fills its row from the start, without padding; the rest of the row stays zero.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor

from alto.kernels import GradientSteps, GradientTiles, GroupGradients, LoraOperands, SlotTensors, choose_backend
from alto.lora.layout import (
    ROW_ALIGNMENT,
    AdapterShape,
    AdapterWeights,
    BankLayout,
    ExtraTensor,
    GroupPlace,
    RowPlaces,
    TargetModule,
)
from alto.spec import AdapterDtype, InitLoraWeights

# Sums of squares of a bank's gradients, one per tile, written by the same kernels that write the gradients.
#
# Shapes: ``Z`` slots, ``C`` tiles of the largest adapter.


class SquareSums:
    """The sums of all slots, and which slots' sums cover the whole gradient of the current step.

    An adapter's sums lie in its row in the order of its own groups, independent of other adapters.

    Args:
        groups: Indices of the groups whose kernels write sums.

    Attributes:
        complete: Slots whose sums cover the whole gradient.
    """

    def __init__(
        self,
        layout: BankLayout,
        groups: Collection[int],
        num_slots: int,
        tiles: GradientTiles,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._layout, self.groups, self.tiles = layout, groups, tiles
        largest = layout.places(AdapterShape(rank=layout.max_rank, targets=layout.modules))
        num_tiles = sum(self._counts(largest.groups))
        row_size = -(-num_tiles // ROW_ALIGNMENT) * ROW_ALIGNMENT
        self.sums_ZC = torch.zeros(num_slots, row_size, device=device, dtype=dtype)
        self.complete: set[int] = set()

    def starts(self, places: Sequence[GroupPlace]) -> list[int]:
        """Return the offset of each group's sums in an adapter's row."""
        return list(accumulate(self._counts(places)[:-1], initial=0))

    def num_sums(self, places: Sequence[GroupPlace]) -> int:
        """Return the number of an adapter's sums."""
        return sum(self._counts(places))

    def _counts(self, places: Sequence[GroupPlace]) -> list[int]:
        max_rank = self._layout.max_rank
        counts = []
        for index, (group, place) in enumerate(zip(self._layout.groups, places, strict=True)):
            widths = [module.out_features for module in group]
            own = self.tiles.num_sums(group[0].in_features, widths, place.ranks, max_rank)
            counts.append(sum(own) if index in self.groups else 0)
        return counts


ADAPTER_DTYPES: Mapping[AdapterDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class AdapterBank:
    """Weights and gradients of all slots.

    Args:
        dtype: Precision of weights and gradients.
        has_grads: False if the adapters are not trained; the gradients then have a shape but use no memory.
        initial: Initial value of every extra tensor of the layout, by name, on any device.

    Attributes:
        working_ZP: Copies of the weights in the dtype of matrix products; None if products read the weights directly.
            Code that writes the weights of a slot must call :meth:`copy_weights`.
        grads_ZP: Gradients, accumulated by the backward pass and valid until :meth:`end_gradients`. Other code that
            writes them must call :meth:`forget_square_sums`.
        square_sums: Sums of squares of the gradients; None if the kernels do not compute them.
        anchor: A scalar that requires grad; see :func:`alto.kernels.grouped_lora_linear`.
        ops: The kernel backend for the bank's device; :mod:`alto.kernels.reference` documents its ops.
    """

    def __init__(
        self,
        layout: BankLayout,
        num_slots: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        has_grads: bool = True,
        initial: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        assert initial.keys() == {extra.name for extra in layout.extras}
        self.layout = layout
        self.initial = initial
        self.num_slots = num_slots
        self.params_ZP = torch.zeros(num_slots, layout.row_size, device=device, dtype=dtype)
        self.grads_ZP = torch.zeros_like(self.params_ZP, device=None if has_grads else "meta")
        self.working_ZP: Tensor | None = None
        self.square_sums: SquareSums | None = None
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.ops = choose_backend(device=device)
        self._steps = GradientSteps(num_slots)
        self._gradients = {
            index: GroupGradients(self._steps) for index, group in enumerate(layout.groups) if _is_overwritten(group[0])
        }
        self._places: dict[int, RowPlaces] = {}
        self._cleared: set[int] = set()
        self._operands: list[tuple[int, LoraOperands]] = []
        self._tensors: list[tuple[ExtraTensor, SlotTensors]] = []

    def keep_copies(self, dtype: torch.dtype | None) -> None:
        """Keep copies of the weights for matrix products (:func:`alto.kernels.reference.working_dtype`); None keeps no
        copies. Call this before :meth:`operands`."""
        assert not self._operands, "operands would not know of them"
        self.working_ZP = None if dtype is None else self.params_ZP.to(dtype, copy=True)

    def keep_square_sums(self, tiles: GradientTiles | None) -> None:
        """Keep the sums of squares that kernels compute for the ``tiles`` of gradients they write
        (:func:`alto.kernels.reference.gradient_tiles`); None keeps no sums. Call this before :meth:`operands`."""
        assert not self._operands, "operands would not know of them"
        exact = torch.promote_types(self.params_ZP.dtype, torch.float32)
        self.square_sums = tiles and SquareSums(
            *(self.layout, self._gradients.keys(), self.num_slots, tiles), device=self.params_ZP.device, dtype=exact
        )

    def operands(self, group_index: int, number: int) -> LoraOperands:
        """Return the bank's view for group ``group_index`` of the layout; it stays valid as jobs come and go.

        For a parameter that stacks ``E`` experts, every expert has its own slot for each slot of the bank: number
        ``e · Z + slot``, with offsets that count from the start of the bank.

        Args:
            number: Number of the group in the model, independent of the jobs' targets.
        """
        group = self.layout.groups[group_index]
        num_experts = group[0].num_experts

        def expanded(bank_ZP: Tensor) -> Tensor:
            return bank_ZP.view(1, -1).expand(num_experts * self.num_slots, -1) if num_experts else bank_ZP

        square_sums = self.square_sums if group_index in self._gradients else None
        operands = LoraOperands(
            number=number,
            in_features=group[0].in_features,
            out_features=[module.out_features for module in group],
            params_ZP=expanded(self.params_ZP),
            grads_ZP=expanded(self.grads_ZP),
            max_rank=self.layout.max_rank,
            rank_step=self.layout.rank_step,
            gradients=self._gradients.get(group_index),
            working_ZP=None if self.working_ZP is None else expanded(self.working_ZP),
            sums_ZC=None if square_sums is None else square_sums.sums_ZC,
            tiles=None if square_sums is None else square_sums.tiles,
        )
        self._operands.append((group_index, operands))
        for slot in self._places:
            self._assign(operands, group_index, slot)
        return operands

    def operands_of_linear(self) -> Iterator[LoraOperands]:
        """Yield the views handed out for linear modules, without those of embeddings and experts."""
        for group_index, operands in self._operands:
            if group_index in self._gradients:
                yield operands

    def tensors(self, name: str) -> SlotTensors | None:
        """Return a view of all slots' values of the extra tensor ``name``, for its layer. None if no job has this
        tensor. The view stays valid when jobs enter or leave slots."""
        extra = next((extra for extra in self.layout.extras if extra.name == name), None)
        if extra is None:
            return None
        tensors = SlotTensors(params_ZP=self.params_ZP, grads_ZP=self.grads_ZP, shape=extra.shape)
        self._tensors.append((extra, tensors))
        for slot in self._places:
            self._assign_tensor(tensors, extra, slot)
        return tensors

    def occupy(self, slot: int, shape: AdapterShape) -> None:
        """Assign ``slot`` to an adapter of ``shape``, with zero weights and gradients."""
        self.params_ZP[slot].zero_()
        self.copy_weights(slot)
        self.grads_ZP[slot].zero_()
        self.end_gradients([slot])
        self._places[slot] = places = self.layout.places(shape)
        is_added = any(any(place.ranks) and index not in self._gradients for index, place in enumerate(places.groups))
        if places.extras or is_added:
            self._cleared.add(slot)
        for group_index, operands in self._operands:
            self._assign(operands, group_index, slot)
        for extra, tensors in self._tensors:
            self._assign_tensor(tensors, extra, slot)

    def release(self, slot: int) -> None:
        """Free ``slot``."""
        del self._places[slot]
        self._cleared.discard(slot)
        for group_index, operands in self._operands:
            for expert in range(self.layout.groups[group_index][0].num_matrices):
                operands.clear(expert * self.num_slots + slot)
        for _, tensors in self._tensors:
            tensors.clear(slot)

    def complete_gradients(self, slots: Iterable[int]) -> None:
        """Zero the gradients of modules that the backward passes of this step did not reach."""
        for slot in slots:
            if self.is_cleared(slot):
                continue
            places = self.places(slot)
            targeted = [index for index, place in enumerate(places.groups) if any(place.ranks)]
            left = [index for index in targeted if not self._gradients[index].has(slot)]
            if len(left) == len(targeted):
                self.grads_ZP[slot, : places.end].zero_()
                continue
            if not left and self.square_sums is not None:
                self.square_sums.complete.add(slot)
            for index in left:
                group, place = self.layout.groups[index], places.groups[index]
                a_end = place.a_start + group[0].in_features * sum(place.ranks)
                self.grads_ZP[slot, place.a_start : a_end].zero_()
                for module, rank, b_start in zip(group, place.ranks, place.b_starts, strict=True):
                    self.grads_ZP[slot, b_start : b_start + rank * module.out_features].zero_()

    def is_cleared(self, slot: int) -> bool:
        """Return whether the gradient of ``slot`` must be zeroed before :meth:`end_gradients`.

        This is so if the adapter has parts whose gradients are always accumulated. All other gradients are overwritten
        in the next step.
        """
        return slot in self._cleared

    def end_gradients(self, slots: Sequence[int]) -> None:
        """End the current step of ``slots``; their gradients are no longer needed."""
        self._steps.end(slots)
        self.forget_square_sums(slots)

    def clear_gradients(self, slots: Sequence[int]) -> None:
        """Zero the gradients of ``slots`` and restart their step."""
        for slot in slots:
            self.grads_ZP[slot].zero_()
        self.end_gradients(slots)

    def forget_square_sums(self, slots: Collection[int]) -> None:
        """Discard the sums of squares of ``slots``, because their gradients have changed since they were computed."""
        if self.square_sums is not None:
            self.square_sums.complete.difference_update(slots)

    def is_free(self, slot: int) -> bool:
        """Return whether ``slot`` holds no adapter."""
        return slot not in self._places

    def places(self, slot: int) -> RowPlaces:
        """Return the offsets of the adapter in ``slot`` within its row."""
        assert slot in self._places, f"slot {slot} is empty"
        return self._places[slot]

    def initialise(self, slot: int, seed: int, init: InitLoraWeights = "default") -> None:
        """Initialise the adapter in ``slot`` as PEFT does.

        ``default``: ``A`` is Kaiming-uniform (a = √5) and ``B`` is zero. ``gaussian``: ``A`` is normal with standard
        deviation ``1 / r`` and ``B`` is zero. ``orthogonal``: both are random, and their product is zero. For
        embeddings ``A`` is always zero and ``B`` normal. Extra tensors start with :attr:`initial`.

        The random values depend on the seed and the adapter's own shape, not on the slot.

        Args:
            init: ``default``, ``gaussian`` or ``orthogonal``; ``orthogonal`` requires even ranks.
        """
        generator = torch.Generator().manual_seed(seed)
        for module, a, b in self.matrices(self.params_ZP, slot):
            if module.is_embedding:
                a.zero_()
                b.copy_(torch.empty(b.shape).normal_(generator=generator))
                continue
            if init == "orthogonal":
                drawn_a, drawn_b = _orthogonal(a.shape[0], a.shape[1], b.shape[1], generator)
                a.copy_(drawn_a)
                b.copy_(drawn_b)
                continue
            drawn = torch.empty(a.shape)
            if init == "gaussian":
                drawn.normal_(std=1.0 / a.shape[-1], generator=generator)
            else:
                bound = 1.0 / math.sqrt(module.in_features)
                drawn.uniform_(-bound, bound, generator=generator)
            a.copy_(drawn)
            b.zero_()
        for extra, tensor in self.extras(self.params_ZP, slot):
            tensor.copy_(self.initial[extra.name])
        self.copy_weights(slot)

    def read(self, slot: int, rows_ZP: Tensor | None = None) -> AdapterWeights:
        """Return a copy of the adapter in ``slot``, or of the slot's row in another tensor with the bank's layout, such
        as the gradients."""
        rows_ZP = self.params_ZP if rows_ZP is None else rows_ZP
        return AdapterWeights(
            {module.name: (_copy(a), _copy(b)) for module, a, b in self.matrices(rows_ZP, slot)},
            {extra.name: _copy(tensor) for extra, tensor in self.extras(rows_ZP, slot)},
        )

    def write(self, slot: int, weights: AdapterWeights) -> None:
        """Copy ``weights`` into ``slot``, which must be assigned to an adapter of the same shape."""
        for module, a, b in self.matrices(self.params_ZP, slot):
            a.copy_(weights[module.name][0])
            b.copy_(weights[module.name][1])
        for extra, tensor in self.extras(self.params_ZP, slot):
            tensor.copy_(weights.extras[extra.name])
        self.copy_weights(slot)

    def copy_weights(self, slot: int) -> None:
        """Copy the weights of ``slot`` to :attr:`working_ZP`, after they were written."""
        if self.working_ZP is not None:
            self.working_ZP[slot].copy_(self.params_ZP[slot])

    def matrices(self, rows_ZP: Tensor, slot: int) -> Iterator[tuple[TargetModule, Tensor, Tensor]]:
        """Yield each module with views of ``slot``'s ``A`` (``[K, r]``) and ``B`` (``[r, N]``), in the model's order.

        For stacked experts the shapes are ``[E, K, r]`` and ``[E, r, N]``.

        Args:
            rows_ZP: Any tensor with the bank's layout.
        """
        places = self.places(slot)
        views: dict[TargetModule, tuple[Tensor, Tensor]] = {}
        for group, place in zip(self.layout.groups, places.groups, strict=True):
            width, last = sum(place.ranks), 0
            if width and (num_experts := group[0].num_experts):
                a_end = place.a_start + num_experts * group[0].in_features * width
                b_end = place.b_starts[0] + num_experts * width * group[0].out_features
                views[group[0]] = (
                    rows_ZP[slot, place.a_start : a_end].view(num_experts, -1, width),
                    rows_ZP[slot, place.b_starts[0] : b_end].view(num_experts, width, -1),
                )
                continue
            a_end = place.a_start + group[0].in_features * width
            a_KQ = rows_ZP[slot, place.a_start : a_end].view(-1, width) if width else None
            for module, rank, b_start in zip(group, place.ranks, place.b_starts, strict=True):
                if a_KQ is not None and rank:
                    first, last = last, last + rank
                    b = rows_ZP[slot, b_start : b_start + rank * module.out_features].view(rank, -1)
                    views[module] = a_KQ[:, first:last], b
        for module in self.layout.modules:
            if module in views:
                yield module, *views[module]

    def extras(self, rows_ZP: Tensor, slot: int) -> Iterator[tuple[ExtraTensor, Tensor]]:
        """Yield views of ``slot``'s extra tensors in a tensor with the bank's layout, in the order of the row."""
        for extra, start in self.places(slot).extras:
            yield extra, rows_ZP[slot, start : start + extra.num_parameters].view(extra.shape)

    def _assign_tensor(self, tensors: SlotTensors, extra: ExtraTensor, slot: int) -> None:
        start = dict(self.places(slot).extras).get(extra)
        if start is None:
            tensors.clear(slot)
        else:
            tensors.assign(slot, start)

    def _assign(self, operands: LoraOperands, group_index: int, slot: int) -> None:
        place, first = self.places(slot).groups[group_index], self.layout.groups[group_index][0]
        if first.num_experts is None:
            sums = self.square_sums
            sums_start = 0 if sums is None else sums.starts(self.places(slot).groups)[group_index]
            operands.assign(slot, place.ranks, place.a_start, place.b_starts, place.ratios, sums_start)
            return
        row_start, (rank,) = slot * self.layout.row_size, place.ranks
        for expert in range(first.num_experts):
            a_start = row_start + place.a_start + expert * first.in_features * rank
            b_start = row_start + place.b_starts[0] + expert * rank * first.out_features
            operands.assign(expert * self.num_slots + slot, place.ranks, a_start, [b_start], place.ratios)


def _is_overwritten(module: TargetModule) -> bool:
    """Return whether every backward pass through a module writes the gradients of its whole adapter.

    This is not so for experts, because some may receive no tokens, nor for embeddings.
    """
    return module.num_experts is None and not module.is_embedding


def _orthogonal(num_in: int, rank: int, num_out: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return ``A`` in the span of the even rows of a random orthogonal matrix, and ``B`` in the span of its odd rows.

    Source: PEFT 0.21, ``LoraLayer.orthogonal_init``.
    """
    q_RR, _ = torch.linalg.qr(torch.randn(rank, rank, generator=generator))
    a_KR = torch.randn(num_in, rank // 2, generator=generator).mm(q_RR[0::2]) / 10.0
    b_NR = torch.randn(rank // 2, num_out, generator=generator).T.mm(q_RR[1::2]) / 10.0
    return a_KR, b_NR.T


def _copy(matrix: Tensor) -> Tensor:
    return matrix.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
