"""Token embeddings per slot for the slot's own tokens: a low-rank change of the frozen embeddings, or a separate table.

An embedding is a linear layer with a one-hot input: the product with ``A`` selects rows of ``A``, and the gradient of
``A`` is added to the selected rows. One PyTorch implementation of these two operations serves all backends, because
each moves only ``T · R`` elements, in a number of launches that does not depend on the jobs. Everything else uses the
ops of other layers.

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
    """Compute ``factor · scale_i · a_i[id] b_i`` for the tokens of every slot ``i``, ``[T, H]`` in the dtype of the
    bank.

    The result is zero for slots without an adapter on the embeddings. The backward pass accumulates ``da`` and ``db``
    into the bank. Source: PEFT 0.21, ``lora.Embedding``.

    Args:
        anchor: A tensor that requires grad, so that autograd runs the backward pass.
        operands: The adapters: a group of one member with ``V`` in-features.
        schedule: Token ranges; their dropout is ignored, as in PEFT.
        padding_idx: The token whose row of ``A`` gets no gradient, like its row of the frozen embeddings.
    """
    change_TH: Tensor = _SlotEmbeddingChange.apply(anchor, ids_T, operands, schedule, ops, factor, padding_idx)
    return change_TH


def _chosen_rows(ids_T: Tensor, operands: LoraOperands, schedule: TokenSchedule) -> Tensor:
    """Return the row of every token in the ``A`` of its slot, ``[T, R]``; zero past the slot's own rank."""
    places_TR, is_own_TR = operands.places_of_a(schedule.slots_of_tokens(ids_T.device), ids_T)
    return torch.where(is_own_TR, operands.params_ZP.view(-1)[places_TR], 0.0)


def _factors(operands: LoraOperands, schedule: TokenSchedule, factor: float) -> Tensor | float:
    """Return the factor of every token's row, in addition to the scale of its slot."""
    ratios_ZR = operands.column_ratios()
    if ratios_ZR is None:
        return factor
    return factor * ratios_ZR.index_select(0, schedule.slots_of_tokens(ratios_ZR.device))


def _scales(schedule: TokenSchedule, like: Tensor) -> Tensor:
    """Return the scale of every token's slot, ``[T, 1]``."""
    scales = upload(schedule.scales, like.dtype, like.device)
    lengths = schedule.lengths_of_segments(like.device)
    return scales.repeat_interleave(lengths, output_size=schedule.num_tokens)[:, None]


def _add_at(target: Tensor, places: Tensor, values: Tensor) -> None:
    """Add ``values`` to ``target`` at ``places``, which may repeat, in an order that depends only on ``places``."""
    if target.is_cuda:
        target.index_put_((places,), values, accumulate=True)  # sorts; index_add_ uses atomics on CUDA
    else:
        target.index_add_(0, places, values)  # adds in order; index_put_ uses atomics on the CPU


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
    """Return the embedding of every token in its slot's own table, ``[T, H]``; ``base_TH`` for slots without a table.

    The backward pass accumulates the gradients of the tables into the bank. The number of launches grows with the
    number of slots that have a table, as does the memory traffic.

    Args:
        anchor: A tensor that requires grad, so that autograd runs the backward pass.
        base_TH: The frozen embeddings of the tokens, which need no gradient.
        tables: The slots' tables, each ``[V, H]``. The rows read are rounded to the dtype of ``base_TH``.
        padding_idx: The token whose row gets no gradient.
    """
    own_TH: Tensor = _SlotEmbeddings.apply(anchor, base_TH, ids_T, tables, schedule, factor, padding_idx)
    return own_TH
