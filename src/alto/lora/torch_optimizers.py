"""torch's optimizers and transformers' Adafactor for one adapter, with the settings of transformers' Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alto.lora.parameter_groups import parameter_groups, set_rates
from alto.lora.row_optimizer import RowOptimizer
from alto.spec import JobConfig
from alto.spec.optimizers import OptimizerName

__all__ = ["TORCH_OPTIMIZERS", "TorchOptimizer", "torch_optimizer_bytes"]

_Groups = Sequence[Mapping[str, Any]]


def _adafactor(groups: _Groups) -> Optimizer:
    from transformers import Adafactor

    return Adafactor(groups, lr=0.0, scale_parameter=False, relative_step=False)


TORCH_OPTIMIZERS: Mapping[OptimizerName, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adafactor": _adafactor,
}
"""Constructor of each optimizer, called with parameter groups, which hold learning rate and weight decay, and
``optim_args``."""

_NUM_MOMENTS: Mapping[OptimizerName, int] = {"sgd": 1, "rmsprop": 3, "adagrad": 1}
"""Largest number of state tensors of a parameter's shape for each optimizer: with momentum and a mean of gradients."""


def torch_optimizer_bytes(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype, optim: OptimizerName) -> int:
    """Return the state memory of a :class:`TorchOptimizer` between two steps, in bytes, for its costliest
    ``optim_args``.

    Args:
        shapes: Shapes of the adapter's tensors, one- or two-dimensional.
        dtype: Dtype of the adapter.
        optim: One of :data:`TORCH_OPTIMIZERS`.
    """
    if optim == "adafactor":
        # Row and column sums of a matrix, all squares of a vector, and one mean per tensor.
        return sum(sum(shape) + 1 for shape in shapes) * torch.float32.itemsize
    return _NUM_MOMENTS[optim] * sum(map(math.prod, shapes)) * dtype.itemsize


class TorchOptimizer(RowOptimizer):
    """The optimizer of one adapter. This object keeps the state and creates a new torch optimizer for every step.

    A failed step changes nothing, because the step works on copies of the state and of the tensors. The copies are
    contiguous, like PEFT's parameters.

    Args:
        optim: One of :data:`TORCH_OPTIMIZERS`.
        undecayed: Names of the tensors without weight decay.
    """

    def __init__(self, optim: OptimizerName, *, undecayed: Collection[str] = ()) -> None:
        self._undecayed = frozenset(undecayed)
        self._make = TORCH_OPTIMIZERS[optim]
        self._state: dict[str, dict[str, Any]] = {}

    @torch.no_grad()
    def step(
        self,
        matrices: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        *,
        grad_scale: Tensor,
        config: JobConfig,
        learning_rate: float,
    ) -> None:
        """See :meth:`RowOptimizer.step`."""
        parameters = {
            name: nn.Parameter(matrix.clone(memory_format=torch.contiguous_format)) for name, matrix in matrices.items()
        }
        groups = parameter_groups(parameters, self._undecayed)
        set_rates(groups, config, learning_rate)
        optimizer = self._make(groups, **dict(config.optim_args))
        for name, parameter in parameters.items():
            parameter.grad = (gradients[name] * grad_scale).contiguous()
            if name in self._state:
                known = self._state[name].items()
                optimizer.state[parameter] = {part: _loaded(part, value, parameter.device) for part, value in known}
        optimizer.step()
        self._state = {name: dict(optimizer.state[parameter]) for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            matrices[name].copy_(parameter)

    def read(self) -> dict[str, Tensor]:
        """See :meth:`RowOptimizer.read`; empty before the first step."""
        return {
            f"{name}.{part}": torch.as_tensor(value).detach().to("cpu", copy=True)
            for name, parts in self._state.items()
            for part, value in parts.items()
            if value is not None
        }

    def write(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """See :meth:`RowOptimizer.write`."""
        self._state = {}
        for key, value in tensors.items():
            name, _, part = key.rpartition(".")
            is_count = part == "step" and not value.is_floating_point()  # transformers uses an int
            self._state.setdefault(name, {})[part] = int(value) if is_count else value.clone()


def _loaded(part: str, value: Any, device: torch.device) -> Any:
    """Return a copy of one part of the state on the device that the optimizer expects; step counts stay on the CPU."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if part == "step" or value.device == device else value.to(device)
