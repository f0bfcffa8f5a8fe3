"""bitsandbytes' 8-bit AdamW for one adapter."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from alto.errors import UnsupportedError
from alto.lora.parameter_groups import parameter_groups, set_rates
from alto.lora.row_optimizer import RowOptimizer
from alto.spec import JobConfig
from alto.spec.optimizers import EIGHT_BIT_OPTIMIZERS, OptimizerName

__all__ = ["EightBitAdamW", "check_optimizer", "eight_bit_bytes"]

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
            f"optim: {optim!r} needs the package bitsandbytes, found none; install it with: "
            f'pip install "alto-lora[bnb]"; or write adamw_torch.'
        )
    if optim == "paged_adamw_8bit" and device.type != "cuda":
        raise UnsupportedError(
            f"optim: expected a CUDA device to page {optim!r} out of, found {device.type!r}; write adamw_8bit, which "
            f"takes the same steps."
        )


def eight_bit_bytes(sizes: Iterable[int], dtype: torch.dtype) -> int:
    """Return the memory of an :class:`EightBitAdamW` between two steps, in bytes.

    Args:
        sizes: Number of elements of every tensor of the adapter.
        dtype: Dtype of the adapter.
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


class EightBitAdamW(RowOptimizer):
    """The 8-bit AdamW of one adapter.

    It works on contiguous copies of the adapter's matrices in PEFT's layout, because its state is quantised in blocks
    of neighbouring elements. bitsandbytes keeps the state of tensors with fewer than 4096 elements in 32 bits.

    Args:
        matrices: The adapter's matrices and extra tensors, any strides; only shapes, dtype and device are used.
        undecayed: Names of the tensors without weight decay.
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
        self,
        matrices: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        *,
        grad_scale: Tensor,
        config: JobConfig,
        learning_rate: float,
    ) -> None:
        """See :meth:`RowOptimizer.step`."""
        for name, parameter in self._parameters.items():
            parameter.copy_(matrices[name])
            parameter.grad = (gradients[name] * grad_scale).contiguous()
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
        """See :meth:`RowOptimizer.read`."""
        return {name: part.detach().to("cpu", copy=True) for name, part in self._parts().items()}

    def write(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """See :meth:`RowOptimizer.write`."""
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
