"""Stopwatches: variants in turn, launches, memory, and what the device can do at best."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from common import Spread, spread
from torch.autograd import DeviceType

__all__ = ["DeviceLimits", "Turns", "count_launches", "device_limits", "peak_bytes", "take_turns", "time_op"]

_WARMUPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Durations of several actions that took turns.

    Attributes:
        seconds: By name, round by round; every list has the same length.
        out_of_memory: Names of those that did not fit.
    """

    seconds: Mapping[str, list[float]]
    out_of_memory: tuple[str, ...]

    def ratio(self, name: str, over: str) -> Spread:
        """``name``'s duration over that of ``over``, round by round: a slow minute hits both sides of it."""
        return spread(one / other for one, other in zip(self.seconds[name], self.seconds[over], strict=True))


def take_turns(actions: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> Turns:
    """Time every action ``repeats`` times, A B A B, after two untimed rounds; seconds with the device's work done."""
    seconds: dict[str, list[float]] = {}
    out_of_memory = []
    for name, action in actions.items():
        try:
            for _ in range(_WARMUPS):
                action()
            seconds[name] = []
        except torch.OutOfMemoryError:
            out_of_memory.append(name)
        _free(device)
    for _ in range(repeats):
        for name, durations in seconds.items():
            _synchronize(device)
            start = time.perf_counter()
            actions[name]()
            _synchronize(device)
            durations.append(time.perf_counter() - start)
    return Turns(seconds=seconds, out_of_memory=tuple(out_of_memory))


def count_launches(action: Callable[[], object]) -> int:
    """GPU kernels that ``action`` launches; copies and fills of memory are not counted."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        action()
        torch.cuda.synchronize()
    return sum(
        event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
        for event in profile.events()
    )


def peak_bytes(action: Callable[[], object], device: torch.device) -> int:
    """GPU memory that ``action`` needs at its peak, beyond what was there before it."""
    _free(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    action()
    return torch.cuda.max_memory_allocated(device) - before


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """What the device reaches at best, as measured: bytes per second in a large copy, FLOP/s in a large GEMM."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, num_bytes: float, num_flops: float) -> float:
        """No faster than this."""
        return max(num_bytes / self.bytes_per_s, num_flops / self.flops_per_s)


def device_limits(device: torch.device, dtype: torch.dtype) -> DeviceLimits:
    """Measure them; on a GPU on a copy of 1 GiB and a GEMM of side 8,192, on a CPU on 64 MiB and side 1,024."""
    on_gpu = device.type == "cuda"
    source = torch.zeros(2**30 if on_gpu else 2**26, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    side = 8192 if on_gpu else 1024
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    copy_s = time_op(lambda: target.copy_(source), device).minimum
    gemm_s = time_op(lambda: left @ right, device).minimum
    return DeviceLimits(bytes_per_s=2 * source.numel() / copy_s, flops_per_s=2 * side**3 / gemm_s)


def time_op(action: Callable[[], object], device: torch.device) -> Spread:
    """Seconds of one short op: on a GPU by events, with its caches flushed before every call."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return spread(milliseconds / 1e3 for milliseconds in do_bench(action, return_mode="all"))
    return spread(take_turns({"op": action}, 5, device).seconds["op"])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
