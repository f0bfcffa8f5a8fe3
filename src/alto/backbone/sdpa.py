"""Padding-free causal attention, one sequence at a time, with PyTorch's ``scaled_dot_product_attention``.

It runs on every device. On a CPU it is the fastest known way. Forward and backward on one core for 16 rows of GSM8K,
4000 tokens, 4 heads of size 32, took 33 ms; scattering to a padded batch took 127 ms, and block attention written with
library GEMMs 35 to 52 ms.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.backbone.sequences import Sequences

__all__ = ["sdpa_attention"]


def sdpa_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    sequences: Sequences,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Compute :func:`alto.backbone.attention.varlen_attention` for any dtype and head size."""
    grouped = q_THD.shape[1] != k_TGD.shape[1]
    queries = q_THD.split(sequences.lengths)
    keys, values = (sequences.with_prefixes(x_TGD).split(sequences.key_lengths) for x_TGD in (k_TGD, v_TGD))
    outputs = []
    for parts in zip(queries, keys, values, strict=True):
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        length, seen = q.shape[2], k.shape[2]
        if softcap is not None:
            output = _softcapped(q, k, v, _mask(length, seen, window or seen, q.device), scale, softcap)
        else:
            is_plain = length == seen and (window is None or seen <= window)
            mask = None if is_plain else _mask(length, seen, window or seen, q.device)
            output = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Compute the attention of one sequence with capped scores, which PyTorch's attention does not support; the softmax
    is at least float32, as in Gemma 2."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.tanh(scale * (q @ k.transpose(-1, -2)) / softcap) * softcap
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return weights.to(q.dtype) @ v


def _mask(length: int, seen: int, window: int, device: torch.device) -> Tensor:
    """Return the mask of the last ``length`` tokens (rows) over ``seen`` keys (columns): each token attends to itself
    and to the ``window - 1`` tokens before it."""
    position = torch.arange(seen, device=device)
    distance = position[seen - length :, None] - position[None, :]
    return (distance >= 0) & (distance < window)
