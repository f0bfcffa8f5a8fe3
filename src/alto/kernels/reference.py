"""Every op in plain PyTorch, one slot at a time, written for readability: the reference for the tests of all backends.

Shapes: ``T`` tokens of a micro-batch, ``Z`` slots, ``K`` in-features of a group of modules, ``N`` out-features of one
of its members, ``Q`` ranks of a slot's adapter over all members it targets, ``P`` parameters of a slot. The offsets of
the adapters are in :class:`alto.kernels.operands.LoraOperands`; a slot that targets no member of a group does not
change the group's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from alto.kernels.dropout import dropped
from alto.kernels.operands import GradientTiles, LoraOperands, RowStep, SlotMatrices
from alto.kernels.schedule import TokenSchedule
from alto.kernels.stochastic_rounding import random_bits, rounded

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
    """Compute ``s[i] = dropout_i(x[i]) @ a_i`` for the tokens ``i`` of every slot, with each member's columns times its
    ratio.

    The ratio of a member is its own scale divided by that of the segment (:meth:`LoraOperands.assign`), usually 1.

    Returns:
        ``s_TQ``, as wide as the widest slot, in the dtype of the bank (Triton's kernels use the dtype of the factors it
        is rounded to); columns past a slot's own are zero.
    """
    s_TQ = operands.params_ZP.new_zeros(x_TK.shape[0], operands.max_width)
    for (slot, start, end), key in zip(schedule.segments, schedule.dropout, strict=True):
        if matrices := operands.slots.get(slot):
            x = dropped(x_TK[start:end].to(s_TQ.dtype), key, operands.number)
            s_TQ[start:end, : matrices.width] = x @ matrices.a_KQ
            _scale_members(s_TQ[start:end], matrices)
    return s_TQ


def narrow_rows(operands: LoraOperands, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Return the row stride of ``s_TQ`` and ``ds_TQ``, in elements, and their dtype.

    Args:
        dtype: Dtype of the input or upstream gradients that they are computed from.
    """
    return operands.max_width, operands.params_ZP.dtype


def grouped_expand(s_TQ: Tensor, operands: LoraOperands, ys: Sequence[Tensor], schedule: TokenSchedule) -> None:
    """Write every slot's LoRA output for every member: ``y[i] = scale_i * s[i] @ b_i``, zero if a slot does not target
    a member.

    The frozen GEMM then adds its product, so no other pass over ``y`` is needed. Columns of ``s_TQ`` past a slot's own
    are never read.

    Args:
        s_TQ: Result of :func:`grouped_shrink`.
        ys: Uninitialised output ``[T, N]`` of every member.
    """
    for (slot, start, end), scale in zip(schedule.segments, schedule.scales, strict=True):
        for y_TN in ys:
            y_TN[start:end] = 0.0
        if matrices := operands.slots.get(slot):
            for y_TN, b_RN, (first, last) in zip(ys, matrices.bs, matrices.columns, strict=True):
                y_TN[start:end] = scale * (s_TQ[start:end, first:last] @ b_RN)


def grouped_backward(
    x_TK: Tensor,
    s_TQ: Tensor,
    dys: Sequence[Tensor],
    operands: LoraOperands,
    dx_TK: Tensor | None,
    schedule: TokenSchedule,
) -> None:
    """Run :func:`grouped_backward_input`, then :func:`grouped_backward_weight`."""
    ds_TQ = grouped_backward_input(dys, operands, dx_TK, schedule)
    grouped_backward_weight(x_TK, s_TQ, dys, ds_TQ, operands, schedule)


def grouped_backward_input(
    dys: Sequence[Tensor], operands: LoraOperands, dx_TK: Tensor | None, schedule: TokenSchedule
) -> Tensor:
    """Compute ``ds[i] = dy[i] @ b_iᵀ`` and ``dx[i] = dropout_i(scale_i * ds[i] @ a_iᵀ)``.

    The columns of each member in ``ds`` are multiplied by its ratio. Both are zero if a slot targets no member.

    Args:
        dys: Upstream gradient ``[T, N]`` of every member.
        dx_TK: Uninitialised input gradient, to which the base later adds its own; None if the input needs no gradient.

    Returns:
        ``ds_TQ``, without the scale; columns past a slot's own are zero.
    """
    ds_TQ = operands.params_ZP.new_zeros(schedule.num_tokens, operands.max_width)
    for (slot, start, end), scale, key in zip(schedule.segments, schedule.scales, schedule.dropout, strict=True):
        if dx_TK is not None:
            dx_TK[start:end] = 0.0
        if matrices := operands.slots.get(slot):
            for dy_TN, b_RN, (first, last) in zip(dys, matrices.bs, matrices.columns, strict=True):
                ds_TQ[start:end, first:last] = dy_TN[start:end].to(ds_TQ.dtype) @ b_RN.T
            _scale_members(ds_TQ[start:end], matrices)
            if dx_TK is not None:
                dx = scale * (ds_TQ[start:end, : matrices.width] @ matrices.a_KQ.T)
                dx_TK[start:end] = dropped(dx, key, operands.number)
    return ds_TQ


def grouped_backward_weight(
    x_TK: Tensor | None,
    s_TQ: Tensor,
    dys: Sequence[Tensor],
    ds_TQ: Tensor,
    operands: LoraOperands,
    schedule: TokenSchedule,
) -> None:
    """Accumulate in place ``da_i += scale_i * dropout_i(x[i])ᵀ @ ds[i]`` and ``db_i += scale_i * s[i]ᵀ @ dy[i]``.

    The first product of a slot's step overwrites the previous step's gradient (:meth:`LoraOperands.adds_gradients`).

    Args:
        x_TK: Input of the group; None leaves ``da_i`` to the caller.
        s_TQ: Result of :func:`grouped_shrink`.
        dys: Upstream gradient ``[T, N]`` of every member.
        ds_TQ: Result of :func:`grouped_backward_input`.
    """
    adds = operands.adds_gradients(schedule.slots)
    for (slot, start, end), scale, key, is_added in zip(
        schedule.segments, schedule.scales, schedule.dropout, adds, strict=True
    ):
        if matrices := operands.slots.get(slot):
            if not is_added:
                for gradient in (matrices.da_KQ, *matrices.dbs):
                    gradient.zero_()
            if x_TK is not None:
                x = dropped(x_TK[start:end].to(s_TQ.dtype), key, operands.number)
                matrices.da_KQ.add_(x.T @ ds_TQ[start:end, : matrices.width], alpha=scale)
            for dy_TN, db_RN, (first, last) in zip(dys, matrices.dbs, matrices.columns, strict=True):
                db_RN.add_(s_TQ[start:end, first:last].T @ dy_TN[start:end].to(s_TQ.dtype), alpha=scale)


def row_norms(grads_ZP: Tensor, slots: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return the Euclidean norm of the first ``sizes[i]`` elements of row ``slots[i]``, ``[len(slots)]``, at least
    float32."""
    exact = torch.promote_types(grads_ZP.dtype, torch.float32)
    rows = [grads_ZP[slot, :size].to(exact) for slot, size in zip(slots, sizes, strict=True)]
    return torch.stack([torch.linalg.vector_norm(row) for row in rows])


def gradient_tiles(base: torch.dtype, bank: torch.dtype) -> GradientTiles | None:
    """Return the tiles of gradients whose sums of squares :func:`grouped_backward_weight` stores in
    :attr:`LoraOperands.sums_ZC`; None if it stores none. ``base`` is the dtype of activations."""
    return None


def summed_norms(sums_ZC: Tensor, slots: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Return the square root of the sum of the first ``counts[i]`` elements of row ``slots[i]``, ``[len(slots)]``."""
    return torch.stack([sums_ZC[slot, :count].sum().sqrt() for slot, count in zip(slots, counts, strict=True)])


def bank_adamw(
    params_ZP: Tensor,
    grads_ZP: Tensor,
    exp_avg_ZP: Tensor,
    exp_avg_sq_ZP: Tensor,
    working_ZP: Tensor | None,
    rows: Sequence[RowStep],
    grad_scales: Tensor,
) -> None:
    """Take one AdamW step for every listed row, in place. Other rows are not changed.

    The update equals a step of ``torch.optim.AdamW`` with each row's own settings. A row's gradient is undefined
    afterwards, unless it is cleared. All memory is allocated before the first row changes, so if memory runs out, no
    row has changed. If moments and weights have different dtypes, the arithmetic is in float32.

    Args:
        working_ZP: Copies of the weights in another dtype, updated with them; None if there are none.
        grad_scales: Factor on each row's gradient (clipping), ``[len(rows)]``.
    """
    updates = []
    for row, grad_scale in zip(rows, grad_scales, strict=True):
        has_one_dtype = exp_avg_ZP.dtype == params_ZP.dtype and row.rounding_key is None
        exact = params_ZP.dtype if has_one_dtype else torch.float32
        beta1, beta2 = row.betas
        stored = [bank_ZP[row.slot, : row.parts.end] for bank_ZP in (params_ZP, grads_ZP, exp_avg_ZP, exp_avg_sq_ZP)]
        params, grads, exp_avg, exp_avg_sq = (tensor.to(exact) for tensor in stored)
        rate, decay = torch.empty_like(params), torch.empty_like(params)
        for first, end, *settings in row.spans():
            rate[first:end], decay[first:end] = settings
        gradient = grads * grad_scale
        next_avg = beta1 * exp_avg + (1.0 - beta1) * gradient
        next_avg_sq = beta2 * exp_avg_sq + (1.0 - beta2) * gradient * gradient
        mean = next_avg / (1.0 - beta1**row.step)
        deviation = torch.sqrt(next_avg_sq / (1.0 - beta2**row.step))
        decayed = params * (1.0 - rate * decay)
        next_params = decayed - rate * mean / (deviation + row.epsilon)
        if row.rounding_key is not None:
            bits = random_bits(row.rounding_key, torch.arange(len(params), device=params.device))
            next_avg, next_avg_sq = rounded(next_avg, bits & 0xFFFF), rounded(next_avg_sq, bits >> 16)
        updates.append((row, stored, next_params, next_avg, next_avg_sq))
    for row, (params, grads, exp_avg, exp_avg_sq), *values in updates:
        for target, value in zip((params, exp_avg, exp_avg_sq), values, strict=True):
            target.copy_(value)
        if row.clears:
            grads.zero_()
        if working_ZP is not None:
            working_ZP[row.slot, : row.parts.end] = params


def compile_kernels(run: Callable[[], None]) -> Iterator[tuple[int, int]]:
    """Compile all kernels that ``run`` would launch, one per iteration, without running them. Compiled kernels are
    skipped.

    This backend has no kernels to compile.

    Args:
        run: Calls ops on tensors like those of later passes; their values do not matter.

    Returns:
        Number of kernels compiled so far and in total, before the first kernel and after each.
    """
    return iter(())


def working_dtype(base: torch.dtype, bank: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which the ops need copies of the adapters for matrix products with activations of dtype
    ``base``; None if they read the bank directly.

    With copies, the bank holds the master weights of mixed precision, which the optimizer updates. The copies are the
    values that a product would round them to.
    """
    return None


def _scale_members(narrow_TQ: Tensor, matrices: SlotMatrices) -> None:
    for ratio, (first, last) in zip(matrices.ratios, matrices.columns, strict=False):
        narrow_TQ[:, first:last] *= ratio
