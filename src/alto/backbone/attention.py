"""Padding-free causal attention, plugged into unmodified Hugging Face models.

Sequences are concatenated in one row of tokens; each attends only to itself. Registered under :data:`NAME` with
``AttentionInterface``. The offsets of the sequences are set around the forward pass (:func:`attending`), as many models
do not pass arguments down to their attention; the visible earlier tokens are set on each attention module
(:class:`Pattern`), as many models define them only in their mask.

Shapes: ``T`` tokens, ``H`` heads of queries, ``G`` of keys and values, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from alto.backbone.flash import find_kernel
from alto.backbone.sdpa import sdpa_attention
from alto.backbone.sequences import Sequences
from alto.errors import UnsupportedModelError

__all__ = [
    "NAME",
    "Pattern",
    "attending",
    "current_sequences",
    "has_chunks",
    "recompute",
    "register",
    "set_pattern",
    "varlen_attention",
]

NAME = "alto_varlen"

_SUPPORTED_EXTRAS = {
    *("position_ids", "cache_position", "use_cache", "is_causal", "output_attentions", "layer_idx"),
    "output_router_logits",  # of other layers
}

_PATTERN = "alto_attention_pattern"
_SEQUENCES: ContextVar[Sequences] = ContextVar("sequences of the pass")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Which tokens of its own sequence a token sees: itself and all earlier ones, or fewer.

    Attributes:
        window: At most this many, itself included; None for all.
        chunk: Only those of the same run of this many positions; None for all.
    """

    window: int | None = None
    chunk: int | None = None


def set_pattern(module: nn.Module, pattern: Pattern) -> None:
    """Set the pattern of ``module``, one of the model's attention modules; it overrides the arguments of its call."""
    setattr(module, _PATTERN, pattern)


def has_chunks(model: nn.Module) -> bool:
    """Whether a layer of ``model`` attends only within runs of positions."""
    patterns = (getattr(module, _PATTERN, None) for module in model.modules())
    return any(pattern is not None and pattern.chunk is not None for pattern in patterns)


@contextmanager
def attending(sequences: Sequences) -> Iterator[None]:
    """Forward passes inside are over ``sequences``."""
    token = _SEQUENCES.set(sequences)
    try:
        yield
    finally:
        _SEQUENCES.reset(token)


def current_sequences() -> Sequences | None:
    """The sequences of the forward pass in progress; None outside of one."""
    return _SEQUENCES.get(None)


def recompute(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``, recomputed in the backward pass from its inputs, over the same sequences, even if
    another forward pass has begun meanwhile.

    States of random number generators are neither saved nor restored: the base is in evaluation mode, and masks and
    noise of jobs are functions of their keys.
    """
    sequences = _SEQUENCES.get()

    def run(*inputs: Any) -> Any:
        with attending(sequences):
            return function(*inputs)

    return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False)


def varlen_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    sequences: Sequences,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention within each of the sequences laid end to end.

    A FlashAttention kernel serves where one fits (see :func:`alto.backbone.flash.find_kernel`), otherwise PyTorch's
    attention a sequence at a time.

    Args:
        q_THD: Queries ``[T, H, D]``.
        k_TGD: Keys ``[T, G, D]``; ``H`` is a multiple of ``G`` (grouped queries).
        v_TGD: Values ``[T, G, D]``.
        sequences: Their lengths, which sum to ``T``, and prefixes.
        scale: Factor on the scores.
        window: A token sees at most this many tokens back, itself included; None for all.
        softcap: Scores are squeezed into ``±softcap`` by a tanh; None leaves them.

    Returns:
        ``[T, H, D]``.
    """
    kernel = find_kernel(q_THD, v_TGD, softcap=softcap)
    attend = sdpa_attention if kernel is None else kernel.attend
    return attend(q_THD, k_TGD, v_TGD, sequences, scale=scale, window=window, softcap=softcap)


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
    """The attention function that transformers calls; arguments that would change the result are refused.

    Queries, keys and values come as ``[1, heads, T, D]``, the result goes as ``[1, T, H, D]``.
    """
    refused = sorted(name for name, value in extras.items() if value is not None and name not in _SUPPORTED_EXTRAS)
    if refused:
        raise UnsupportedModelError(
            f"the model's attention asks for {', '.join(refused)}, which padding-free attention does not do yet; "
            "expected plain causal attention (full or sliding window); use another base model"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    pattern: Pattern = getattr(module, _PATTERN, None) or Pattern(window=sliding_window)
    sequences = _SEQUENCES.get()
    if pattern.chunk is not None:
        sequences = sequences.in_chunks(pattern.chunk)
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (query, key, value))
    output = varlen_attention(q_THD, k_TGD, v_TGD, sequences, scale=scale, window=pattern.window, softcap=softcap)
    return output[None].contiguous(), None


def register() -> None:
    """Register :data:`NAME` with transformers. Idempotent.

    Sequences are separated by their offsets, so there is no mask. No mask function is registered either: for an
    attention that has one, transformers searches the position ids of every forward pass for packed sequences, which
    synchronises host and device; for one that has none it builds no mask.
    """
    AttentionInterface.register(NAME, _attention_forward)
