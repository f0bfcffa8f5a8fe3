"""Frozen linear layers that apply the adapters of all slots together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from alto.errors import UnsupportedModelError
from alto.kernels import (
    GroupedLinear,
    LoraOperands,
    SlotTensors,
    TokenSchedule,
    added_linear,
    grouped_lora_linear,
    slot_bias_change,
)
from alto.lora.bank import AdapterBank
from alto.lora.dora import Dora

Product: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A function of tokens ``[…, K]``, a weight ``[N, K]`` and a bias ``[N]`` or None that returns ``[…, N]``."""

_CASTS = {Tensor.to, Tensor.type, Tensor.float, Tensor.detach, Tensor.contiguous}


class AdaptedWeight(Tensor):
    """A weight ``[N, K]`` or bias ``[N]`` that can be cast and whose shape and dtype can be read.

    Attributes:
        product: Computes ``torch.nn.functional.linear`` with the weight, adapters included; None if only the module
            itself applies the adapters.
        owner: Name of its module, for error messages.
    """

    product: Product | None
    owner: str

    @classmethod
    def of(cls, weight_NK: Tensor, owner: str, product: Product | None = None) -> AdaptedWeight:
        """Return a view of ``weight_NK``."""
        adapted = weight_NK.detach().as_subclass(cls)
        adapted.owner, adapted.product = owner, product
        return adapted

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, with the adapters if it is a linear product.

        Raises:
            UnsupportedModelError: The result would leave out the adapters.
        """
        kwargs = kwargs or {}
        adapted = next(value for value in (*args, *kwargs.values()) if isinstance(value, cls))
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear and adapted.product is not None:
                x, weight, bias = (*args, *kwargs.values(), None)[:3]
                return adapted.product(x, weight.as_subclass(Tensor), bias)
            if func in _CASTS:
                return cls.of(func(*args, **kwargs), adapted.owner, adapted.product)
            result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            raise UnsupportedModelError(
                f"expected a model that uses the weight of {adapted.owner} only in the linear product of its module, "
                "found one that also reads it elsewhere, without the adapter; leave the module out of target_modules "
                "and target_parameters"
            )
        return result


class InjectedModule(nn.Module):
    """A module that computes what a base-model module computes, plus the changes made by the adapters of all slots.

    Attributes:
        base: The replaced module. Outside of a schedule, the injected module behaves exactly like it.
    """

    base: Any

    def __init__(self, base: nn.Module, name: str, bank: AdapterBank, context: ForwardContext) -> None:
        super().__init__()
        self.base = base
        self._name = name
        self._bank = bank
        self._context = context

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward pass with adapters is in progress."""
        return self._context.schedule is not None


class SettingsModule(InjectedModule):
    """An injected module whose model reads settings and weights of the replaced module, such as a number of experts."""

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the base."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)


# Linear layers that read the same input as one PyTorch operator, so that ``torch.compile`` does not break the graph of
# a layer around them.
#
# To the compiler the operator is opaque. Its data (adapters, frozen weights, token slots) changes between steps and
# layers, so it is looked up by a number at run time. The number is stored in a tensor, so all layers of a model share
# one compiled graph.
#
# Shapes: ``T`` tokens, ``K`` in-features, ``N`` out-features, ``Q`` ranks of a slot over the layers, ``R`` the length
# of a row that holds them.


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_numbers = itertools.count()
_of_number: WeakValueDictionary[int, SharedInput] = WeakValueDictionary()


class GraphHandle:
    """The reference that compiled layers hold to a group of linear layers.

    Args:
        group: The group, referenced weakly.
    """

    def __init__(self, group: SharedInput, operands: LoraOperands, ops: ModuleType) -> None:
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


FrozenLinear: TypeAlias = nn.Linear | Conv1D
"""A linear layer of a base model; the GPT-2 family stores weights transposed, ``[K, N]``, in a ``Conv1D``."""


class PositionMap(Protocol):
    """The mapping between the ``T`` tokens of a forward pass and the ``P`` positions, padding included, that the model
    computes."""

    @property
    def num_positions(self) -> int: ...

    def collect(self, x_PN: Tensor) -> Tensor:
        """Return the rows of the tokens, ``[T, N]``."""
        ...

    def spread(self, x_TN: Tensor) -> Tensor:
        """Return the rows at all positions, ``[P, N]``, zero at padding."""
        ...


class ForwardContext:
    """The context that tells every injected module which slot each token of the current forward pass belongs to.

    The model owns its groups, and the groups own the bank. The context holds only weak references to the groups.
    Therefore a bank is freed as soon as its model is freed or the bank is ejected, without waiting for Python's garbage
    collector.

    Args:
        places: Returns the token positions of the current forward pass; None if the model runs on the tokens alone,
            without padding.
    """

    def __init__(self, places: Callable[[], PositionMap | None] | None = None) -> None:
        self.schedule: TokenSchedule | None = None
        self._places = places
        self.groups: WeakSet[SharedInput] = WeakSet()

    @property
    def is_packed(self) -> bool:
        """Whether the model computes only tokens, without padding."""
        return self._places is None

    def places(self) -> PositionMap | None:
        """Return the token positions of the current forward pass; None if the model computes no padding."""
        return None if self._places is None else self._places()

    @property
    def graph_groups(self) -> tuple[int, int]:
        """Number of shared inputs whose layers may be part of compiled layers, and number of all shared inputs."""
        return sum(group.is_in_graph for group in self.groups), len(self.groups)

    @contextmanager
    def use(self, schedule: TokenSchedule) -> Iterator[None]:
        """Run the enclosed forward and backward pass under ``schedule``."""
        assert self.schedule is None, "passes do not nest"
        self.schedule = schedule
        try:
            yield
        finally:
            self.schedule = None
            for group in self.groups:
                group.forget()


class SharedInput:
    """Linear layers that read the same input; the first call computes the outputs of all of them.

    Calling a member with a different tensor is also correct, but shares no work.

    Args:
        biases: The bias of every slot for each layer; None if no job trains it.
        dora: Scales the layers' outputs for slots that have DoRA magnitudes.
    """

    def __init__(
        self,
        bases: Sequence[FrozenWeight],
        bank: AdapterBank,
        operands: LoraOperands,
        context: ForwardContext,
        biases: Sequence[SlotTensors | None],
        dora: Dora,
    ) -> None:
        self._bases = tuple(bases)
        self._biases = tuple(biases)
        self._dora = dora
        self.bank = bank
        self._operands = operands
        self.context = context
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}
        context.groups.add(self)
        is_plain = context.is_packed and not dora.has_magnitudes and not any(self._biases)
        self._handle = GraphHandle(self, operands, bank.ops) if is_plain else None

    @property
    def is_in_graph(self) -> bool:
        """Whether compiled layers may contain these layers. They may not if jobs train biases or magnitudes of the
        layers, or if rows are padded."""
        return self._handle is not None

    def trains_bias(self, member: int) -> bool:
        """Return whether a job trains the bias of layer ``member``."""
        return self._biases[member] is not None

    def output(self, member: int, x: Tensor) -> Tensor:
        """Return the output of layer ``member`` for ``x``. Every computed output is returned only once."""
        if self._input is not x or member not in self._outputs:
            self._input, self._outputs = x, dict(enumerate(self._compute(x)))
        output = self._outputs.pop(member)
        if not self._outputs:
            self.forget()
        return output

    def forget(self) -> None:
        """Free outputs that were not used."""
        self._input, self._outputs = None, {}

    def in_pass(self, num_tokens: int) -> GroupedLinear:
        """Return the layers with the adapters of the current forward or backward pass.

        Raises:
            UnsupportedModelError: The layers do not see all tokens of the pass.
        """
        schedule = self.context.schedule
        assert schedule is not None
        self._check_sees_all(num_tokens, schedule, schedule.num_tokens)
        return GroupedLinear(bases=self._bases, operands=self._operands, schedule=schedule, ops=self.bank.ops)

    def _compute(self, x: Tensor) -> Iterable[Tensor]:
        x_TK = x.reshape(-1, x.shape[-1])
        if torch.compiler.is_compiling():
            assert self._handle is not None
            ys: Sequence[Tensor] = linear_in_graph(x_TK, self.bank.anchor, self._handle)
        else:
            ys = self._compute_tokens(x_TK)
        return [y_TN.view(*x.shape[:-1], y_TN.shape[-1]) for y_TN in ys]

    def _check_sees_all(self, num_tokens: int, schedule: TokenSchedule, num_positions: int) -> None:
        if schedule.segments and num_tokens != num_positions:
            raise UnsupportedModelError(
                f"target_modules: expected modules that the model runs on all {num_positions} tokens of a forward "
                f"pass, found a module with {self._operands.in_features} input features that it runs on {num_tokens} "
                "tokens; leave out layers that see only some tokens, such as layers of experts"
            )

    def _compute_tokens(self, x_TK: Tensor) -> tuple[Tensor, ...]:
        schedule = self.context.schedule
        assert schedule is not None
        places = self.context.places()
        num_positions = places.num_positions if places is not None else schedule.num_tokens
        self._check_sees_all(len(x_TK), schedule, num_positions)
        if places is not None:
            x_TK = places.collect(x_TK)
        ys = self._dora.outputs(x_TK, schedule, self._plain)
        ys = tuple(map(self._with_bias, range(len(ys)), ys))
        return ys if places is None else tuple(map(places.spread, ys))

    def _plain(self, x_TK: Tensor, schedule: TokenSchedule) -> tuple[Tensor, ...]:
        """Return the outputs without magnitudes and trained biases."""
        return grouped_lora_linear(x_TK, self.bank.anchor, self._bases, self._operands, schedule, self.bank.ops)

    def _with_bias(self, member: int, y_TN: Tensor) -> Tensor:
        """Return the output of layer ``member``, with each slot's own bias instead of the frozen one."""
        biases, schedule = self._biases[member], self.context.schedule
        assert schedule is not None
        if biases is None or not biases.is_in(schedule):
            return y_TN
        base_N = self._bases[member].bias
        assert base_N is not None
        return y_TN + slot_bias_change(self.bank.anchor, biases, base_N, schedule, y_TN.dtype)


class FrozenWeight:
    """The weight and bias of a linear layer, read at each use because they may be gathered or dequantised then."""

    def __init__(self, base: Any) -> None:
        self._base = base
        self._is_transposed = isinstance(base, Conv1D)

    @property
    def bias(self) -> Tensor | None:
        """The bias ``[N]``."""
        bias: Tensor | None = self._base.bias
        return bias

    def forward(self, x_TK: Tensor, y_TN: Tensor | None = None) -> Tensor:
        return added_linear(x_TK, self.weight, self.bias, y_TN)

    def backward(self, dy_TN: Tensor, dx_TK: Tensor | None) -> Tensor:
        return dy_TN @ self.weight if dx_TK is None else dx_TK.addmm_(dy_TN, self.weight)

    @property
    def weight(self) -> Tensor:
        """The weight ``[N, K]``."""
        weight: Tensor = self._base.weight
        return weight.T if self._is_transposed else weight


class MultiLoraLinear(InjectedModule):
    """A frozen linear layer with one adapter per slot. Outside of a schedule it acts as the base layer."""

    def __init__(self, base: FrozenLinear, name: str, shared: SharedInput, member: int) -> None:
        super().__init__(base, name, shared.bank, shared.context)
        self._shared = shared
        self._member = member

    @property
    def weight(self) -> Tensor:
        """The frozen weight, for models that read its dtype. Under a schedule it cannot be used in computations."""
        weight: Tensor = self.base.weight
        return AdaptedWeight.of(weight, self._name) if self.is_in_forward else weight

    @property
    def bias(self) -> Tensor | None:
        """The frozen bias. Under a schedule, a bias that jobs train cannot be used in computations."""
        bias: Tensor | None = self.base.bias
        if bias is None or not (self.is_in_forward and self._shared.trains_bias(self._member)):
            return bias
        return AdaptedWeight.of(bias, self._name)

    def forward(self, x: Tensor) -> Tensor:
        return self._output(x) if self._shared.is_in_graph else self._output_outside(x)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # reads token slots, which compiled graphs do not have
    def _output_outside(self, x: Tensor) -> Tensor:
        return self._output(x)

    def _output(self, x: Tensor) -> Tensor:
        if self.is_in_forward:
            return self._shared.output(self._member, x)
        result: Tensor = self.base(x)
        return result
