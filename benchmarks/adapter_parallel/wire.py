"""Counts bytes on the wire where PyTorch starts a collective, whichever code calls it: FSDP, DTensor, a pipeline or
ALTO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["WireCounter"]

_NAMESPACES = ("c10d", "_c10d_functional")


class WireCounter(TorchDispatchMode):
    """Counts the bytes that this rank sends inside the context.

    Every collective counts as its bandwidth-optimal algorithm: for ``S`` bytes over ``n`` ranks, a rank sends ``S (n -
    1) / n`` bytes in an all-gather or a reduce-scatter, and twice as many in an all-reduce.

    Attributes:
        sent_bytes: Bytes by kind of collective.
        calls: Number of calls of each kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self._share = (dist.get_world_size() - 1) / dist.get_world_size()
        self.sent_bytes: dict[str, float] = {}
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # the op is called again on the local tensors
        namespace, _, name = func._schema.name.partition("::")
        if namespace in _NAMESPACES and name not in _SILENT:
            kind, count = _COUNTS[name]
            self.calls[kind] += 1
            self.sent_bytes[kind] = self.sent_bytes.get(kind, 0.0) + count(args, self._share)
        return func(*args, **(kwargs or {}))


def _bytes(tensors: Any) -> int:
    """Return the bytes of one tensor, or of all tensors in a list."""
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_bytes, tensors))


_Count = Callable[[Any, float], float]
_COUNTS: Mapping[str, tuple[str, _Count]] = {
    # c10d: outputs come before inputs. Functional: the only tensor is the input, then the number of ranks.
    "_allgather_base_": ("gather", lambda args, share: share * _bytes(args[0])),
    "allgather_": ("gather", lambda args, share: share * _bytes(args[0])),
    "all_gather_into_tensor": ("gather", lambda args, share: share * _bytes(args[0]) * args[1]),
    "_reduce_scatter_base_": ("reduce_scatter", lambda args, share: share * _bytes(args[1])),
    "reduce_scatter_tensor": ("reduce_scatter", lambda args, share: share * _bytes(args[0])),
    "allreduce_": ("all_reduce", lambda args, share: 2 * share * _bytes(args[0])),
    "all_reduce": ("all_reduce", lambda args, share: 2 * share * _bytes(args[0])),
    "all_reduce_": ("all_reduce", lambda args, share: 2 * share * _bytes(args[0])),
    "broadcast_": ("broadcast", lambda args, share: share * _bytes(args[0])),
    "send": ("send", lambda args, share: float(_bytes(args[0]))),
}
"""Kinds by name of the op. An op that is not here is an error, so that all traffic is counted."""

_SILENT = frozenset({"recv_", "recv_any_source_", "barrier", "wait_tensor", "_wrap_tensor_autograd"})
