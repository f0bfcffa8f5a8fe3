"""Runs each RMS norm of a base model as one kernel."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from alto.backbone.bare_copies import bare_copy, is_near
from alto.backbone.fused_forward import FusedForward
from alto.kernels import NormKind
from alto.kernels.layer_reference import rms_norm

__all__ = ["FusedNorm", "fused_norm", "norm_signature"]

_EPSILONS = ("variance_epsilon", "eps")
"""Attributes in which transformers' norms keep the number that is added to the mean square."""

_ROW_SIZES = (1.0, 1e-3, 30.0, 0.0, 1.0)
"""Magnitudes of the test rows; the mean square of the second row is close to a typical epsilon."""

_MAX_ROUNDINGS = 4
"""Allowed difference of outputs and gradients; another order of summation changes them by two roundings at most."""


class FusedNorm(FusedForward):
    """The forward pass of an RMS norm."""

    op = "rms_norm"

    def __init__(self, module: nn.Module, functions: ModuleType, epsilon: float, kind: NormKind) -> None:
        super().__init__(module, _width(module), epsilon, kind)
        self._functions, self._epsilon, self._kind = functions, epsilon, kind

    def __call__(self, x: Tensor) -> Tensor:
        weight_H: Any = self.module.weight
        if weight_H.requires_grad:
            return self.own_forward("its weight is trained", x)
        if x.dtype != weight_H.dtype:
            return self.own_forward(f"its weight is {weight_H.dtype}, its input {x.dtype}", x)
        y: Tensor = self._functions.rms_norm(x, weight_H, self._epsilon, self._kind)
        return y

    def sample(self, dtype: torch.dtype, device: torch.device) -> None:
        x = torch.empty(2, _width(self.module), dtype=dtype, device=device)
        y = self._functions.rms_norm(x[:1].requires_grad_(), x[1], self._epsilon, self._kind)
        y.backward(torch.empty_like(y))


def norm_signature(module: nn.Module) -> tuple[Any, ...] | None:
    """Return everything except the weights that decides what an RMS norm computes; None if ``module`` does not have the
    structure of an RMS norm: one weight for each number of a row, an epsilon, and nothing else."""
    weight = module._parameters.get("weight")
    has_more = len(module._parameters) != 1 or any(module.children()) or any(module.buffers())
    if weight is None or weight.dim() != 1 or has_more or isinstance(module, nn.LayerNorm):
        return None
    epsilons = tuple(vars(module).get(name) for name in _EPSILONS)
    return None if epsilons == (None, None) else (type(module), epsilons, tuple(weight.shape), weight.dtype)


def fused_norm(module: nn.Module, functions: ModuleType, device: torch.device) -> tuple[NormKind, float] | str:
    """Return the kind and the epsilon of an RMS norm, or the reason why no kernel can replace it.

    The class of the norm is run on random rows with random weights. Its outputs must be bit-identical to those of a
    known kind. Outputs and gradients must equal those of the kernel up to rounding.

    Args:
        module: An RMS norm: :func:`norm_signature` is not None.
        functions: :mod:`alto.kernels.layer_functions`.
        device: Device of the model.
    """
    epsilon = next(value for name in _EPSILONS if (value := vars(module).get(name)) is not None)
    weight: Any = module.weight
    width, dtype = _width(module), weight.dtype
    if not isinstance(epsilon, float) or not 1 < width <= functions.MAX_NORM_WIDTH:
        return f"its rows have {width} numbers, its epsilon is {epsilon!r}"
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rows = draw(len(_ROW_SIZES), width) * torch.tensor(_ROW_SIZES)[:, None]
    x, dy = rows.to(device, dtype).requires_grad_(), draw(*rows.shape).to(device, dtype)
    weight_H = (1 + draw(width) / 4).to(device, dtype)
    with torch.enable_grad():
        expected: Tensor = bare_copy(module, weights={"weight": weight_H})(x)
        [expected_dx] = torch.autograd.grad(expected, x, dy)
        kinds = [kind for kind in NormKind if _is_same(rms_norm(x, weight_H, epsilon, kind), expected)]
        if not kinds:
            return "its numbers match no known kind of RMS norm"
        found: Tensor = functions.rms_norm(x, weight_H, epsilon, kinds[0])
        [found_dx] = torch.autograd.grad(found, x, dy)
    limit = _MAX_ROUNDINGS * torch.finfo(dtype).eps
    if not is_near(found.detach(), expected.detach(), limit) or not is_near(found_dx, expected_dx, limit):
        return "the kernel's numbers differ from its own"
    return kinds[0], epsilon


def _width(module: nn.Module) -> int:
    weight: Any = module.weight
    width: int = weight.shape[0]
    return width


def _is_same(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)
