"""Padding-free causal attention in one launch, with FlashAttention 2 kernels on a GPU.

The kernels come with PyTorch (``torch.nn.attention.varlen``) and with the package ``flash-attn``, which can also cap
scores.

Every query and key is read only from its own sequence, and tokens past a sequence's end are cleared, so a NaN stays in
its sequence. FlashAttention 3 and 4 do not guarantee this (they load whole blocks, and a weight of zero times a NaN of
the next sequence is NaN), so they are not used. If a sequence has fewer queries than keys because its prefix is shared,
its last query attends to all keys, as in version 2.1 and later.

Determinism: the backward pass runs in deterministic mode; otherwise it would sum the gradient of the queries with
atomics. If a forward pass has fewer sequences times heads than the GPU has multiprocessors, this gradient is summed in
parts, and the number of parts depends on that product. A window is applied only if a sequence is longer than it. So the
same batch gives the same bits, and the same sequences in another batch give the same numbers up to rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from transformers.utils.import_utils import is_flash_attn_2_available

from alto.backbone.sequences import Sequences

_DTYPES = (torch.bfloat16, torch.float16)
_MAX_HEAD_SIZE, _HEAD_SIZE_MULTIPLE = 256, 8
_MIN_CAPABILITY = (8, 0)


class Scores(NamedTuple):
    """The settings of attention scores.

    Attributes:
        window: Largest number of tokens that a token attends to, itself included; None for all.
        softcap: Bound of the scores, applied with a tanh; None for no bound.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class Attend(Protocol):
    """Causal attention within each of the concatenated sequences."""

    def __call__(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, sequences: Sequences, scores: Scores) -> Tensor:
        """Return the output ``[T, H, D]``.

        Args:
            k_TGD: Keys ``[T, G, D]``; ``H`` is a multiple of ``G`` (grouped queries).
            sequences: The sequences; their lengths sum to ``T``.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashKernel:
    """The attention kernel of one library."""

    attend: Attend
    can_cap: bool


def find_kernel(q_THD: Tensor, v_TGD: Tensor, *, softcap: float | None) -> FlashKernel | None:
    """Return a kernel that supports these queries and values, preferably that of ``flash-attn``; None without one."""
    head_size = q_THD.shape[-1]
    if (
        q_THD.device.type != "cuda"
        or q_THD.dtype not in _DTYPES
        or head_size != v_TGD.shape[-1]
        or head_size > _MAX_HEAD_SIZE
        or head_size % _HEAD_SIZE_MULTIPLE
        or torch.cuda.get_device_capability(q_THD.device) < _MIN_CAPABILITY
    ):
        return None
    return next((kernel for kernel in installed_kernels() if softcap is None or kernel.can_cap), None)


@cache
def installed_kernels() -> tuple[FlashKernel, ...]:
    """Return the available kernels, the preferred kernel first."""
    kernels = []
    if is_flash_attn_2_available():
        from flash_attn import flash_attn_varlen_func

        kernels.append(flash_attn_kernel(flash_attn_varlen_func))
    kernels.append(torch_kernel(varlen_attn, torch.ops.aten._flash_attention_backward))
    return tuple(kernels)


def flash_attn_kernel(function: Callable[..., Any]) -> FlashKernel:
    """Return the kernel of ``flash_attn.flash_attn_varlen_func``."""

    def attend(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, sequences: Sequences, scores: Scores) -> Tensor:
        output: Tensor = function(
            q_THD,
            sequences.with_prefixes(k_TGD),
            sequences.with_prefixes(v_TGD),
            sequences.offsets(q_THD.device),
            sequences.key_offsets(q_THD.device),
            sequences.longest,
            sequences.longest_key,
            softmax_scale=scores.scale,
            causal=True,
            window_size=_window_size(scores.window),
            softcap=scores.softcap or 0.0,
            deterministic=True,
        )
        return output

    return FlashKernel(attend=attend, can_cap=True)


def torch_kernel(forward: Callable[..., Any], backward: Callable[..., Any]) -> FlashKernel:
    """Return the kernel of ``torch.nn.attention.varlen.varlen_attn`` and the op behind its backward pass.

    Options that this version of PyTorch does not have are left out: before ``enable_gqa``, grouped queries needed no
    option; before ``num_splits``, the keys of a sequence were never split among blocks.
    """
    known = inspect.signature(forward).parameters
    options = {name: value for name, value in (("enable_gqa", True), ("num_splits", 1)) if name in known}
    forward = partial(forward, **options)

    def attend(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, sequences: Sequences, scores: Scores) -> Tensor:
        assert scores.softcap is None
        k_TGD, v_TGD = sequences.with_prefixes(k_TGD), sequences.with_prefixes(v_TGD)
        settings = {"scale": scores.scale, "window_size": _window_size(scores.window)}
        output: Tensor = _TorchVarlen.apply(q_THD, k_TGD, v_TGD, sequences, settings, forward, backward)
        return output

    return FlashKernel(attend=attend, can_cap=False)


class _TorchVarlen(torch.autograd.Function):
    """PyTorch's attention; the op of its backward pass is called here, in deterministic mode.

    PyTorch's own backward pass is deterministic only in its global deterministic mode, which is not suitable for
    training: cuBLAS then needs an environment variable, and other ops raise errors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        sequences: Sequences,
        settings: dict[str, Any],
        forward: Callable[..., Any],
        backward: Callable[..., Any],
    ) -> Tensor:
        offsets = sequences.offsets(q_THD.device), sequences.key_offsets(q_THD.device)
        lengths = (*offsets, sequences.longest, sequences.longest_key)
        output: Tensor
        output, normaliser = forward(q_THD, k_TGD, v_TGD, *lengths, return_aux=AuxRequest(lse=True), **settings)
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, output, normaliser)
        ctx.lengths, ctx.settings, ctx.run = lengths, settings, backward
        return output

    @staticmethod
    def backward(ctx: Any, gradient_THD: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.settings["window_size"]
        random_state = torch.zeros(2, dtype=torch.uint64, device=gradient_THD.device)
        with _deterministic_algorithms():
            dq_THD, dk_TGD, dv_TGD = ctx.run(
                gradient_THD,
                *ctx.saved_tensors,
                *ctx.lengths,
                0.0,  # dropout
                left == -1,  # causal; a window already implies it
                random_state,
                random_state,  # unused by the op
                scale=ctx.settings["scale"],
                window_size_left=left,
                window_size_right=right,
            )
        return dq_THD, dk_TGD, dv_TGD, None, None, None, None


@contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    """Enable PyTorch's deterministic mode, but without filling new memory with NaN."""
    filling: Any = torch.utils.deterministic
    mode, fill = torch.get_deterministic_debug_mode(), filling.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    filling.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        filling.fill_uninitialized_memory = fill


def _window_size(window: int | None) -> tuple[int, int]:
    """Return how many tokens before and after itself a token attends to; -1 for all."""
    return (-1 if window is None else window - 1, 0)
