"""Measures the peak memory of this process and the memory of the device."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from alto.errors import UnsupportedError

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_TASKS = Path("/proc/self/task")
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def capacity_bytes(device: torch.device, num_ranks: int = 1) -> int:
    """Return the memory of ``device`` for one rank, in bytes.

    On a CPU this is the smallest of three limits: the memory of the machine and the container's limit, each divided by
    the number of ranks, and ``ulimit -v``. A process on one of several CPU slots has its share of that.

    Raises:
        UnsupportedError: The operating system does not report it.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        raise UnsupportedError(
            f"profile: expected an operating system that reports its memory, found {sys.platform}; set "
            "max_slots and max_tokens_per_pass, so that no profile is needed"
        )
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_ranks]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space)
    for file in map(Path, _CGROUP_LIMITS):
        text = file.read_text().strip() if file.is_file() else "max"
        if text.isdecimal():
            limits.append(int(text) // num_ranks)
    return int(min(limits) * memory_share())


def memory_share() -> float:
    """Return the share of the machine's memory that this process may plan with, in (0, 1]."""
    return float(os.environ.get("ALTO_MEMORY_SHARE", "1"))


def reset_peak(device: torch.device) -> None:
    """Reset the peak if the operating system can. If it cannot, the peak only grows, so small steps are measured
    first."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):
        # Otherwise freed memory that the C library keeps would count for the next step.
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Return the allocator's peak since :func:`reset_peak` on CUDA; otherwise the peak resident size of this
    process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_reserved(device)
    if _STATUS.is_file():
        # Do not use getrusage here: its peak starts with the peak of the parent process.
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return 1024 * int(fields["VmHWM"].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def spread_of(durations_s: Sequence[float]) -> float:
    """Return the median of ``durations_s`` relative to their 10th percentile, minus 1. All durations must be above 0.

    The value shows whether other programs use the machine, because these make some steps longer and none shorter.
    """
    fastest = sorted(durations_s)[len(durations_s) // 10]
    return statistics.median(durations_s) / fastest - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreTime:
    """The seconds that all threads of this process have run, and those in which they were ready but waited for a CPU
    core, because others used it. Both are 0 where Linux does not report them."""

    ran_s: float
    waited_s: float

    @classmethod
    def now(cls) -> Self:
        """Return both since the threads began."""
        ran_ns = waited_ns = 0
        for thread in _TASKS.glob("*/schedstat"):
            with contextlib.suppress(OSError):  # the thread has ended
                ran, waited, _ = map(int, thread.read_text().split())
                ran_ns, waited_ns = ran_ns + ran, waited_ns + waited
        return cls(ran_s=ran_ns / 1e9, waited_s=waited_ns / 1e9)

    def waited_since(self) -> float:
        """Return the time that threads have waited since then, relative to the time that they ran; 0 if none ran.

        Also 0 if torch has more threads than there are cores: then they wait for each other.
        """
        now = self.now()
        ran_s = now.ran_s - self.ran_s
        if ran_s <= 0.0 or torch.get_num_threads() > len(os.sched_getaffinity(0)):
            return 0.0
        return max(0.0, now.waited_s - self.waited_s) / ran_s
