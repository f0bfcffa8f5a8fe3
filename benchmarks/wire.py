"""How many bytes a process gets from others: every collective that it enters is seen, whoever calls it.

Counted is what one rank receives where a ring carries it out, the least that any algorithm needs for a gather: of ``n``
ranks an all-gather brings ``(n - 1)/n`` of its output, a reduce-scatter as much of its input, an all-reduce twice as
much of its tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Traffic", "counting"]

# For each collective: which arguments are as large as all that it moves, and how often each byte arrives.
_OPERATIONS: dict[str, tuple[slice, float]] = {
    "_allgather_base_": (slice(0, 1), 1.0),
    "allgather_": (slice(0, 1), 1.0),
    "allgather_into_tensor_coalesced_": (slice(0, 1), 1.0),
    "_reduce_scatter_base_": (slice(1, 2), 1.0),
    "reduce_scatter_": (slice(1, 2), 1.0),
    "reduce_scatter_tensor_coalesced_": (slice(1, 2), 1.0),
    "allreduce_": (slice(0, 1), 2.0),
    "allreduce_coalesced_": (slice(0, 1), 2.0),
    "alltoall_": (slice(0, 1), 1.0),
    "alltoall_base_": (slice(0, 1), 1.0),
    "gather_": (slice(0, 1), 1.0),
}
_WHOLE = ("broadcast_", "scatter_", "reduce_", "recv_", "recv_any_source_")
_NOTHING = ("send", "barrier", "monitored_barrier_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What has been counted.

    Attributes:
        by_op: Bytes received, by the name of the collective.
        calls: How often each was entered.
    """

    by_op: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return sum(self.by_op.values())


@contextmanager
def counting() -> Iterator[Traffic]:
    """Count what this thread's collectives bring meanwhile; on CPUs a backward pass runs in the same thread."""
    counter = _Counter()
    with counter:
        yield counter.traffic


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            self.traffic.calls[name] += 1
            self.traffic.by_op[name] += _received(name, args)
        return func(*args, **(kwargs or {}))


def _received(name: str, args: tuple[Any, ...]) -> int:
    if name in _NOTHING:
        return 0
    if name in _WHOLE:
        return _nbytes(args[0])
    whole, times = _OPERATIONS[name]
    group = next(dist.ProcessGroup.unbox(value) for value in args if isinstance(value, torch.ScriptObject))
    return round(_nbytes(args[whole]) * times * (group.size() - 1) / group.size())


def _nbytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
