"""How much memory this process has taken at most, and how much there is."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from pathlib import Path

import torch

from alto.errors import UnsupportedError

__all__ = ["capacity_bytes", "peak_bytes", "reset_peak"]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def capacity_bytes(device: torch.device, num_ranks: int = 1) -> int:
    """Memory of ``device``; of a CPU what the machine has, or a container or ``ulimit -v`` leaves of it, and of that
    the share of one of so many ranks, which have a GPU each but one CPU.

    Raises:
        UnsupportedError: The operating system does not say.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        raise UnsupportedError(
            f"profile: expected an operating system that tells how much memory there is, found {sys.platform}; set "
            "max_slots and max_tokens_per_pass, and nothing has to be profiled"
        )
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_ranks]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space)
    for file in map(Path, _CGROUP_LIMITS):
        text = file.read_text().strip() if file.is_file() else "max"
        if text.isdecimal():
            limits.append(int(text) // num_ranks)
    return min(limits)


def reset_peak(device: torch.device) -> None:
    """Begin a new peak, where the operating system can; where not, it goes up only, so small steps come first."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):
        # What the C library keeps of memory that was freed is in no way taken by what comes next.
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5")


def peak_bytes(device: torch.device) -> int:
    """On CUDA what the allocator has held at most since :func:`reset_peak`; else the largest size of this process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_reserved(device)
    if _STATUS.is_file():
        # Not getrusage: there a process that was started by a larger one begins with the peak of that one.
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return 1024 * int(fields["VmHWM"].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
