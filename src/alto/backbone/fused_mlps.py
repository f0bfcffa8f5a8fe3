"""Runs activation and product of a base model's gated MLPs as one kernel; their linear layers are unchanged."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alto.backbone.bare_copies import bare_copy, is_near
from alto.backbone.fused_forward import FusedForward
from alto.kernels.layer_reference import swiglu

__all__ = ["FusedMlp", "linear_names", "why_unfused"]

_LINEAR_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("gate_up_proj", "down_proj"))
"""Names of the linear layers in transformers' gated MLPs. With two names, the first layer computes gate and up."""

_NUM_TOKENS, _WIDTH = 3, 40
_SIZES = (1.0, 10.0, 0.01)
"""Magnitudes of the test tokens."""

_MAX_ROUNDINGS = 4


class FusedMlp(FusedForward):
    """The forward pass of a gated MLP."""

    op = "swiglu"

    def __init__(self, module: nn.Module, functions: ModuleType, names: tuple[str, ...]) -> None:
        super().__init__(module)
        self._functions, self._names = functions, names

    def __call__(self, x: Tensor) -> Tensor:
        first, *others, last = (getattr(self.module, name) for name in self._names)
        gate, up = (first(x), others[0](x)) if others else first(x).chunk(2, dim=-1)
        if gate.dtype != up.dtype:
            self.why_not = f"its gate is {gate.dtype}, the other factor of the product {up.dtype}"
            unfused: Tensor = last(F.silu(gate) * up)
            return unfused
        output: Tensor = last(self._functions.swiglu(gate, up))
        return output

    def sample(self, dtype: torch.dtype, device: torch.device) -> None:
        is_joint = len(self._names) == 2
        width = getattr(self.module, self._names[0]).out_features // (2 if is_joint else 1)
        both = torch.empty(2, 2 * width, dtype=dtype, device=device)
        halves = both.chunk(2, dim=-1)
        gate, up = (half.requires_grad_() if is_joint else torch.empty_like(half).requires_grad_() for half in halves)
        self._functions.swiglu(gate, up).backward(torch.empty(2, width, dtype=dtype, device=device))


def linear_names(module: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the linear layers of a gated MLP; None if ``module`` does not have its structure: linear
    layers, at most an activation, and nothing else."""
    children = dict(module.named_children())
    for names in _LINEAR_NAMES:
        others = [child for name, child in children.items() if name not in names]
        has_weights = any(True for other in others for _ in (*other.parameters(), *other.buffers()))
        if set(names) <= set(children) and len(others) <= 1 and not has_weights and not module._parameters:
            return names
    return None


def why_unfused(
    module: nn.Module, names: tuple[str, ...], functions: ModuleType, dtype: torch.dtype, device: torch.device
) -> str:
    """Return why the kernel cannot replace activation and product in an MLP; empty if it can.

    The class of the MLP is run with linear layers that return random numbers. The input of the last linear layer must
    be bit-identical to ``silu(gate) · up``.

    Args:
        module: A gated MLP.
        names: Its :func:`linear_names`.
        functions: :mod:`alto.kernels.layer_functions`.
        dtype: Dtype of the activations.
        device: Device of the model.
    """
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        numbers = torch.randn(_NUM_TOKENS, _WIDTH, generator=generator) * torch.tensor(_SIZES)[:, None]
        return numbers.to(device, dtype)

    x, dy = draw(), draw()
    leaves = [draw().requires_grad_() for _ in range(2)]
    with torch.enable_grad():
        given = leaves if len(names) == 3 else [torch.cat(leaves, dim=-1)]
        gate, up = leaves if len(names) == 3 else given[0].chunk(2, dim=-1)
        stubs: dict[str, nn.Module] = {name: _Given(x, y) for name, y in zip(names, given, strict=False)}
        own = {name: child for name, child in module.named_children() if name not in names}
        try:
            expected = bare_copy(module, children={**own, **stubs, names[-1]: nn.Identity()})(x)
        except Exception:  # an unknown forward pass may raise anything
            return "its forward pass is different"
        if not isinstance(expected, Tensor) or not torch.equal(expected, swiglu(gate, up)):
            return "its activation is not silu(gate) · up"
        found: Tensor = functions.swiglu(gate, up)
        gradients: list[Any] = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for y in (found, expected)]
    pairs = [(found.detach(), expected.detach()), *zip(*gradients, strict=True)]
    if not all(is_near(one, other, _MAX_ROUNDINGS * torch.finfo(dtype).eps) for one, other in pairs):
        return "the kernel's numbers differ from its own"
    return ""


class _Given(nn.Module):
    """A replacement for a linear layer that returns ``y`` for the input ``x``."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self._x, self._y = x, y

    def forward(self, x: Tensor) -> Tensor:
        assert x is self._x, "a different input than the module's own"
        return self._y
