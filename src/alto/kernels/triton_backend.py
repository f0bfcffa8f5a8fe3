"""The ops as Triton kernels; the number of launches per op does not grow with the number of slots. Runs on CUDA.

Modules that read the same input share one read of it, and up to three members of a group share one launch over their
outputs. Shapes as in :mod:`alto.kernels.reference`, which documents every op. No op synchronises host and device.
Atomics only count programs and never add results, so the same inputs give the same bits, and a slot's bits do not
depend on other slots. Compilation does not depend on other slots either: no argument that Triton specialises for
changes as adapters come and go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alto.kernels.forward_table import upload
from alto.kernels.operands import VECTOR_SIZE, LoraOperands, RowStep
from alto.kernels.schedule import TokenSchedule
from alto.kernels.triton_config import (
    ADAMW_BLOCK,
    NORM_SPAN,
    SPLIT,
    adamw_config,
    backward_weight_config,
    ceil_div,
    collected_launches,
    compiled_launches,
    dy_config,
    expand_config,
    gradient_tiles,
    launch,
    narrow_dtype,
    shrink_config,
    square_sums_config,
    summed_norms_config,
    total_norms_config,
    working_dtype,
)
from alto.kernels.triton_kernels.backward_weight import da_kernel
from alto.kernels.triton_kernels.dy import dy_kernel
from alto.kernels.triton_kernels.expand import dx_kernel, expand_kernel
from alto.kernels.triton_kernels.optimizer import (
    adamw_kernel,
    square_sums_kernel,
    summed_norms_kernel,
    total_norms_kernel,
)
from alto.kernels.triton_kernels.shrink import shrink_kernel

__all__ = [
    "bank_adamw",
    "compile_kernels",
    "gradient_tiles",
    "grouped_backward",
    "grouped_backward_input",
    "grouped_backward_weight",
    "grouped_expand",
    "grouped_shrink",
    "narrow_rows",
    "row_norms",
    "summed_norms",
    "working_dtype",
]

_MEMBERS = 3
"""Largest number of members of a group per launch."""

_ROW_ALIGNMENT = 16
"""Elements to whose multiples the rows of narrow tensors are padded, because Triton requires aligned strides."""


def grouped_shrink(x_TK: Tensor, operands: LoraOperands, schedule: TokenSchedule) -> Tensor:
    """See :func:`alto.kernels.reference.grouped_shrink`; columns past a slot's own are left uninitialised."""
    bank = _factors(operands, x_TK.dtype)
    assert x_TK.shape == (schedule.num_tokens, operands.in_features)
    s_TQ = _narrow(x_TK, operands, schedule)
    table, places_Z = schedule.table(x_TK.device), operands.table()
    config = shrink_config(operands.max_width, x_TK.dtype, operands.params_ZP.dtype)
    if table.num_blocks:
        tiles, parts = ceil_div(operands.max_width, config.constants["TILE"]), ceil_div(operands.in_features, SPLIT)
        planes = _planes(s_TQ, operands, parts)
        launch(
            shrink_kernel,
            (table.num_blocks, tiles, parts),
            (
                *(x_TK, bank, s_TQ, planes, _counters(s_TQ.device, table.num_blocks * tiles)),
                *(table.blocks_B6, table.factors_Z2, places_Z),
            ),
            (
                *(operands.number, operands.in_features, *x_TK.stride()),
                *(bank.stride(0), s_TQ.stride(0), parts * s_TQ.stride(0), places_Z.stride(0)),
            ),
            config,
            DROPOUT=table.has_dropout,
            IS_SPLIT=parts > 1,
            ALIGNMENT=operands.alignment,
        )
        _scale_members(s_TQ, operands, schedule)
    return s_TQ


def narrow_rows(operands: LoraOperands, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """See :func:`alto.kernels.reference.narrow_rows`."""
    width = ceil_div(operands.max_width, _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    return width, narrow_dtype(dtype, operands.params_ZP.dtype)


def grouped_expand(s_TQ: Tensor, operands: LoraOperands, ys: Sequence[Tensor], schedule: TokenSchedule) -> None:
    """See :func:`alto.kernels.reference.grouped_expand`."""
    bank = _factors(operands, ys[0].dtype)
    assert s_TQ.shape == (schedule.num_tokens, operands.max_width)
    assert s_TQ.stride(1) == 1
    table, places_Z = schedule.table(s_TQ.device), operands.table()
    config = expand_config(ys[0].dtype, operands.params_ZP.dtype)
    if table.num_blocks:
        for part in _parts(ys, operands, schedule):
            launch(
                expand_kernel,
                (part.num_tiles(config.constants["BLOCK_W"]), table.num_chunks, 1),
                (s_TQ, bank, *part.tensors, table.chunks_C6, table.factors_Z2, places_Z),
                (
                    *(*part.widths, s_TQ.stride(0), bank.stride(0), *part.strides),
                    *(places_Z.stride(0), part.first_place),
                ),
                config,
                ALIGNMENT=operands.alignment,
            )


def grouped_backward(
    x_TK: Tensor,
    s_TQ: Tensor,
    dys: Sequence[Tensor],
    operands: LoraOperands,
    dx_TK: Tensor | None,
    schedule: TokenSchedule,
) -> None:
    """See :func:`alto.kernels.reference.grouped_backward`; ``dys`` is read from memory only once."""
    table = schedule.table(s_TQ.device)
    if table.num_segments:
        ds_TQ = _narrow(dys[0], operands, schedule)
        adds_S = table.flags(operands.adds_gradients(schedule.slots))
        _read_dy(dys, operands, schedule, s_TQ=s_TQ, adds_S=adds_S, ds_TQ=ds_TQ)
        _scale_members(ds_TQ, operands, schedule)
        if dx_TK is not None:
            _write_dx(ds_TQ, operands, dx_TK, schedule)
        _accumulate_da(x_TK, ds_TQ, adds_S, operands, schedule)


def grouped_backward_input(
    dys: Sequence[Tensor], operands: LoraOperands, dx_TK: Tensor | None, schedule: TokenSchedule
) -> Tensor:
    """See :func:`alto.kernels.reference.grouped_backward_input`; columns past a slot's own are left uninitialised."""
    ds_TQ = _narrow(dys[0], operands, schedule)
    if schedule.table(ds_TQ.device).num_segments:
        _read_dy(dys, operands, schedule, ds_TQ=ds_TQ)
        _scale_members(ds_TQ, operands, schedule)
        if dx_TK is not None:
            _write_dx(ds_TQ, operands, dx_TK, schedule)
    return ds_TQ


def grouped_backward_weight(
    x_TK: Tensor | None,
    s_TQ: Tensor,
    dys: Sequence[Tensor],
    ds_TQ: Tensor,
    operands: LoraOperands,
    schedule: TokenSchedule,
) -> None:
    """See :func:`alto.kernels.reference.grouped_backward_weight`."""
    table = schedule.table(s_TQ.device)
    if table.num_segments:
        adds_S = table.flags(operands.adds_gradients(schedule.slots))
        if x_TK is not None:
            _accumulate_da(x_TK, ds_TQ, adds_S, operands, schedule)
        _read_dy(dys, operands, schedule, s_TQ=s_TQ, adds_S=adds_S)


def row_norms(grads_ZP: Tensor, slots: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """See :func:`alto.kernels.reference.row_norms`; two launches for all rows."""
    exact = torch.promote_types(grads_ZP.dtype, torch.float32)
    norms_U = grads_ZP.new_empty(len(slots), dtype=exact)
    if not slots:
        return norms_U
    num_spans = ceil_div(max(sizes), NORM_SPAN)
    sums_UC = grads_ZP.new_empty(len(slots), num_spans, dtype=exact)
    rows_U2 = upload(list(zip(slots, sizes, strict=True)), torch.int64, grads_ZP.device)
    launch(
        square_sums_kernel,
        (num_spans, len(slots), 1),
        (grads_ZP, sums_UC, rows_U2),
        (grads_ZP.stride(0), num_spans),
        square_sums_config(grads_ZP.dtype),
        ALIGNMENT=math.gcd(VECTOR_SIZE, grads_ZP.stride(0)),
    )
    to_norms = total_norms_config(grads_ZP.dtype)
    launch(total_norms_kernel, (len(slots), 1, 1), (sums_UC, norms_U, rows_U2), (num_spans,), to_norms)
    return norms_U


def summed_norms(sums_ZC: Tensor, slots: Sequence[int], counts: Sequence[int]) -> Tensor:
    """See :func:`alto.kernels.reference.summed_norms`; one launch for all rows."""
    norms_U = sums_ZC.new_empty(len(slots))
    rows_U2 = upload(list(zip(slots, counts, strict=True)), torch.int64, sums_ZC.device)
    config = summed_norms_config(sums_ZC.dtype)
    launch(summed_norms_kernel, (len(slots), 1, 1), (sums_ZC, norms_U, rows_U2), (sums_ZC.stride(0),), config)
    return norms_U


def bank_adamw(
    params_ZP: Tensor,
    grads_ZP: Tensor,
    exp_avg_ZP: Tensor,
    exp_avg_sq_ZP: Tensor,
    working_ZP: Tensor | None,
    rows: Sequence[RowStep],
    grad_scales: Tensor,
) -> None:
    """See :func:`alto.kernels.reference.bank_adamw`; one launch for all rows."""
    banks = (params_ZP, grads_ZP, exp_avg_ZP, exp_avg_sq_ZP)
    assert {bank_ZP.stride() for bank_ZP in banks} == {(params_ZP.stride(0), 1)}
    assert working_ZP is None or working_ZP.stride() == params_ZP.stride()
    if not rows:
        return
    places = [(row.slot, *row.parts, row.clears, row.rounding_key or 0) for row in rows]
    settings = [
        (*row.rates, b1, 1.0 - b1, b2, 1.0 - b2, row.epsilon, row.weight_decay, 1.0 - b1**row.step, 1.0 - b2**row.step)
        for row in rows
        for b1, b2 in [row.betas]
    ]
    exact = torch.promote_types(params_ZP.dtype, torch.float32)
    longest = max(row.parts.end for row in rows)
    rows_U7, settings_U10 = upload(places, torch.int64, params_ZP.device), upload(settings, exact, params_ZP.device)
    launch(
        adamw_kernel,
        (ceil_div(longest, ADAMW_BLOCK), len(rows), 1),
        (*banks, params_ZP if working_ZP is None else working_ZP, grad_scales.to(exact), rows_U7, settings_U10),
        (params_ZP.stride(0),),
        adamw_config(params_ZP.dtype),
        HAS_WORKING=working_ZP is not None,
        ROUNDS_AT_RANDOM=any(row.rounding_key is not None for row in rows),
        ALIGNMENT=math.gcd(VECTOR_SIZE, params_ZP.stride(0)),
    )


def compile_kernels(run: Callable[[], None]) -> Iterator[tuple[int, int]]:
    """See :func:`alto.kernels.reference.compile_kernels`."""
    return compiled_launches(collected_launches(run))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Members of a group that share a launch, in the form that the kernels take.

    Attributes:
        tensors: Tensors of three members; if there are fewer, the first is repeated, and no program works on the
            repetition.
        widths: ``N`` of the three.
        strides: Token strides of the three, then out-feature strides of the three.
        first_place: Index of the first member's entries in a row of :meth:`LoraOperands.table`.
        first_sum: Index, in the same row, of the offset of the first member's sums of squares.
    """

    tensors: tuple[Tensor, ...]
    widths: tuple[int, ...]
    strides: tuple[int, ...]
    first_place: int
    first_sum: int
    num_members: int

    def num_tiles(self, block_w: int) -> int:
        """Return the number of tiles of ``block_w`` columns over all members."""
        return sum(ceil_div(width, block_w) for width in self.widths[: self.num_members])


def _parts(tensors: Sequence[Tensor], operands: LoraOperands, schedule: TokenSchedule) -> Iterator[_Part]:
    assert len(tensors) == len(operands.out_features)
    for first in range(0, len(tensors), _MEMBERS):
        members = list(tensors[first : first + _MEMBERS])
        for tensor, width in zip(members, operands.out_features[first:], strict=False):
            assert tensor.shape == (schedule.num_tokens, width)
            assert tensor.dtype == members[0].dtype
        three = (members + members[:1] * _MEMBERS)[:_MEMBERS]
        yield _Part(
            tensors=tuple(three),
            widths=tuple(tensor.shape[1] for tensor in three),
            strides=tuple(tensor.stride(dim) for dim in range(2) for tensor in three),
            first_place=2 + 3 * first,
            first_sum=3 + 3 * len(tensors) + first,
            num_members=len(members),
        )


def _factors(operands: LoraOperands, wide: torch.dtype) -> Tensor:
    """Return the adapters to multiply with tensors of dtype ``wide``."""
    working_ZP = operands.working_ZP
    if working_ZP is None or working_dtype(wide, operands.params_ZP.dtype) != working_ZP.dtype:
        return operands.params_ZP
    return working_ZP


def _narrow(wide: Tensor, operands: LoraOperands, schedule: TokenSchedule) -> Tensor:
    """Return an uninitialised ``[T, Q]``, as wide as the widest slot, for products of ``wide``."""
    width, dtype = narrow_rows(operands, wide.dtype)
    return operands.params_ZP.new_empty(schedule.num_tokens, width, dtype=dtype)[:, : operands.max_width]


def _planes(narrow_TQ: Tensor, operands: LoraOperands, num_parts: int) -> Tensor:
    """Return uninitialised memory for the sums of every part of a product, ``[T, C, Q]``, with rows as wide as those of
    ``narrow_TQ``; any tensor if there is only one part."""
    if num_parts == 1:
        return narrow_TQ
    exact = torch.promote_types(operands.params_ZP.dtype, torch.float32)
    return narrow_TQ.new_empty(len(narrow_TQ), num_parts, narrow_TQ.stride(0), dtype=exact)


_zeros: dict[torch.device, Tensor] = {}


def _counters(device: torch.device, least: int) -> Tensor:
    """Return at least ``least`` zeros, int32; every kernel must leave them as zeros."""
    if device not in _zeros or len(_zeros[device]) < least:
        _zeros[device] = torch.zeros(max(1024, 1 << (least - 1).bit_length()), dtype=torch.int32, device=device)
    return _zeros[device]


def _scale_members(narrow_TQ: Tensor, operands: LoraOperands, schedule: TokenSchedule) -> None:
    """Multiply the columns of every slot's members by their ratios, if any is not 1; multiplying by 1 changes no bits.

    The narrow tensors are small compared with those that the kernels read, so this uses two PyTorch launches, however
    many slots there are.
    """
    ratios_ZQ = operands.column_ratios()
    if ratios_ZQ is not None:
        narrow_TQ *= ratios_ZQ.index_select(0, schedule.slots_of_tokens(narrow_TQ.device))


def _read_dy(
    dys: Sequence[Tensor],
    operands: LoraOperands,
    schedule: TokenSchedule,
    *,
    s_TQ: Tensor | None = None,
    adds_S: Tensor | None = None,
    ds_TQ: Tensor | None = None,
) -> None:
    """Compute the gradient of every ``B`` if ``s_TQ`` and ``adds_S`` are given, and ``ds_TQ`` if that is given
    (uninitialised)."""
    narrow_TQ = s_TQ if ds_TQ is None else ds_TQ
    assert narrow_TQ is not None
    for given_TQ in (s_TQ, ds_TQ):
        assert given_TQ is None or given_TQ.shape == (schedule.num_tokens, operands.max_width)
        assert given_TQ is None or given_TQ.stride(1) == 1
    bank, grads_ZP, places_Z = _factors(operands, dys[0].dtype), operands.grads_ZP, operands.table()
    sums_ZC = grads_ZP if operands.sums_ZC is None else operands.sums_ZC
    table = schedule.table(narrow_TQ.device)
    config = dy_config(operands.max_rank, dys[0].dtype, operands.params_ZP.dtype)
    items_I6 = table.items(
        0 if ds_TQ is None else config.constants["BLOCK_T"],
        0 if s_TQ is None else SPLIT // config.constants["GRADIENT_W"],
    )
    tiles = ceil_div(operands.max_rank, config.constants["TILE"])
    for part in _parts(dys, operands, schedule):
        parts = ceil_div(max(part.widths), SPLIT)
        planes = _planes(narrow_TQ, operands, parts if ds_TQ is not None else 1)
        launch(
            dy_kernel,
            (len(items_I6), part.num_members, tiles * parts),
            (
                *(*part.tensors, bank, narrow_TQ if s_TQ is None else s_TQ, narrow_TQ, planes),
                _counters(narrow_TQ.device, len(items_I6) * part.num_members * tiles),
                *(grads_ZP, sums_ZC, items_I6, items_I6 if adds_S is None else adds_S),
                *(table.factors_Z2, places_Z),
            ),
            (
                *(*part.widths, *part.strides, bank.stride(0)),
                *(narrow_TQ.stride(0) if s_TQ is None else s_TQ.stride(0), narrow_TQ.stride(0)),
                *(parts * narrow_TQ.stride(0), sums_ZC.stride(0), places_Z.stride(0)),
                *(part.first_place, part.first_sum, tiles),
            ),
            config,
            IS_SPLIT=parts > 1,
            HAS_SUMS=operands.sums_ZC is not None,
            ALIGNMENT=operands.alignment,
        )


def _write_dx(ds_TQ: Tensor, operands: LoraOperands, dx_TK: Tensor, schedule: TokenSchedule) -> None:
    assert dx_TK.shape == (schedule.num_tokens, operands.in_features)
    bank, table, places_Z = _factors(operands, dx_TK.dtype), schedule.table(dx_TK.device), operands.table()
    config = expand_config(dx_TK.dtype, operands.params_ZP.dtype)
    launch(
        dx_kernel,
        (ceil_div(operands.in_features, config.constants["BLOCK_W"]), table.num_chunks, 1),
        (ds_TQ, bank, dx_TK, table.chunks_C6, table.factors_Z2, places_Z),
        (
            *(operands.number, operands.in_features, ds_TQ.stride(0)),
            *(bank.stride(0), *dx_TK.stride(), places_Z.stride(0)),
        ),
        config,
        DROPOUT=table.has_dropout,
        ALIGNMENT=operands.alignment,
    )


def _accumulate_da(
    x_TK: Tensor, ds_TQ: Tensor, adds_S: Tensor, operands: LoraOperands, schedule: TokenSchedule
) -> None:
    assert x_TK.shape == (schedule.num_tokens, operands.in_features)
    assert ds_TQ.shape == (schedule.num_tokens, operands.max_width)
    assert ds_TQ.stride(1) == 1
    bank, table, places_Z = operands.grads_ZP, schedule.table(x_TK.device), operands.table()
    sums_ZC = bank if operands.sums_ZC is None else operands.sums_ZC
    config = backward_weight_config(operands.max_width, x_TK.dtype, bank.dtype)
    grid = (
        ceil_div(operands.in_features, config.constants["BLOCK_W"]),
        table.num_segments,
        ceil_div(operands.max_width, config.constants["TILE"]),
    )
    launch(
        da_kernel,
        grid,
        (x_TK, ds_TQ, bank, sums_ZC, table.segments_S6, adds_S, table.factors_Z2, places_Z),
        (
            *(operands.number, operands.in_features, *x_TK.stride()),
            *(ds_TQ.stride(0), bank.stride(0), sums_ZC.stride(0), places_Z.stride(0)),
            2 + 3 * len(operands.out_features),
        ),
        config,
        DROPOUT=table.has_dropout,
        HAS_SUMS=operands.sums_ZC is not None,
        ALIGNMENT=operands.alignment,
    )
