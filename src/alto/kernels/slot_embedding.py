"""Token embeddings of every slot for its own tokens: a low-rank change of the frozen ones, or a table of its own.

An embedding is a linear layer of a one-hot input: the product with ``A`` is a choice of its rows, and the gradient of
``A`` is added to the rows that were chosen. One implementation in PyTorch of these two serves all backends: each moves
``T · R`` numbers, in a number of launches that does not depend on the jobs. The rest are the ops of every layer.

Shapes: ``T`` tokens, ``V`` vocabulary, ``H`` out-features, ``R`` the largest rank of the bank.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.kernels.forward_table import upload
from alto.kernels.operands import LoraOperands
from alto.kernels.schedule import TokenSchedule
from alto.kernels.slot_tensors import SlotTensors

__all__ = ["slot_embedding_change", "slot_embeddings"]


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
        change_TH = s_TR.new_empty(schedule.num_tokens, operands.out_features[0])
        ops.grouped_expand(s_TR, operands, [change_TH], schedule)
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


class _SlotEmbeddings(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        base_TH: Tensor,
        ids_T: Tensor,
        tables: SlotTensors,
        schedule: TokenSchedule,
        factor: float,
        padding_idx: int | None,
    ) -> Tensor:
        own_TH = base_TH.clone()
        for slot, start, end in schedule.segments:
            if slot in tables:
                table_VH, _ = tables.of_slot(slot)
                own_TH[start:end] = F.embedding(ids_T[start:end], table_VH).to(base_TH.dtype) * factor
        ctx.save_for_backward(ids_T)
        ctx.tables, ctx.schedule, ctx.factor, ctx.padding_idx = tables, schedule, factor, padding_idx
        return own_TH

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[None, None, None, None, None, None, None]:
        (ids_T,) = ctx.saved_tensors
        for slot, start, end in ctx.schedule.segments:
            if slot in ctx.tables:
                ids = ids_T[start:end]
                _, gradient_VH = ctx.tables.of_slot(slot)
                values = dy_TH[start:end].to(gradient_VH.dtype) * ctx.factor
                if ctx.padding_idx is not None:
                    values = torch.where((ids != ctx.padding_idx)[:, None], values, 0.0)
                _add_at(gradient_VH, ids, values)
        return None, None, None, None, None, None, None


def slot_embeddings(
    anchor: Tensor,
    base_TH: Tensor,
    ids_T: Tensor,
    tables: SlotTensors,
    schedule: TokenSchedule,
    *,
    factor: float = 1.0,
    padding_idx: int | None = None,
) -> Tensor:
    """The embedding of every token in its slot's own table, ``[T, H]``; of slots without a table ``base_TH``.

    The backward pass accumulates the gradients of the tables into the bank. Launches grow with the slots that have one,
    as do the bytes that they move.

    Args:
        anchor: A tensor that requires grad, so that autograd reaches it.
        base_TH: The frozen embeddings of the tokens, which need no gradient.
        ids_T: Token ids, int64.
        tables: Of shape ``[V, H]``. What is read of them is rounded to the dtype of ``base_TH``.
        schedule: Tokens of every slot.
        factor: Of the embeddings.
        padding_idx: The token whose row gets no gradient.
    """
    own_TH: Tensor = _SlotEmbeddings.apply(anchor, base_TH, ids_T, tables, schedule, factor, padding_idx)
    return own_TH
