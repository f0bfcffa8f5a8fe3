"""Measures how much memory tensors use at once on the CPU, from the operations on them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["peak_bytes"]


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the largest total size of all tensors that ``work`` reads or makes, whether they existed before or not."""
    watcher = _Watcher()
    with watcher:
        work()
    return watcher.peak


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Checks after every operation the sizes of known storages that still live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._met: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor):
                storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
                if storage.device.type == "cpu":
                    self._met[id(storage)] = weakref.ref(storage)
        live = [(key, reference()) for key, reference in self._met.items()]
        self._met = {key: self._met[key] for key, storage in live if storage is not None}
        self.peak = max(self.peak, sum(storage.nbytes() for _, storage in live if storage is not None))
        return result
