"""The arithmetic of DoRA (arXiv:2402.09353): every row of an adapted weight has a trained magnitude.

``y = m / ‖W + s (A B)ᵀ‖ ⊙ (x Wᵀ + s x A B) + bias``, where ``‖·‖`` is the norm of each row, treated as a constant in
the backward pass. One PyTorch implementation serves all backends, because the norm costs only as much as ``Z · R`` more
tokens in the layer, and the rest moves each element once. The number of launches does not grow with the number of jobs.

Shapes: ``D`` slots with DoRA, ``Z`` slots, ``T`` tokens, ``K`` in-features, ``N`` out-features, ``R`` the largest rank
of the bank. Source: PEFT 0.21, ``peft/tuners/lora/dora.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.kernels.dropout import group_key, hashed, kept_factor, threshold
from alto.kernels.forward_table import upload
from alto.kernels.function import FrozenLayer
from alto.kernels.operands import LoraOperands
from alto.kernels.schedule import TokenSchedule
from alto.kernels.slot_tensors import SlotTensors, segment_sums

_CHUNK = 4096
"""Number of in-features processed at a time, which bounds the memory used for the norms."""


class FrozenMatrix(FrozenLayer, Protocol):
    """A frozen linear layer whose weight can be read."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...


@torch.no_grad()
def adapted_norms(
    operands: LoraOperands, member: int, weight_NK: Tensor, base_norms_N: Tensor, scale_of: Mapping[int, float]
) -> Tensor:
    """Return the norm of every row of ``W + s (A B)ᵀ``, ``[Z, N]``, at least float32; 1 for slots not in ``scale_of``.

    Uses ``‖w + s a b‖² = ‖w‖² + 2 s w·(a b) + s² bᵀ (aᵀ a) b``, so no slot's weight is materialised.

    Args:
        member: Index of the layer in the group.
        scale_of: Scale of the output in this layer for the ``D`` slots that target it.
    """
    dtype = torch.promote_types(operands.params_ZP.dtype, torch.float32)
    slots_D = upload(list(scale_of), torch.int64, weight_NK.device)
    scales_D1 = upload(list(scale_of.values()), dtype, weight_NK.device)[:, None]
    products_NDR: Tensor | None = None
    squares_DRR: Tensor | None = None
    for first in range(0, operands.in_features, _CHUNK):
        features = range(first, min(first + _CHUNK, operands.in_features))
        a_DKR = operands.gathered_a(member, slots_D, features).to(dtype)
        num_slots, num_features, max_rank = a_DKR.shape
        a_KQ = a_DKR.transpose(0, 1).reshape(num_features, -1)
        product = (weight_NK[:, first : features.stop].to(dtype) @ a_KQ).view(-1, num_slots, max_rank)
        square = a_DKR.transpose(1, 2) @ a_DKR
        products_NDR = product if products_NDR is None else products_NDR.add_(product)
        squares_DRR = square if squares_DRR is None else squares_DRR.add_(square)
    assert products_NDR is not None
    assert squares_DRR is not None
    b_DRN = operands.gathered_b(member, slots_D).to(dtype)
    cross_DN = (products_NDR.permute(1, 2, 0) * b_DRN).sum(1)
    own_DN = ((squares_DRR @ b_DRN) * b_DRN).sum(1)
    norms_DN = (base_norms_N.to(dtype).square() + 2.0 * scales_D1 * cross_DN + scales_D1.square() * own_DN).sqrt()
    return norms_DN.new_ones(operands.params_ZP.shape[0], norms_DN.shape[1]).index_copy_(0, slots_D, norms_DN)


class _ScaledByMagnitude(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y_TN: Tensor,
        bias_N: Tensor | None,
        magnitudes: SlotTensors,
        norms_ZN: Tensor,
        schedule: TokenSchedule,
    ) -> Tensor:
        ctx.magnitudes, ctx.schedule = magnitudes, schedule
        ctx.save_for_backward(y_TN, bias_N, norms_ZN)
        slots_T = schedule.slots_of_tokens(y_TN.device)
        scaled_TN = _scale_of_tokens(magnitudes, norms_ZN, slots_T) * _without_bias(y_TN, bias_N)
        scaled_TN = scaled_TN if bias_N is None else scaled_TN + bias_N
        return torch.where(magnitudes.has_tensor(slots_T)[:, None], scaled_TN.to(y_TN.dtype), y_TN)

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor, None, None, None, None]:
        y_TN, bias_N, norms_ZN = ctx.saved_tensors
        schedule, magnitudes = ctx.schedule, ctx.magnitudes
        sums_SN = segment_sums(dy_TN.to(norms_ZN.dtype) * _without_bias(y_TN, bias_N), schedule)
        magnitudes.accumulate(sums_SN / norms_ZN[schedule.slots_of_segments(y_TN.device)], schedule)
        slots_T = schedule.slots_of_tokens(y_TN.device)
        return (_scale_of_tokens(magnitudes, norms_ZN, slots_T) * dy_TN).to(dy_TN.dtype), None, None, None, None


def _scale_of_tokens(magnitudes: SlotTensors, norms_ZN: Tensor, slots_T: Tensor) -> Tensor:
    """Return magnitude divided by norm, ``[T, N]``; exactly 1 for tokens of slots without DoRA."""
    return (magnitudes.gather(norms_ZN) / norms_ZN).index_select(0, slots_T)


def _without_bias(y_TN: Tensor, bias_N: Tensor | None) -> Tensor:
    return y_TN if bias_N is None else y_TN - bias_N


def scaled_by_magnitude(
    y_TN: Tensor, bias_N: Tensor | None, magnitudes: SlotTensors, norms_ZN: Tensor, schedule: TokenSchedule
) -> Tensor:
    """Return the outputs of a layer with its adapters, scaled to the magnitudes of slots with DoRA.

    Outputs of other slots stay bit-identical. The backward pass adds the gradients of the magnitudes to the bank.

    Args:
        y_TN: Outputs with plain LoRA.
        bias_N: The frozen bias contained in them, which is not scaled; None if there is none.
        magnitudes: Magnitude of every row of the adapted weight, ``[N]``, for slots with DoRA.
        norms_ZN: Row norms of the adapted weight; any non-zero number for slots without DoRA.
    """
    scaled_TN: Tensor = _ScaledByMagnitude.apply(y_TN, bias_N, magnitudes, norms_ZN, schedule)
    return scaled_TN


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, base: FrozenMatrix) -> Tensor:
        ctx.base = base
        return F.linear(x_TK, base.weight)

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor, None]:
        return ctx.base.backward(dy_TN, None), None


def frozen_product(x_TK: Tensor, base: FrozenMatrix) -> Tensor:
    """Return ``x Wᵀ`` of the frozen layer, ``[T, N]``, without its bias."""
    product_TN: Tensor = _FrozenProduct.apply(x_TK, base)
    return product_TN


def dropped_inputs(
    x_TK: Tensor,
    schedule: TokenSchedule,
    slots: Collection[int],
    number: int,
    places_T: Tensor | None = None,
) -> Tensor:
    """Return the inputs with dropout applied to the tokens of ``slots``; all other tokens stay bit-identical.

    The masks are the same as in :func:`alto.kernels.dropout.dropped`, for all slots in a fixed number of launches.

    Args:
        schedule: Token ranges, with the keys of their masks.
        slots: Slots whose masks are applied.
        places_T: Position of every token among its slot's tokens in the forward pass, int64, if ``x_TK`` has only some
            of them; None if it has all.
    """
    device, rows, factors = x_TK.device, [], []
    for segment, key in zip(schedule.segments, schedule.dropout, strict=True):
        if key is None or segment.slot not in slots:
            rows.append((0, 0, 0))  # a threshold of 0 keeps everything
            factors.append(1.0)
        else:
            first = segment.start if places_T is None else 0
            rows.append((group_key(key, number), key.first_token - first, threshold(key)))
            factors.append(kept_factor(key))
    segment_T = torch.repeat_interleave(schedule.lengths_of_segments(device), output_size=schedule.num_tokens)
    keys_T1, shifts_T1, thresholds_T1 = upload(rows, torch.int64, device)[segment_T].split(1, dim=1)
    factors_T1 = upload(factors, torch.float32, device)[segment_T, None]
    tokens_T = torch.arange(schedule.num_tokens, device=device) if places_T is None else places_T
    bits_TK = hashed(hashed(tokens_T[:, None] + shifts_T1 + keys_T1) + torch.arange(x_TK.shape[1], device=device))
    factor_TK = torch.where(bits_TK >= thresholds_T1, factors_T1, 0.0)
    return x_TK * factor_TK.to(x_TK.dtype)
