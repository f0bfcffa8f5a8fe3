"""The low-rank change of token embeddings, of every slot for its own tokens.

An embedding is a linear layer of a one-hot input: the product with ``A`` is a choice of its rows, and the gradient of
``A`` is added to the rows that were chosen. One implementation in PyTorch of these two serves all backends: each moves
``T · R`` numbers, in a number of launches that does not depend on the jobs. The rest are the ops of every layer.

Shapes: ``T`` tokens, ``H`` out-features, ``R`` the largest rank of the bank.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from alto.kernels.forward_table import upload
from alto.kernels.operands import LoraOperands
from alto.kernels.schedule import TokenSchedule

__all__ = ["slot_embedding_change"]


class _SlotEmbeddingChange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        ids_T: Tensor,
        operands: LoraOperands,
        schedule: TokenSchedule,
        ops: ModuleType,
        factor: float,
        padding_idx: int | None,
    ) -> Tensor:
        s_TR = _factors(operands, schedule, factor) * _chosen_rows(ids_T, operands, schedule)
        change_TH = s_TR.new_zeros(schedule.num_tokens, operands.out_features[0])
        ops.fused_expand_add(s_TR, operands, [change_TH], schedule)
        ctx.save_for_backward(ids_T, s_TR)
        ctx.operands, ctx.schedule, ctx.ops, ctx.factor, ctx.padding_idx = operands, schedule, ops, factor, padding_idx
        return change_TH

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[None, None, None, None, None, None, None]:
        ids_T, s_TR = ctx.saved_tensors
        operands, schedule, dy_TH = ctx.operands, ctx.schedule, dy_TH.contiguous()
        ds_TR = ctx.ops.grouped_backward_input([dy_TH], operands, None, schedule)
        ctx.ops.grouped_backward_weight(None, s_TR, [dy_TH], ds_TR, operands, schedule)
        places_TR, is_own_TR = operands.places_of_a(schedule.slots_of_tokens(ids_T.device), ids_T)
        if ctx.padding_idx is not None:
            is_own_TR = is_own_TR & (ids_T != ctx.padding_idx)[:, None]
        scales_T1 = ctx.factor * _scales(schedule, ds_TR)
        _add_at(
            operands.grads_ZP.view(-1), places_TR.flatten(), torch.where(is_own_TR, scales_T1 * ds_TR, 0.0).flatten()
        )
        return None, None, None, None, None, None, None


def slot_embedding_change(
    anchor: Tensor,
    ids_T: Tensor,
    operands: LoraOperands,
    schedule: TokenSchedule,
    ops: ModuleType,
    *,
    factor: float = 1.0,
    padding_idx: int | None = None,
) -> Tensor:
    """``factor · scale_i · a_i[id] b_i`` for the tokens of every slot ``i``, ``[T, H]`` in the dtype of the bank; zero
    for slots without an adapter on the embeddings.

    The backward pass accumulates ``da`` and ``db`` into the bank. Source: PEFT 0.21, ``lora.Embedding``.

    Args:
        anchor: A tensor that requires grad, so that autograd reaches it.
        ids_T: Token ids, int64.
        operands: The adapters: a group of one member with ``V`` in-features.
        schedule: Tokens of every slot; dropout does not apply, as in PEFT.
        ops: The backend that holds the ops.
        factor: Of the embeddings.
        padding_idx: The token whose row of ``A`` gets no gradient, as that of the frozen embeddings does not.
    """
    change_TH: Tensor = _SlotEmbeddingChange.apply(anchor, ids_T, operands, schedule, ops, factor, padding_idx)
    return change_TH


def _chosen_rows(ids_T: Tensor, operands: LoraOperands, schedule: TokenSchedule) -> Tensor:
    """The row of every token in the ``A`` of its slot, ``[T, R]``; zeros past the slot's own rank."""
    places_TR, is_own_TR = operands.places_of_a(schedule.slots_of_tokens(ids_T.device), ids_T)
    return torch.where(is_own_TR, operands.params_ZP.view(-1)[places_TR], 0.0)


def _factors(operands: LoraOperands, schedule: TokenSchedule, factor: float) -> Tensor | float:
    """What every token's row is multiplied with, beside the scale of its slot."""
    ratios_ZR = operands.column_ratios()
    if ratios_ZR is None:
        return factor
    return factor * ratios_ZR.index_select(0, schedule.slots_of_tokens(ratios_ZR.device))


def _scales(schedule: TokenSchedule, like: Tensor) -> Tensor:
    """The scale of every token's slot, ``[T, 1]``."""
    scales = upload(schedule.scales, like.dtype, like.device)
    lengths = schedule.lengths_of_segments(like.device)
    return scales.repeat_interleave(lengths, output_size=schedule.num_tokens)[:, None]


def _add_at(target: Tensor, places: Tensor, values: Tensor) -> None:
    """Add ``values`` to ``target`` at ``places``, of which some are equal, in an order that depends on them alone."""
    if target.is_cuda:
        target.index_put_((places,), values, accumulate=True)  # sorts; index_add_ is by atomics there
    else:
        target.index_add_(0, places, values)  # one after the other; index_put_ is by atomics here
