"""A driver of Triton for a machine without a GPU: kernels are compiled for one, and their launches do nothing.

A launch is then only the work of Python, up to the call of Triton's launcher, which is C code.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

__all__ = ["StubDriver"]

_OWN_ARGUMENTS = 9
"""Number of a launcher's arguments before those of the kernel: three for the grid, stream, function, metadata,
hooks."""


class StubDriver(DriverBase):
    """A driver that compiles for sm_90, and whose launches do nothing.

    Attributes:
        num_launches: Number of launches so far.
        seen: If this is a list, every launch adds its kernel, grid and arguments, with tensors by address.
    """

    def __init__(self) -> None:
        self.num_launches = 0
        self.seen: list[tuple[Any, ...]] | None = None
        self.utils = _Utils()

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Return the launcher of a compiled kernel."""

        def launcher(*arguments: Any) -> None:
            self.num_launches += 1
            if self.seen is not None:
                given = (a.data_ptr() if isinstance(a, Tensor) else a for a in arguments[_OWN_ARGUMENTS:])
                self.seen.append((metadata.name, arguments[:3], *given))

        return launcher

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


class _Utils:
    """The functions of a driver that a compiled kernel calls before its first launch."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024  # module, function, registers, spills, threads

    def unload_module(self, module: int) -> None:
        pass
