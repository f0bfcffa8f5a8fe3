"""Rotates the queries and keys of a base model's attention in one kernel; the rest of the attention is unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from alto.backbone.bare_copies import is_near
from alto.backbone.fused_forward import FusedForward
from alto.kernels.layer_reference import rotary

__all__ = ["FusedRotary", "Rotation", "fused_rotation", "rotating_function"]

_NAME = "apply_rotary_pos_emb"
"""Name of the rotating function in every model of transformers."""

_NO_EFFECT = "transformers.utils.deprecation"
"""Module of decorators that only rename arguments of earlier versions."""

_MAX_ROUNDINGS = 4


class Rotation:
    """A replacement for a model's function that rotates queries and keys.

    Attributes:
        why_not: Why the model's function was used instead; empty if it never was.
        is_observed: Whether the model's trial forward pass is over, in which the layouts of queries and keys are
            recorded.

    Args:
        function: The model's function.
        functions: :mod:`alto.kernels.layer_functions`.
        dtypes: Pairs of dtypes, of queries and of cosines, for which the kernel gives the numbers of ``function``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        functions: ModuleType,
        dtypes: frozenset[tuple[torch.dtype, torch.dtype]],
    ) -> None:
        self._function, self._functions, self._dtypes = function, functions, dtypes
        self.why_not = ""
        self.is_observed = False
        self._seen: set[tuple[Any, ...]] = set()

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        why_not = self._why_not(q, k, cos, sin) if not args and not kwargs else "it is called with additional arguments"
        if why_not:
            self.why_not = why_not
            return self._function(q, k, cos, sin, *args, **kwargs)
        if not self.is_observed:
            self._seen.add((q.shape[1], q.stride(), k.shape[1], k.stride(), q.shape[3], cos.dtype))
        return self._functions.rotary(q, k, cos, sin)

    def sample(self, dtype: torch.dtype, device: torch.device) -> None:
        """See :meth:`FusedForward.sample`."""
        for num_q, strides_q, num_k, strides_k, width, angles in self._seen:
            q, k = (
                torch.empty_strided((1, heads, 2, width), strides, dtype=dtype, device=device)
                for heads, strides in ((num_q, strides_q), (num_k, strides_k))
            )
            cos = torch.empty(1, 2, width, dtype=angles, device=device)
            outputs = self._functions.rotary(q.requires_grad_(), k.requires_grad_(), cos, cos)
            torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])

    def _why_not(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> str:
        if q.dim() != 4 or cos.dim() != 3 or q.shape[2] != cos.shape[1] or cos.shape[0] not in (1, q.shape[0]):
            return f"queries are {tuple(q.shape)}, cosines {tuple(cos.shape)}"
        widths = {x.shape[-1] for x in (q, k, cos, sin)}
        if len(widths) > 1 or widths.pop() % 2:
            return f"heads of {q.shape[-1]} numbers have {cos.shape[-1]} cosines"
        if q.dtype != k.dtype or cos.dtype != sin.dtype or (q.dtype, cos.dtype) not in self._dtypes:
            return f"queries are {q.dtype}, cosines {cos.dtype}"
        return ""


class FusedRotary(FusedForward):
    """The forward pass of an attention module, which calls ``rotation``."""

    op = "rotary"

    def __init__(self, module: nn.Module, forward: Callable[..., Any], rotation: Rotation) -> None:
        self._forward, self._rotation = forward, rotation
        super().__init__(module, id(rotation))

    @property
    def why_not(self) -> str:  # shared by all modules of a class
        return self._rotation.why_not

    @why_not.setter
    def why_not(self, why: str) -> None:
        assert not why

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self.module, *args, **kwargs)

    @property
    def is_observed(self) -> bool:
        return self._rotation.is_observed

    @is_observed.setter
    def is_observed(self, is_observed: bool) -> None:
        self._rotation.is_observed = is_observed

    def sample(self, dtype: torch.dtype, device: torch.device) -> None:
        self._rotation.sample(dtype, device)


def rotating_function(kind: type[nn.Module]) -> FunctionType | None:
    """Return the undecorated forward pass of a class of modules if it calls the rotating function; else None."""
    function = inspect.unwrap(kind.forward)
    if not isinstance(function, FunctionType) or _NAME not in function.__code__.co_names:
        return None
    return function if _NAME in function.__globals__ else None


def fused_rotation(
    kind: type[nn.Module], function: FunctionType, functions: ModuleType, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[..., Any], Rotation] | str:
    """Return a forward pass for ``kind`` that rotates with the kernel, and this rotation; or why there is none.

    The module of transformers is not changed: the new function has the same code as ``function`` but other globals.

    Args:
        kind: Class of the modules.
        function: Its :func:`rotating_function`.
        functions: :mod:`alto.kernels.layer_functions`.
        dtype: Dtype of the activations.
        device: Device of the model.
    """
    wrapper: Any = kind.forward
    while wrapper is not function:
        if wrapper.__globals__["__name__"] != _NO_EFFECT:
            return f"its forward pass has a decorator of {wrapper.__globals__['__name__']}"
        wrapper = wrapper.__wrapped__
    own = function.__globals__[_NAME]
    wide = torch.float32  # dtype of some models' cosines, and of all tensors when a model is checked in float32
    pairs = dict.fromkeys([(dtype, dtype), (dtype, wide), (wide, wide)])
    dtypes = frozenset(pair for pair in pairs if _is_same(own, functions, *pair, device))
    if not any(of_queries == dtype for of_queries, _ in dtypes):
        return "its rotation is different"
    rotation = Rotation(own, functions, dtypes)
    made = FunctionType(
        function.__code__,
        {**function.__globals__, _NAME: rotation},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made, rotation


def _is_same(
    own: Callable[..., Any], functions: ModuleType, dtype: torch.dtype, angle: torch.dtype, device: torch.device
) -> bool:
    """Return whether ``own`` is bit-identical to the reference, and equal to the kernel up to rounding."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    q, k, dq, dk = (draw(1, 5, heads, 16).to(dtype).transpose(1, 2) for heads in (4, 2, 4, 2))
    angles_1TD = draw(1, 5, 16)
    cos, sin = angles_1TD.cos().to(angle), angles_1TD.sin().to(angle)
    leaves = [q.requires_grad_(), k.requires_grad_()]
    with torch.enable_grad():
        try:
            expected = own(*leaves, cos, sin)
            is_same = all(
                one.dtype == other.dtype and torch.equal(one, other)
                for one, other in zip(expected, rotary(q, k, cos, sin), strict=True)
            )
        except Exception:  # an unknown function may raise anything
            return False
        if not is_same:
            return False
        found = functions.rotary(*leaves, cos, sin)
        gradients = [torch.autograd.grad(outputs, leaves, [dq, dk]) for outputs in (found, expected)]
    limit = _MAX_ROUNDINGS * torch.finfo(dtype).eps
    pairs = (*zip(found, expected, strict=True), *zip(*gradients, strict=True))
    return all(is_near(one.detach(), other.detach(), limit) for one, other in pairs)
