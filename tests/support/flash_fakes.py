"""The attention functions of GPU libraries, with their signatures and contracts, in plain PyTorch on any device.

They are as strict as the real ones: int32 offsets, the longest sequence as an int, grouped queries only if requested.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """Compute the function of the package flash-attn, version 2."""
    assert deterministic, "gradients of queries would be summed in the order of arrival"
    assert dropout_p == 0.0
    left, right = window_size
    right = 0 if causal else right
    bounds = _Bounds(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _attend(q, k, v, bounds, softmax_scale, (left, right), softcap)[0]


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """Compute the function of torch.nn.attention.varlen, with all its options."""
    assert num_splits == 1, "the keys would be split by the longest sequence of the pass"
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError("Expect query and key/value to have the same number of heads")
    bounds = _Bounds(cu_seq_q, cu_seq_k, max_q, max_k)
    output, normaliser = _attend(query, key, value, bounds, scale, window_size, 0.0)
    return (output, normaliser) if return_aux is not None and return_aux.lse else output


def early_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Any:
    """Compute the function of torch.nn.attention.varlen, before it had ``enable_gqa`` and ``num_splits``."""
    known = {"return_aux": return_aux, "scale": scale, "window_size": window_size}
    return varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **known, enable_gqa=True, num_splits=1)


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """Compute the function of torch.ops.aten; it is deterministic if PyTorch's deterministic mode is on."""
    assert torch.get_deterministic_debug_mode() == 2, "gradients of queries would be summed in the order of arrival"
    assert dropout_p == 0.0
    left, right = window_size_left, 0 if is_causal else window_size_right
    assert left is not None
    assert right is not None
    assert is_causal == (left == -1 and window_size_right == 0)
    bounds = _Bounds(cum_seq_q, cum_seq_k, max_q, max_k)
    with torch.enable_grad():
        operands = [x.detach().requires_grad_() for x in (query, key, value)]
        output, normaliser = _attend(*operands, bounds, scale, (left, right), 0.0)
    assert torch.equal(normaliser, logsumexp) or normaliser.isnan().any()
    assert torch.equal(output, out) or output.isnan().any()
    return torch.autograd.grad(output, operands, grad_out)


@dataclass(frozen=True)
class _Bounds:
    """Begins and ends of the sequences of queries and of keys, and the longest ones."""

    queries: Tensor
    keys: Tensor
    longest_queries: int
    longest_keys: int

    def of(self, q_THD: Tensor, k_TGD: Tensor) -> Iterator[tuple[slice, slice]]:
        """Yield queries and keys of every sequence."""
        slices = []
        for x, offsets, longest in (
            (q_THD, self.queries, self.longest_queries),
            (k_TGD, self.keys, self.longest_keys),
        ):
            assert offsets.dtype == torch.int32
            bounds = offsets.tolist()
            assert (bounds[0], bounds[-1]) == (0, x.shape[0])
            assert longest == max(end - start for start, end in pairwise(bounds))
            slices.append([slice(start, end) for start, end in pairwise(bounds)])
        return zip(*slices, strict=True)


def _attend(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    bounds: _Bounds,
    scale: float | None,
    window_size: tuple[int, int],
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return the output ``[T, H, D]`` and the logarithm ``[H, T]`` of every softmax's sum."""
    share = q_THD.shape[1] // k_TGD.shape[1]
    outputs, normalisers = [], []
    for queries, keys in bounds.of(q_THD, k_TGD):
        q, k, v = (x.transpose(0, 1) for x in (q_THD[queries], k_TGD[keys], v_TGD[keys]))
        scores = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.repeat_interleave(share, 0).mT
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        # The last query is at the last key, as in version 2.1 and later.
        position, (left, right) = torch.arange(k.shape[1]), window_size
        back = position[k.shape[1] - q.shape[1] :, None] - position[None, :]
        hidden = ((back > left) & (left >= 0)) | ((-back > right) & (right >= 0))
        scores = scores.masked_fill(hidden, float("-inf"))
        outputs.append((scores.softmax(-1) @ v.repeat_interleave(share, 0)).transpose(0, 1))
        normalisers.append(scores.detach().logsumexp(-1))
    return torch.cat(outputs), torch.cat(normalisers, 1)
