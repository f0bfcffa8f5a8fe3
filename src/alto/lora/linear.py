"""Frozen linear layers that apply the adapters of all slots at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from alto.errors import UnsupportedModelError
from alto.kernels import GroupedLinear, LoraOperands, SlotTensors, TokenSchedule, added_linear, slot_bias_change
from alto.lora.adapted_weight import AdaptedWeight
from alto.lora.bank import AdapterBank
from alto.lora.dora import Dora
from alto.lora.graph_ops import GraphHandle, linear_in_graph
from alto.lora.injected import InjectedModule

__all__ = ["ForwardContext", "FrozenLinear", "FrozenWeight", "MultiLoraLinear", "RowPlaces", "SharedInput"]

FrozenLinear: TypeAlias = nn.Linear | Conv1D
"""A linear layer of a base model; GPT-2's family keeps weights transposed, ``[K, N]``, in a ``Conv1D``."""


class RowPlaces(Protocol):
    """Where the ``T`` tokens of a forward pass lie among the ``P`` positions that the model computes.

    Attributes:
        num_positions: ``P``.
    """

    @property
    def num_positions(self) -> int: ...

    def collect(self, x_PN: Tensor) -> Tensor:
        """The tokens, ``[T, N]``."""
        ...

    def spread(self, x_TN: Tensor) -> Tensor:
        """The positions, ``[P, N]``."""
        ...


class ForwardContext:
    """Gives every injected module the slots of the current forward pass's tokens.

    The model owns its groups, and they the bank: here they are only referred to, so that a bank is freed with the model
    that it serves (or when it is taken out of it), at once and not when Python next collects cycles.

    Args:
        places: Gives the places of the tokens of the forward pass in progress; None where the model computes nothing
            but tokens.
    """

    def __init__(self, places: Callable[[], RowPlaces | None] | None = None) -> None:
        self.schedule: TokenSchedule | None = None
        self._places = places
        self.groups: WeakSet[SharedInput] = WeakSet()

    @property
    def is_packed(self) -> bool:
        """Whether the model computes nothing but tokens."""
        return self._places is None

    def places(self) -> RowPlaces | None:
        """The places of the tokens of the forward pass in progress; None where the model computes them alone."""
        return None if self._places is None else self._places()

    @property
    def graph_groups(self) -> tuple[int, int]:
        """How many of the inputs that adapted linear layers read are read inside of compiled layers, where layers are
        compiled; and how many there are."""
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
    """Linear layers that read the same input: the first call computes the outputs of all.

    A member that is called with another tensor is also correct, but shares no work.

    Args:
        bases: The layers.
        bank: Adapters of all slots.
        operands: Those of the layers.
        context: Gives the slots of the tokens.
        biases: The own bias of every slot for each layer; None where no job trains it.
        dora: Computes their outputs, scaled to the magnitudes of slots that have them.
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
        self._bank = bank
        self._operands = operands
        self._context = context
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}
        context.groups.add(self)
        is_plain = context.is_packed and not dora.has_magnitudes and not any(self._biases)
        self._handle = GraphHandle(self, operands, dora.ops) if is_plain else None

    @property
    def is_in_graph(self) -> bool:
        """Whether a compiled layer may contain the layers: it does not where jobs train biases or magnitudes of theirs,
        nor in padded rows."""
        return self._handle is not None

    @property
    def is_in_forward(self) -> bool:
        return self._context.schedule is not None

    def trains_bias(self, member: int) -> bool:
        """Whether a job trains the bias of layer ``member``."""
        return self._biases[member] is not None

    def output(self, member: int, x: Tensor) -> Tensor:
        """Output of layer ``member`` for ``x``; every output is returned once."""
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
        """See :class:`alto.lora.graph_ops.InGraph`."""
        schedule = self._context.schedule
        assert schedule is not None
        self._check_sees_all(num_tokens, schedule, schedule.num_tokens)
        return GroupedLinear(bases=self._bases, operands=self._operands, schedule=schedule, ops=self._dora.ops)

    def _compute(self, x: Tensor) -> Iterable[Tensor]:
        x_TK = x.reshape(-1, x.shape[-1])
        if torch.compiler.is_compiling():
            assert self._handle is not None
            ys: Sequence[Tensor] = linear_in_graph(x_TK, self._bank.anchor, self._handle)
        else:
            ys = self._compute_tokens(x_TK)
        return [y_TN.view(*x.shape[:-1], y_TN.shape[-1]) for y_TN in ys]

    def _check_sees_all(self, num_tokens: int, schedule: TokenSchedule, num_positions: int) -> None:
        if schedule.segments and num_tokens != num_positions:
            raise UnsupportedModelError(
                f"target_modules: expected modules that the model runs on all {num_positions} tokens of a forward "
                f"pass, found one of {self._operands.in_features} features that it runs on {num_tokens}; leave out "
                "layers that see only some tokens, such as those of experts"
            )

    def _compute_tokens(self, x_TK: Tensor) -> tuple[Tensor, ...]:
        schedule = self._context.schedule
        assert schedule is not None
        places = self._context.places()
        num_positions = places.num_positions if places is not None else schedule.num_tokens
        self._check_sees_all(len(x_TK), schedule, num_positions)
        if places is not None:
            x_TK = places.collect(x_TK)
        ys = self._dora.outputs(x_TK, schedule)
        ys = tuple(map(self._with_bias, range(len(ys)), ys))
        return ys if places is None else tuple(map(places.spread, ys))

    def _with_bias(self, member: int, y_TN: Tensor) -> Tensor:
        """The output of layer ``member``, with every slot's own bias in the place of the frozen one."""
        biases, schedule = self._biases[member], self._context.schedule
        assert schedule is not None
        if biases is None or not biases.is_in(schedule):
            return y_TN
        base_N = self._bases[member].bias
        assert base_N is not None
        return y_TN + slot_bias_change(self._bank.anchor, biases, base_N, schedule, y_TN.dtype)


class FrozenWeight:
    """The weight and the bias of a linear layer; read at each use, as they may be gathered or dequantised then."""

    def __init__(self, base: FrozenLinear) -> None:
        self._base: Any = base
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
        """The weight."""
        weight: Tensor = self._base.weight
        return weight.T if self._is_transposed else weight


class MultiLoraLinear(InjectedModule):
    """A frozen linear layer with one adapter per slot. Outside of a schedule it is only the base layer.

    Args:
        base: The layer.
        name: Its full name in the model.
        shared: The layers that read the same input.
        member: Its index among them.
    """

    def __init__(self, base: FrozenLinear, name: str, shared: SharedInput, member: int) -> None:
        super().__init__()
        self.base = base
        self._name = name
        self._shared = shared
        self._member = member

    @property
    def weight(self) -> Tensor:
        """The frozen weight, for models that ask for its precision; under a schedule it can only be looked at."""
        weight: Tensor = self.base.weight
        return AdaptedWeight.of(weight, self._name) if self._shared.is_in_forward else weight

    @property
    def bias(self) -> Tensor | None:
        """The frozen bias; one that jobs train can only be looked at under a schedule."""
        bias: Tensor | None = self.base.bias
        if bias is None or not (self._shared.is_in_forward and self._shared.trains_bias(self._member)):
            return bias
        return AdaptedWeight.of(bias, self._name)

    def forward(self, x: Tensor) -> Tensor:
        return self._output(x) if self._shared.is_in_graph else self._output_outside(x)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # looks at the slots of tokens, which graphs do not know
    def _output_outside(self, x: Tensor) -> Tensor:
        return self._output(x)

    def _output(self, x: Tensor) -> Tensor:
        if self._shared.is_in_forward:
            return self._shared.output(self._member, x)
        result: Tensor = self.base(x)
        return result
