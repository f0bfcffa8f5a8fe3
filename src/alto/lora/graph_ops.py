"""Linear layers that read the same input as one PyTorch operator, so that ``torch.compile`` does not break the graph of
a layer around them.

To the compiler the operator is opaque. Its data (adapters, frozen weights, token slots) changes between steps and
layers, so it is looked up by a number at run time. The number is stored in a tensor, so all layers of a model share one
compiled graph.

Shapes: ``T`` tokens, ``K`` in-features, ``N`` out-features, ``Q`` ranks of a slot over the layers, ``R`` the length of
a row that holds them.
"""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from alto.kernels import GroupedLinear, LoraOperands

__all__ = ["GraphHandle", "InGraph", "linear_in_graph"]


class InGraph(Protocol):
    """Linear layers that read the same input."""

    def in_pass(self, num_tokens: int) -> GroupedLinear:
        """Return the layers with the adapters of the current forward or backward pass.

        Raises:
            UnsupportedModelError: The layers do not see all tokens of the pass.
        """
        ...


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_numbers = itertools.count()
_of_number: WeakValueDictionary[int, InGraph] = WeakValueDictionary()


class GraphHandle:
    """The reference that compiled layers hold to a group of linear layers.

    Args:
        group: The group, referenced weakly.
        ops: The kernel backend module.
    """

    def __init__(self, group: InGraph, operands: LoraOperands, ops: ModuleType) -> None:
        number = next(_numbers)
        _of_number[number] = group
        self.number = torch.tensor([number])
        self.widths = list(operands.out_features)
        self.rows = {dtype: ops.narrow_rows(operands, dtype) for dtype in _DTYPES}


def linear_in_graph(x_TK: Tensor, anchor: Tensor, handle: GraphHandle) -> tuple[Tensor, ...]:
    """Return ``y_TN`` of every layer of ``handle``; see :func:`alto.kernels.grouped_lora_linear`."""
    row_length, dtype = handle.rows[x_TK.dtype]
    result: tuple[Tensor, ...] = _LinearInGraph.apply(x_TK, anchor, handle.number, handle.widths, row_length, dtype)
    return result


class _LinearInGraph(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, anchor: Tensor, number: Tensor, widths: list[int], row_length: int, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        *ys, s_TR = torch.ops.alto.grouped_linear(x_TK, number, widths, row_length, dtype)
        ctx.save_for_backward(x_TK, s_TR, number)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        dx_TK, anchor_gradient = torch.ops.alto.grouped_linear_backward(list(dys), *ctx.saved_tensors)
        return dx_TK, anchor_gradient, None, None, None, None


def _forward(x_TK: Tensor, number: Tensor, widths: list[int], row_length: int, dtype: torch.dtype) -> list[Tensor]:
    """Return ``y_TN`` of every layer, and the rows ``s_TR`` that begin with ``s_TQ``."""
    ys, s_TQ = _of_number[int(number)].in_pass(len(x_TK)).forward(x_TK)
    if s_TQ is None:
        return [*ys, x_TK.new_empty(len(x_TK), row_length, dtype=dtype)]
    return [*ys, s_TQ.as_strided((len(x_TK), row_length), (row_length, 1))]


def _shapes(x_TK: Tensor, number: Tensor, widths: list[int], row_length: int, dtype: torch.dtype) -> list[Tensor]:
    ys = [x_TK.new_empty(x_TK.shape[0], width) for width in widths]
    return [*ys, x_TK.new_empty(x_TK.shape[0], row_length, dtype=dtype)]


def _backward(dys: list[Tensor], x_TK: Tensor, s_TR: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient with respect to ``x_TK`` and a zero for the anchor, whose gradient is always needed, so the
    call is always made."""
    group = _of_number[int(number)].in_pass(len(x_TK))
    s_TQ = s_TR[:, : group.operands.max_width] if group.is_adapted else None
    dx_TK = group.backward([dy_TN.contiguous() for dy_TN in dys], x_TK, s_TQ, needs_dx=True)
    assert dx_TK is not None
    return dx_TK, x_TK.new_zeros((), dtype=torch.float32)


def _backward_shapes(dys: list[Tensor], x_TK: Tensor, s_TR: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_TK), x_TK.new_zeros((), dtype=torch.float32)


# Not torch.library.custom_op: it would go through autograd at every call, although _LinearInGraph already does.
_library = torch.library.Library("alto", "FRAGMENT")
_library.define(
    "grouped_linear(Tensor x, Tensor number, int[] widths, int row_length, ScalarType dtype) -> Tensor[]",
)
_library.define("grouped_linear_backward(Tensor[] dys, Tensor x, Tensor s, Tensor number) -> (Tensor, Tensor)")
_library.impl("grouped_linear", _forward, "CompositeExplicitAutograd")
_library.impl("grouped_linear_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("alto::grouped_linear", _shapes)
torch.library.register_fake("alto::grouped_linear_backward", _backward_shapes)
