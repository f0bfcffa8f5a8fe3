"""Computes how many programs of a kernel a multiprocessor holds at a time, from NVIDIA's table of compute
capabilities."""

from __future__ import annotations

import math

__all__ = ["resident_programs"]

_REGISTERS, _WARPS = 65536, 64
_SHARED = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
"""Bytes of shared memory of a multiprocessor, by architecture."""
_REGISTER_UNIT = 256
"""Granularity in which registers are allocated to a warp."""
_RESERVED = 1024
"""Bytes of shared memory that each program uses in addition to its own."""


def resident_programs(*, registers: int, shared: int, num_warps: int, arch: int) -> int:
    """Return the number of programs of ``num_warps`` warps that are resident at once.

    Args:
        registers: Registers per thread.
        shared: Bytes of shared memory per program.
        num_warps: Warps per program.
        arch: 80, 90 or 100.
    """
    of_warp = math.ceil(registers * 32 / _REGISTER_UNIT) * _REGISTER_UNIT
    return min(_REGISTERS // (of_warp * num_warps), _SHARED[arch] // (shared + _RESERVED), _WARPS // num_warps)
