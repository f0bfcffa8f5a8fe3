"""Padding-free causal attention, plugged into unmodified Hugging Face models.

Sequences lie end to end in one row of tokens; each attends to itself alone. Registered under :data:`NAME` with
``AttentionInterface`` and ``AttentionMaskInterface``; the sequence lengths travel as a keyword argument of the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from alto.errors import UnsupportedModelError

__all__ = ["NAME", "register", "varlen_attention"]

NAME = "alto_varlen"

_SUPPORTED_EXTRAS = {"position_ids", "cache_position", "use_cache", "is_causal", "output_attentions", "layer_idx"}


def varlen_attention(
    q_HTD: Tensor,
    k_GTD: Tensor,
    v_GTD: Tensor,
    lengths: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention within each of the sequences laid end to end.

    Args:
        q_HTD: Queries ``[1, H, T, D]``.
        k_GTD: Keys ``[1, G, T, D]``; ``H`` is a multiple of ``G`` (grouped queries).
        v_GTD: Values ``[1, G, T, D]``.
        lengths: Tokens of each sequence, summing to ``T``.
        scale: Factor on the scores.
        window: A token sees at most this many tokens back, itself included; None for all.
        softcap: Scores are squeezed into ``±softcap`` by a tanh; None leaves them.

    Returns:
        ``[1, H, T, D]``.
    """
    grouped = q_HTD.shape[1] != k_GTD.shape[1]
    outputs = []
    for q, k, v in zip(q_HTD.split(lengths, 2), k_GTD.split(lengths, 2), v_GTD.split(lengths, 2), strict=True):
        length = q.shape[2]
        if softcap is not None:
            outputs.append(_softcapped(q, k, v, _mask(length, window or length, q.device), scale, softcap))
            continue
        mask = _mask(length, window, q.device) if window is not None and length > window else None
        outputs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
        )
    return torch.cat(outputs, dim=2)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """One sequence's attention with capped scores, which PyTorch's own does not have; Gemma 2's way, in float32."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.tanh(scale * (q @ k.transpose(-1, -2)) / softcap) * softcap
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return weights.to(q.dtype) @ v


def _mask(length: int, window: int, device: torch.device) -> Tensor:
    """Which tokens (columns) each token (row) sees: itself and those up to ``window - 1`` back."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_lengths: Sequence[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention; extras that would change the result are refused."""
    refused = sorted(name for name, value in extras.items() if value is not None and name not in _SUPPORTED_EXTRAS)
    if refused:
        raise UnsupportedModelError(
            f"the model's attention asks for {', '.join(refused)}, which padding-free attention does not do yet; "
            "expected plain causal attention (full or sliding window); use another base model"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    output = varlen_attention(query, key, value, sequence_lengths, scale=scale, window=sliding_window, softcap=softcap)
    return output.transpose(1, 2).contiguous(), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Sequences are told apart by their lengths, so no mask is built."""
    return None


def register() -> None:
    """Make :data:`NAME` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(NAME, _attention_forward)
    AttentionMaskInterface.register(NAME, _no_mask)
