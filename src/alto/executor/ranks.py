"""The processes of one executor, a rank each, and the little that they tell one another.

Every rank makes the same decisions from the same records, so what crosses between them is small: the losses of a step,
what only the first rank can know (a signal, the clock, the mailbox), and that a part of the work is done. Adapters
never cross.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["Ranks"]

T = TypeVar("T")

TIMEOUT = timedelta(hours=1)
"""After which a rank that waits for another gives up; whoever watches the heartbeat is much sooner."""


class Ranks:
    """This process among those of its executor. All of them call the same methods in the same order.

    Attributes:
        rank: The number of this one, from 0.
        size: How many there are.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def join(cls, device: torch.device) -> Ranks:
        """Meet the other ranks that the environment speaks of (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``,
        ``MASTER_PORT``); alone where it speaks of none.

        Tensors on ``device`` go over NCCL where that is a GPU; all else goes over gloo.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=TIMEOUT)
        return cls(dist.get_rank(), dist.get_world_size())

    def mesh(self, device: torch.device) -> DeviceMesh | None:
        """What a base model is sharded over; None for one that is whole."""
        return None if self.is_alone else init_device_mesh(device.type, (self.size,))

    @property
    def is_first(self) -> bool:
        """Whether this one writes what is written once: the journal, answers, reports."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all ranks, place by place; nothing is lost of a value that one rank alone has."""
        if self.is_alone or not values:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def max(self, value: float) -> float:
        """The largest that any rank says."""
        if self.is_alone:
            return value
        largest = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest.item())

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return self.max(float(flag)) > 0.0

    def from_first(self, value: T) -> T:
        """What the first rank says; the others' ``value`` does not count."""
        if self.is_alone:
            return value
        values: list[T] = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def add_up(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place; all of them have the same bits then."""
        if not self.is_alone:
            dist.all_reduce(tensor)

    def wait(self) -> None:
        """Until all ranks have come here."""
        self.max(0.0)
