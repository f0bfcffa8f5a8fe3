"""Optimizers that belong to one slot each, and the bytes of their states."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alto.errors import UnsupportedError
from alto.lora.layout import BankLayout
from alto.spec import EIGHT_BIT_OPTIMIZERS, JobConfig, OptimizerName
from alto.version import install_command


def parameter_groups(parameters: Mapping[str, nn.Parameter], undecayed: Collection[str]) -> list[dict[str, Any]]:
    """Return parameter groups that share a learning rate and weight decay; :func:`set_rates` sets both.

    Args:
        parameters: Parameters by ``<module>.A``, ``<module>.B``, or the name of an extra tensor. Vectors use the
            learning rate of ``B``.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        has_rate_of_b = name.endswith(".B") or parameter.ndim == 1
        groups.setdefault((has_rate_of_b, name not in undecayed), []).append(parameter)
    return [
        {"params": group, "has_rate_of_b": has_rate_of_b, "has_decay": has_decay}
        for (has_rate_of_b, has_decay), group in groups.items()
    ]


def set_rates(groups: Iterable[dict[str, Any]], config: JobConfig, learning_rate: float) -> None:
    """Set learning rate and weight decay of every group.

    Args:
        learning_rate: Learning rate of every ``A``. ``B`` and vectors use it times ``config.loraplus_lr_ratio``.
    """
    for group in groups:
        group["lr"] = learning_rate * (config.loraplus_lr_ratio if group["has_rate_of_b"] else 1.0)
        group["weight_decay"] = config.weight_decay if group["has_decay"] else 0.0


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
"""Constructor of each optimizer, called with parameter groups, which contain learning rate and weight decay, and
``optim_args``."""

_NUM_MOMENTS: Mapping[OptimizerName, int] = {"sgd": 1, "rmsprop": 3, "adagrad": 1}
"""Largest number of state tensors of a parameter's shape for each optimizer: with momentum and a mean of gradients."""


def torch_optimizer_bytes(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype, optim: OptimizerName) -> int:
    """Return the state memory of a :class:`TorchOptimizer` between two steps, in bytes, for its costliest
    ``optim_args``.

    Args:
        shapes: Shapes of the adapter's tensors, one- or two-dimensional.
    """
    if optim == "adafactor":
        # Row and column sums of a matrix, all squares of a vector, and one mean per tensor.
        return sum(sum(shape) + 1 for shape in shapes) * torch.float32.itemsize
    return _NUM_MOMENTS[optim] * sum(map(math.prod, shapes)) * dtype.itemsize


class TorchOptimizer:
    """The optimizer of one adapter. This object keeps the state and creates a new torch optimizer for every step.

    A failed step changes nothing, because the step works on copies of the state and of the tensors. The copies are
    contiguous, like PEFT's parameters.

    Matrices are named ``<module>.A`` and ``<module>.B`` and have PEFT's orientation: ``[r, K]`` and ``[N, r]``, for
    in-features ``K``, out-features ``N`` and rank ``r``. Extra tensors of the adapter keep their names.
    """

    def __init__(self, optim: OptimizerName, *, undecayed: Collection[str] = ()) -> None:
        self._undecayed = frozenset(undecayed)
        self._make = TORCH_OPTIMIZERS[optim]
        self._state: dict[str, dict[str, Any]] = {}

    @torch.no_grad()
    def step(
        self, matrices: Mapping[str, Tensor], gradients: Mapping[str, Tensor], config: JobConfig, learning_rate: float
    ) -> None:
        """Take one step on ``matrices`` in place. If memory runs out, nothing changes.

        Args:
            matrices: The adapter's matrices and extra tensors, any strides.
            gradients: Their clipped gradients, contiguous.
            learning_rate: Learning rate of every ``A``. ``B`` and vectors use it times ``config.loraplus_lr_ratio``.
        """
        parameters = {
            name: nn.Parameter(matrix.clone(memory_format=torch.contiguous_format)) for name, matrix in matrices.items()
        }
        groups = parameter_groups(parameters, self._undecayed)
        set_rates(groups, config, learning_rate)
        optimizer = self._make(groups, **dict(config.optim_args))
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
            if name in self._state:
                known = self._state[name].items()
                optimizer.state[parameter] = {part: _loaded(part, value, parameter.device) for part, value in known}
        optimizer.step()
        self._state = {name: dict(optimizer.state[parameter]) for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            matrices[name].copy_(parameter)

    def read(self) -> dict[str, Tensor]:
        """Return a copy of the state on the CPU, by ``<matrix>.<part>``; empty before the first step."""
        return {
            f"{name}.{part}": torch.as_tensor(value).detach().to("cpu", copy=True)
            for name, parts in self._state.items()
            for part, value in parts.items()
            if value is not None
        }

    def write(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore a state that :meth:`read` returned after ``step`` steps."""
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


_STATE = ("state1", "state2", "absmax1", "absmax2")
_MIN_EIGHT_BIT_SIZE = 4096
_BLOCK_SIZE = 256
_NUM_LEVELS = 256


def check_optimizer(optim: OptimizerName, device: torch.device) -> None:
    """Check that a job can be trained with ``optim`` on ``device``.

    Raises:
        UnsupportedError: bitsandbytes is not installed, or does not support paged memory on this device.
    """
    if optim not in EIGHT_BIT_OPTIMIZERS:
        return
    if find_spec("bitsandbytes") is None:
        raise UnsupportedError(
            f"optim: {optim!r} needs the package bitsandbytes, which is not installed. Install it with: "
            f"{install_command('bnb')}, or set optim to adamw_torch."
        )
    if optim == "paged_adamw_8bit" and device.type != "cuda":
        raise UnsupportedError(
            f"optim: {optim!r} needs a CUDA device, found {device.type!r}. Set optim to adamw_8bit, which computes the "
            f"same updates."
        )


def eight_bit_bytes(sizes: Iterable[int], dtype: torch.dtype) -> int:
    """Return the memory of an :class:`EightBitAdamW` between two steps, in bytes.

    Args:
        sizes: Number of elements of every tensor of the adapter.
    """
    total, has_maps = 0, False
    for size in sizes:
        total += size * dtype.itemsize  # the copy it computes on
        if size < _MIN_EIGHT_BIT_SIZE:
            total += 2 * size * torch.float32.itemsize
        else:
            total += 2 * (size + -(-size // _BLOCK_SIZE) * torch.float32.itemsize)
            has_maps = True
    return total + has_maps * 2 * _NUM_LEVELS * torch.float32.itemsize


class EightBitAdamW:
    """The 8-bit AdamW of one adapter.

    It works on contiguous copies of the adapter's matrices in PEFT's layout, because its state is quantised in blocks
    of neighboring elements. bitsandbytes keeps the state of tensors with fewer than 4096 elements in 32 bits.

    Args:
        matrices: The adapter's matrices and extra tensors, any strides; only shapes, dtype and device are used.
        paged: Whether the driver can page the state of large matrices out of device memory.
    """

    def __init__(self, matrices: Mapping[str, Tensor], *, undecayed: Collection[str] = (), paged: bool) -> None:
        from bitsandbytes.optim.adamw import AdamW8bit, PagedAdamW8bit

        self.is_paged = paged
        self._parameters = {
            name: nn.Parameter(torch.zeros_like(matrix, memory_format=torch.contiguous_format))
            for name, matrix in matrices.items()
        }
        groups = parameter_groups(self._parameters, undecayed)
        self._optimizer = (PagedAdamW8bit if paged else AdamW8bit)(groups)
        for group_index, group in enumerate(self._optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                self._optimizer.init_state(group, parameter, group_index, index)

    def fits(self, matrices: Mapping[str, Tensor]) -> bool:
        """Return whether the optimizer fits an adapter with these matrices."""
        return {name: parameter.shape for name, parameter in self._parameters.items()} == {
            name: matrix.shape for name, matrix in matrices.items()
        }

    @torch.no_grad()
    def step(
        self, matrices: Mapping[str, Tensor], gradients: Mapping[str, Tensor], config: JobConfig, learning_rate: float
    ) -> None:
        """See :meth:`TorchOptimizer.step`."""
        for name, parameter in self._parameters.items():
            parameter.copy_(matrices[name])
            parameter.grad = gradients[name]
        set_rates(self._optimizer.param_groups, config, learning_rate)
        for group in self._optimizer.param_groups:
            group["betas"] = (config.adam_beta1, config.adam_beta2)
            group["eps"] = config.adam_epsilon
        self._step_whole()
        for name, parameter in self._parameters.items():
            matrices[name].copy_(parameter)
            parameter.grad = None

    def _step_whole(self) -> None:
        """Update all matrices, or none if the step fails."""
        some = next(iter(self._parameters.values()))
        if some.device.type != "cpu":
            self._optimizer.step()  # its kernels allocate no memory
            return
        step, before = self._optimizer.state[some]["step"], self.read()
        try:
            self._optimizer.step()
        except Exception:
            self.write(step, before)
            raise

    def read(self) -> dict[str, Tensor]:
        """See :meth:`TorchOptimizer.read`."""
        return {name: part.detach().to("cpu", copy=True) for name, part in self._parts().items()}

    def write(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """See :meth:`TorchOptimizer.write`."""
        for name, part in self._parts().items():
            part.copy_(tensors[name])
        self._set_step(step)

    def reset(self) -> None:
        """Reset to the state before the first step."""
        for part in self._parts().values():
            part.zero_()
        self._set_step(0)

    def _parts(self) -> dict[str, Tensor]:
        # The quantisation maps are constant and shared, so they are not part of the state.
        return {
            f"{name}.{part}": self._optimizer.state[parameter][part]
            for name, parameter in self._parameters.items()
            for part in _STATE
            if part in self._optimizer.state[parameter]
        }

    def _set_step(self, step: int) -> None:
        for parameter in self._parameters.values():
            self._optimizer.state[parameter]["step"] = step


def bank_bytes(
    layout: BankLayout,
    num_slots: int,
    optims: Collection[OptimizerName],
    adapter_dtype: torch.dtype = torch.float32,
    working_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
) -> int:
    """Return the memory of an :class:`AdapterBank` and its :class:`BankOptimizer`, in bytes, with the largest adapter
    in every slot and the costliest of ``optims``.

    Paged state counts completely, because it leaves the device only when the device's memory is full.

    Args:
        working_dtype: Precision of the bank's copies of its weights; None for no copies.
        state_dtype: Precision of the moments of ``adamw_torch``; None means the precision of the adapters.
    """
    bytes_of_rows = 2 * adapter_dtype.itemsize  # weights and gradients
    if working_dtype is not None:
        bytes_of_rows += working_dtype.itemsize
    if "adamw_torch" in optims:
        bytes_of_rows += 2 * (state_dtype or adapter_dtype).itemsize
    shapes: list[tuple[int, ...]] = [
        (layout.max_rank, side) for module in layout.modules for side in (module.in_features, module.out_features)
    ]
    shapes += [extra.shape for extra in layout.extras]
    own = [
        torch_optimizer_bytes(shapes, adapter_dtype, optim)
        if optim in TORCH_OPTIMIZERS
        else eight_bit_bytes(map(math.prod, shapes), adapter_dtype)
        for optim in set(optims) - {"adamw_torch"}
    ]
    return num_slots * (bytes_of_rows * layout.row_size + max(own, default=0))
