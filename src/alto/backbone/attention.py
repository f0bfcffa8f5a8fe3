"""Padding-free causal attention, plugged into unmodified Hugging Face models.

Sequences are concatenated in one row of tokens; each attends only to itself. The attention is registered under
:data:`NAME` with ``AttentionInterface``. The offsets of the sequences are set around the forward pass
(:func:`attending`), because many models do not pass arguments down to their attention. The visible earlier tokens are
set on each attention module (:class:`Pattern`), because many models define them only in their mask.

Shapes: ``T`` tokens, ``H`` heads of queries, ``G`` heads of keys and values, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from alto.backbone.flash import Scores, find_kernel
from alto.backbone.sequences import Sequences
from alto.errors import UnsupportedModelError

# Padding-free causal attention, one sequence at a time, with PyTorch's ``scaled_dot_product_attention``.
#
# It runs on every device. On a CPU it is the fastest known way. Forward and backward on one core for 16 rows of GSM8K,
# 4000 tokens, 4 heads of size 32, took 33 ms; scattering to a padded batch took 127 ms, and block attention written
# with library GEMMs 35 to 52 ms.


def sdpa_attention(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, sequences: Sequences, scores: Scores) -> Tensor:
    """Compute :class:`alto.backbone.flash.Attend` for any dtype and head size."""
    scale, window, softcap = scores
    grouped = q_THD.shape[1] != k_TGD.shape[1]
    queries = q_THD.split(sequences.lengths)
    keys, values = (sequences.with_prefixes(x_TGD).split(sequences.key_lengths) for x_TGD in (k_TGD, v_TGD))
    outputs = []
    for parts in zip(queries, keys, values, strict=True):
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        length, num_keys = q.shape[2], k.shape[2]
        if softcap is not None:
            output = _softcapped(q, k, v, _mask(length, num_keys, window or num_keys, q.device), scale, softcap)
        else:
            is_plain = length == num_keys and (window is None or num_keys <= window)
            mask = None if is_plain else _mask(length, num_keys, window or num_keys, q.device)
            output = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Compute the attention of one sequence with capped scores, which PyTorch's attention does not support; the softmax
    is at least float32, as in Gemma 2."""
    group_size = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group_size, 1), v.repeat_interleave(group_size, 1)
    scores = torch.tanh(scale * (q @ k.transpose(-1, -2)) / softcap) * softcap
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return weights.to(q.dtype) @ v


def _mask(length: int, num_keys: int, window: int, device: torch.device) -> Tensor:
    """Return the mask of the last ``length`` tokens (rows) over ``num_keys`` keys (columns): each token attends to
    itself and to the ``window - 1`` tokens before it."""
    position = torch.arange(num_keys, device=device)
    distance = position[num_keys - length :, None] - position[None, :]
    return (distance >= 0) & (distance < window)


NAME = "alto_varlen"

_SUPPORTED_EXTRAS = {
    *("position_ids", "cache_position", "use_cache", "is_causal", "output_attentions", "layer_idx"),
    "output_router_logits",  # meant for other layers
}

_PATTERN = "alto_attention_pattern"
_SEQUENCES: ContextVar[Sequences] = ContextVar("sequences of the pass")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """The tokens that a token attends to: itself and all earlier tokens of its sequence, or only some of them.

    Attributes:
        window: Largest number of tokens that a token attends to, itself included; None for all.
        chunk: Length of the chunks of positions within which tokens attend; None for no chunks.
    """

    window: int | None = None
    chunk: int | None = None


def set_pattern(module: nn.Module, pattern: Pattern) -> None:
    """Set the pattern of an attention module; it overrides the window that is passed when the module is called."""
    setattr(module, _PATTERN, pattern)


def has_chunks(model: nn.Module) -> bool:
    """Return whether a layer of ``model`` attends only within chunks of positions."""
    patterns = (getattr(module, _PATTERN, None) for module in model.modules())
    return any(pattern is not None and pattern.chunk is not None for pattern in patterns)


@contextmanager
def attending(sequences: Sequences) -> Iterator[None]:
    """Run the enclosed forward passes over ``sequences``."""
    token = _SEQUENCES.set(sequences)
    try:
        yield
    finally:
        _SEQUENCES.reset(token)


def current_sequences() -> Sequences | None:
    """Return the sequences of the forward pass in progress; None outside of a forward pass."""
    return _SEQUENCES.get(None)


def recompute(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(*arguments)``, and recompute it from its inputs in the backward pass.

    The recomputation uses the same sequences, even if another forward pass has begun meanwhile. The states of random
    number generators are neither saved nor restored: the base model is in evaluation mode, and the masks and noise of
    jobs are functions of their keys.
    """
    sequences = _SEQUENCES.get()

    def run(*inputs: Any) -> Any:
        with attending(sequences):
            return function(*inputs)

    return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the sequences of a pass are not part of a graph
def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers; refuse unsupported arguments that would change the result.

    Uses a FlashAttention kernel that supports the inputs (see :func:`alto.backbone.flash.find_kernel`), otherwise
    PyTorch's attention, one sequence at a time.

    Queries, keys and values have shape ``[1, heads, T, D]``, the result ``[1, T, H, D]``.
    """
    refused = sorted(name for name, value in extras.items() if value is not None and name not in _SUPPORTED_EXTRAS)
    if refused:
        raise UnsupportedModelError(
            f"expected plain causal attention (full or sliding window), found a model whose attention asks for "
            f"{', '.join(refused)}, which padding-free attention does not support; use another base model"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    pattern: Pattern = getattr(module, _PATTERN, None) or Pattern(window=sliding_window)
    sequences = _SEQUENCES.get()
    if pattern.chunk is not None:
        sequences = sequences.in_chunks(pattern.chunk)
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (query, key, value))
    kernel = find_kernel(q_THD, v_TGD, softcap=softcap)
    attend = sdpa_attention if kernel is None else kernel.attend
    output = attend(q_THD, k_TGD, v_TGD, sequences, Scores(scale, pattern.window, softcap))
    return output[None].contiguous(), None


def register() -> None:
    """Register :data:`NAME` with transformers. Idempotent.

    Sequences are separated by their offsets, so there is no mask. No mask function is registered either: if there is
    one, transformers searches the position ids of every forward pass for packed sequences, which synchronises host and
    device; without one, transformers builds no mask.
    """
    AttentionInterface.register(NAME, _attention_forward)
