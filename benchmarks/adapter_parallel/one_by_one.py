"""Common parts of ``fsdp``, ``tp`` and ``pp``: PEFT's adapter on a base that is spread over the ranks, and training one
adapter after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from alto.lora import AdapterWeights
from benchmarks.baselines.stacked import MAX_GRAD_NORM
from benchmarks.kernels.variants import JobFacts
from benchmarks.kernels.workload import LEARNING_RATE, Workload

__all__ = ["OneByOne", "Way", "token_loss"]

_PREFIX = "base_model.model."


class Way(Protocol):
    """One way to train all adapters. Every rank has an object of it, and all ranks call the same methods in the same
    order."""

    def step(self, batch_size: int) -> None:
        """Take one optimizer step of every adapter."""

    def facts(self, batch_size: int, weights: Sequence[AdapterWeights]) -> dict[int, JobFacts]:
        """Return losses and gradients with these adapters, by job, as far as this rank has them. Several ranks may each
        have some modules of one job."""


class OneByOne:
    """Trains one adapter after the other, all in the same PEFT model. The time does not depend on the values in the
    model, and no time is lost by switching.

    Args:
        parameters: Parameters of the adapter on this rank, by name, whole or in part.
        whole: Names of the parameters that are not DTensors but are the same on all ranks.
    """

    def __init__(
        self, workload: Workload, parameters: Iterable[tuple[str, nn.Parameter]], whole: Iterable[str] = ()
    ) -> None:
        self._workload = workload
        self._parameters = dict(parameters)
        self._whole = frozenset(whole)
        # The fused optimizer does not accept a mixture of the two kinds.
        sharded = [one for one in self._parameters.values() if isinstance(one, DTensor)]
        plain = [one for one in self._parameters.values() if not isinstance(one, DTensor)]
        groups = [{"params": group} for group in (sharded, plain) if group]
        self._optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def backward(self, rows: Sequence[int]) -> Tensor:
        """Run forward and backward pass of one adapter on its batch, and return this rank's part of the loss."""
        raise NotImplementedError

    def step(self, batch_size: int) -> None:
        for rows in self._workload.rows(batch_size):
            self.backward(rows)
            self._clip()
            self._optimizer.step()
            self._optimizer.zero_grad()

    def facts(self, batch_size: int, weights: Sequence[AdapterWeights]) -> dict[int, JobFacts]:
        found = {}
        for job, (rows, adapter) in enumerate(zip(self._workload.rows(batch_size), weights, strict=True)):
            self._load(adapter)
            loss = self.backward(rows)
            dist.all_reduce(loss)
            found[job] = JobFacts(loss=float(loss), gradients=self._gradients())
            self._optimizer.zero_grad()
        return found

    def batch(self, rows: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, int]:
        """Return token ids and targets ``[rows, length]``, and the number of trained tokens."""
        train = self._workload.data.train
        ids, targets = (torch.stack([tensors[row] for row in rows]) for tensors in (train.input_ids, train.targets))
        return ids.to(device), targets.to(device), sum(train.num_trained[row] for row in rows)

    @torch.no_grad()
    def _clip(self) -> None:
        """Clip gradients as ``clip_grad_norm_`` does, with one all-reduce for the parts of all ranks."""
        parts, same = [], []
        for name, parameter in self._parameters.items():
            gradient: Any = parameter.grad
            is_same = name in self._whole
            if isinstance(gradient, DTensor):
                is_same = all(placement.is_replicate() for placement in gradient.placements)
                gradient = gradient.to_local()
            (same if is_same else parts).append(gradient)
        square = torch.nn.utils.get_total_norm(parts).square()
        dist.all_reduce(square)
        if same:
            square += torch.nn.utils.get_total_norm(same).square()
        torch._foreach_mul_([*parts, *same], torch.clamp(MAX_GRAD_NORM / (square.sqrt() + 1e-6), max=1.0))

    @torch.no_grad()
    def _load(self, adapter: AdapterWeights) -> None:
        for name, parameter in self._parameters.items():
            module, side = _place(name)
            value = adapter[module][side].T.to(parameter)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(value)

    def _gradients(self) -> AdapterWeights:
        found: dict[str, list[Tensor]] = {}
        for name in sorted(self._parameters):  # A comes before B of the same module
            gradient: Any = self._parameters[name].grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
            found.setdefault(_place(name)[0], []).append(whole.T)
        return AdapterWeights({module: (a, b) for module, (a, b) in found.items()})


def token_loss(logits: Tensor, targets: Tensor, num_trained: int) -> Tensor:
    """Return the contribution of these tokens to the mean over ``num_trained``."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum") / num_trained


def _place(name: str) -> tuple[str, int]:
    """Return the name of a parameter's module, and 0 for A or 1 for B."""
    module, side = name.removeprefix(_PREFIX).split(".lora_")
    return module, "AB".index(side[0])
