"""The ops on library GEMMs: no copies of adapter matrices, no work on columns past a slot's own. Runs on CPU and CUDA.

Shapes as in :mod:`alto.kernels.reference`, which documents every op.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from alto.kernels.dropout import DropoutKey, dropped
from alto.kernels.operands import LoraOperands, RowStep, SlotMatrices
from alto.kernels.reference import compile_kernels, gradient_tiles, narrow_rows, summed_norms, working_dtype
from alto.kernels.schedule import TokenSchedule
from alto.kernels.stochastic_rounding import MomentRounding

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


def grouped_shrink(x_TK: Tensor, operands: LoraOperands, schedule: TokenSchedule) -> Tensor:
    """See :func:`alto.kernels.reference.grouped_shrink`; columns past a slot's own are left uninitialised."""
    x_TK = x_TK.to(operands.params_ZP.dtype)
    s_TQ = x_TK.new_empty(x_TK.shape[0], operands.max_width)
    for own, _, key, (x, s) in _occupied(operands, schedule, x_TK, s_TQ):
        torch.mm(dropped(x, key, operands.number), own.a_KQ, out=_columns(s, 0, own.width))
        _scale_members(s, own)
    return s_TQ


def grouped_expand(s_TQ: Tensor, operands: LoraOperands, ys: Sequence[Tensor], schedule: TokenSchedule) -> None:
    """See :func:`alto.kernels.reference.grouped_expand`."""
    _clear_unoccupied(operands, schedule, *ys)
    for own, scale, _, (s, *of_members) in _occupied(operands, schedule, s_TQ, *ys):
        for y, b_RN, (first, end) in zip(of_members, own.bs, own.columns, strict=True):
            _write_product(y, _columns(s, first, end), b_RN, scale)


def grouped_backward(
    x_TK: Tensor,
    s_TQ: Tensor,
    dys: Sequence[Tensor],
    operands: LoraOperands,
    dx_TK: Tensor | None,
    schedule: TokenSchedule,
) -> None:
    """See :func:`alto.kernels.reference.grouped_backward`."""
    ds_TQ = grouped_backward_input(dys, operands, dx_TK, schedule)
    grouped_backward_weight(x_TK, s_TQ, dys, ds_TQ, operands, schedule)


def grouped_backward_input(
    dys: Sequence[Tensor], operands: LoraOperands, dx_TK: Tensor | None, schedule: TokenSchedule
) -> Tensor:
    """See :func:`alto.kernels.reference.grouped_backward_input`; columns past a slot's own are left uninitialised."""
    dys = [dy_TN.to(operands.params_ZP.dtype) for dy_TN in dys]
    ds_TQ = dys[0].new_empty(schedule.num_tokens, operands.max_width)
    for own, _, _, (ds, *of_members) in _occupied(operands, schedule, ds_TQ, *dys):
        for dy, b_NR, (first, end) in zip(of_members, own.b_NRs, own.columns, strict=True):
            torch.mm(dy, b_NR, out=_columns(ds, first, end))
        _scale_members(ds, own)
    if dx_TK is not None:
        _clear_unoccupied(operands, schedule, dx_TK)
        for own, scale, key, (ds, dx) in _occupied(operands, schedule, ds_TQ, dx_TK):
            ds = _columns(ds, 0, own.width)
            if key is None:
                _write_product(dx, ds, own.a_QK, scale)
            else:
                dx[:] = dropped(torch.mm(ds, own.a_QK).mul_(scale), key, operands.number)
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
    flags = zip(schedule.slots, operands.adds_gradients(schedule.slots), strict=True)
    multiply = [_add_product if adds else _write_product for slot, adds in flags if slot in operands.slots]
    dys = [dy_TN.to(operands.grads_ZP.dtype) for dy_TN in dys]
    if x_TK is not None:
        x_TK = x_TK.to(operands.grads_ZP.dtype)
        for to, (own, scale, key, (x, ds)) in zip(multiply, _occupied(operands, schedule, x_TK, ds_TQ), strict=True):
            to(own.da_KQ, dropped(x, key, operands.number).T, _columns(ds, 0, own.width), scale)
    for to, (own, scale, _, (s, *of_members)) in zip(multiply, _occupied(operands, schedule, s_TQ, *dys), strict=True):
        s_QT = s.T
        for dy, db_RN, (first, end) in zip(of_members, own.dbs, own.columns, strict=True):
            to(db_RN, s_QT[first:end], dy, scale)


def row_norms(grads_ZP: Tensor, slots: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """See :func:`alto.kernels.reference.row_norms`."""
    dtype = torch.promote_types(grads_ZP.dtype, torch.float32)
    rows = (grads_ZP[slot, :size] for slot, size in zip(slots, sizes, strict=True))
    return torch.stack([torch.linalg.vector_norm(row, dtype=dtype) for row in rows])


def bank_adamw(
    params_ZP: Tensor,
    grads_ZP: Tensor,
    exp_avg_ZP: Tensor,
    exp_avg_sq_ZP: Tensor,
    working_ZP: Tensor | None,
    rows: Sequence[RowStep],
    grad_scales: Tensor,
) -> None:
    """See :func:`alto.kernels.reference.bank_adamw`. Uses PyTorch's fused AdamW, one call per row or per part of a row.

    A row has megabytes, so a call per row costs little compared with the memory it moves, and each row is read once. If
    the moments have their own dtype, which PyTorch's AdamW does not accept, it works on float32 copies of a row.
    """
    # One step tensor per row and part, because each call increments its own. They are allocated before anything
    # changes, and filled on the device, because copying a number there would make the host wait.
    spans = [
        [(*span, torch.full((), float(row.step - 1), device=params_ZP.device)) for span in row.spans()] for row in rows
    ]
    banks = (params_ZP, grads_ZP, exp_avg_ZP, exp_avg_sq_ZP)
    rounds_at_random = any(row.rounding_key is not None for row in rows)
    has_copies = exp_avg_ZP.dtype != params_ZP.dtype or rounds_at_random
    longest = max((row.parts.end for row in rows), default=0)
    copies = [
        bank_ZP.new_empty(longest, dtype=torch.float32) if has_copies and bank_ZP.dtype != torch.float32 else None
        for bank_ZP in banks
    ]
    rounding = MomentRounding(params_ZP.device) if rounds_at_random else None
    for row, grad_scale, of_row in zip(rows, grad_scales, spans, strict=True):
        end = row.parts.end
        stored = [bank_ZP[row.slot, :end] for bank_ZP in banks]
        exact = [
            tensor if copy is None else copy[:end].copy_(tensor) for tensor, copy in zip(stored, copies, strict=True)
        ]
        exact[1].mul_(grad_scale)
        for first, last, rate, decay, count in of_row:
            params, grads, exp_avg, exp_avg_sq = ([tensor[first:last]] for tensor in exact)
            adamw(
                params,
                grads,
                exp_avg,
                exp_avg_sq,
                [],
                [count],
                fused=True,
                amsgrad=False,
                maximize=False,
                lr=rate,
                beta1=row.betas[0],
                beta2=row.betas[1],
                eps=row.epsilon,
                weight_decay=decay,
            )
        if rounding is not None and row.rounding_key is not None:
            rounding.round_(exact[2], exact[3], row.rounding_key)
        for tensor, copy in zip(stored, exact, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)
        if row.clears:
            stored[1].zero_()
        if working_ZP is not None:
            working_ZP[row.slot, :end] = stored[0]


def _occupied(
    operands: LoraOperands, schedule: TokenSchedule, *tensors: Tensor
) -> Iterator[tuple[SlotMatrices, float, DropoutKey | None, tuple[Tensor, ...]]]:
    """Yield matrices, scale, dropout key and part of each of ``tensors`` for every slot with an adapter in this
    group."""
    lengths = schedule.lengths
    parts = zip(*(tensor.split(lengths) for tensor in tensors), strict=True)
    for slot, scale, key, of_slot in zip(schedule.slots, schedule.scales, schedule.dropout, parts, strict=True):
        if own := operands.slots.get(slot):
            yield own, scale, key, of_slot


def _clear_unoccupied(operands: LoraOperands, schedule: TokenSchedule, *tensors: Tensor) -> None:
    """Write zeros for the tokens of slots that have no adapter in this group."""
    for slot, start, end in schedule.segments:
        if slot not in operands.slots:
            for tensor in tensors:
                tensor[start:end].zero_()


def _columns(x: Tensor, first: int, end: int) -> Tensor:
    """Return columns ``[first, end)``; ``x`` itself if these are all, because creating a view per slot and op takes
    time."""
    return x if end - first == x.shape[1] else x.narrow(1, first, end - first)


def _scale_members(narrow: Tensor, own: SlotMatrices) -> None:
    """Multiply the columns of every member by its ratio; does nothing if all are 1."""
    for ratio, (first, end) in zip(own.ratios, own.columns, strict=False):
        _columns(narrow, first, end).mul_(ratio)


def _write_product(target: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """Compute ``target = scale * left @ right``, in one GEMM if the dtypes agree."""
    if target.dtype == left.dtype:
        torch.addmm(target, left, right, beta=0, alpha=scale, out=target)
    else:
        target.copy_(torch.mm(left, right).mul_(scale))


def _add_product(target: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """Compute ``target += scale * left @ right`` in place, in one GEMM if the dtypes agree."""
    if target.dtype == left.dtype:
        target.addmm_(left, right, alpha=scale)
    else:
        target += torch.mm(left, right).mul_(scale)
