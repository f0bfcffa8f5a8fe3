"""Counts how often work on a device makes the host wait for it, on a machine that has only a CPU.

On a CPU nothing waits, so the counting depends on the kind of tensors. A tensor is *on the device* if it was sent there
(``.to(device, non_blocking=True)``, as the batch and every table are), if it was named at the start (parameters of the
model, the bank), or if it was computed from such a tensor. The host of a GPU would wait when a number of such a tensor
is read, or for a result whose shape depends on its numbers. It would also wait when numbers are sent there in another
way, because they are in memory that the device cannot read by itself.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_WAITING_OPS = {
    _aten._local_scalar_dense,  # item(), bool(), int(), float(), indexing by a tensor
    _aten.is_nonzero,
    _aten.equal,
    _aten.nonzero,
    _aten.masked_select,
    _aten._unique2,
    _aten.unique_dim,
    _aten.unique_consecutive,
    _aten.allclose,
}
_WAITING_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}
"""Methods that make the host wait, and that no op on a CPU shows."""
_INDEXING = {Tensor.__getitem__, Tensor.__setitem__}


class CountsWaiting(TorchFunctionMode):
    """A context in which every wait is recorded.

    Args:
        on_device: Tensors that are on the device from the start.

    Attributes:
        waits: The operation and the place in the source of every wait.
    """

    def __init__(self, on_device: Iterable[Tensor]) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._storages = {_storage(tensor) for tensor in on_device}
        self._ops = _Ops(self)

    def __enter__(self) -> CountsWaiting:
        super().__enter__()
        self._ops.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._ops.__exit__(*error)
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_there = bool(args) and self.lies_on_device(args[0])
        if func in _WAITING_METHODS and is_there:
            self.note(func.__name__)
        elif func in _INDEXING and is_there and any(isinstance(index, list) for index in _as_tuple(args[1])):
            self.note("index by a list")
        elif func is torch.tensor and kwargs.get("device") is not None:
            self.note("tensor(device=)")
        result = func(*args, **kwargs)
        if func is Tensor.to:
            result = self._sent(result, args, kwargs, is_there)
        return result

    def _sent(self, result: Tensor, args: Any, kwargs: Any, is_there: bool) -> Tensor:
        named = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, str | torch.device)]
        if not named:
            return result  # another dtype, on the same device
        if is_there:
            # The word decides; a device that is passed on is the tensor's own.
            if "cpu" in named:
                self.note("to(cpu)")
            return result
        if not kwargs.get("non_blocking"):
            self.note("to(device) from memory that is not pinned")
        result = result.clone() if result is args[0] else result
        self.put_on_device(result)
        return result

    def lies_on_device(self, *values: Any) -> bool:
        return any(isinstance(leaf, Tensor) and _storage(leaf) in self._storages for leaf in tree_leaves(values))

    def put_on_device(self, *values: Any) -> None:
        self._storages.update(_storage(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor))

    def note(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
        lines = [f"{frame.filename}:{frame.lineno} {frame.line}" for frame in frames if frame.filename != __file__]
        self.waits.append(f"{what} at {' < '.join(lines[:-4:-1])}")


class _Ops(TorchDispatchMode):
    def __init__(self, counter: CountsWaiting) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, counter = kwargs or {}, self._counter
        is_there = counter.lies_on_device(args, kwargs)
        if is_there and (func.overloadpacket in _WAITING_OPS or _has_a_shape_by_number(func, args)):
            counter.note(str(func))
        result = func(*args, **kwargs)
        if is_there:
            written = [kwargs[argument.name] for argument in func._schema.arguments if _is_out(argument, kwargs)]
            counter.put_on_device(result, written, args[0] if func._schema.is_mutable and args else None)
        return result


def _storage(tensor: Tensor) -> StorageWeakRef:
    # Weak, so that counting keeps nothing alive; the address of a dead storage is not reused.
    return StorageWeakRef(tensor.untyped_storage())


def _is_out(argument: Any, kwargs: dict[str, Any]) -> bool:
    return bool(argument.is_out) and argument.name in kwargs


def _has_a_shape_by_number(func: Any, args: Any) -> bool:
    """Return whether the number of elements of the result depends on numbers in the arguments."""
    if func.overloadpacket in (_aten.index, _aten.index_put, _aten.index_put_):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return func is _aten.repeat_interleave.Tensor


def _as_tuple(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)
