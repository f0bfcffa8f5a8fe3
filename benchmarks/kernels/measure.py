"""Measures durations of variants in turn, launches, memory, and the limits of the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType

from benchmarks.common import Spread, spread
from benchmarks.pieces import describe_error

__all__ = [
    "DeviceLimits",
    "Timed",
    "Turns",
    "count_launches",
    "device_limits",
    "difference_per_call",
    "large_gemm",
    "peak_bytes",
    "take_turns",
    "time_op",
]

_WARMUPS = 2
_ROUNDS = 20
_CALLS = 10
"""Calls in one graph, which share the overhead of a replay."""
_FLUSHED_BYTES = 2**28
"""Bytes to flush: more than the largest cache of a GPU holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Durations of several actions that took turns.

    Attributes:
        seconds: Seconds by name, round by round; all lists have the same length.
        failed: Reason, by name, why an action has no durations.
    """

    seconds: Mapping[str, list[float]]
    failed: Mapping[str, str]

    def ratio(self, name: str, over: str) -> Spread:
        """Return ``name``'s duration divided by that of ``over``, round by round, so that a slow minute affects
        both."""
        return spread(one / other for one, other in zip(self.seconds[name], self.seconds[over], strict=True))


def take_turns(actions: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> Turns:
    """Time every action ``repeats`` times, A B A B, after two untimed rounds; return seconds, including the device's
    work.

    An action that raises gets no more turns, and the others continue.
    """
    seconds: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for name, action in actions.items():
        try:
            for _ in range(_WARMUPS):
                action()
            _synchronize(device)
            seconds[name] = []
        except Exception as error:
            failed[name] = describe_error(error)
        _free(device)
    for _ in range(repeats):
        for name in tuple(seconds):
            try:
                _synchronize(device)
                start = time.perf_counter()
                actions[name]()
                _synchronize(device)
                seconds[name].append(time.perf_counter() - start)
            except Exception as error:
                failed[name] = describe_error(error)
                del seconds[name]
    return Turns(seconds=seconds, failed=failed)


def count_launches(action: Callable[[], object]) -> int:
    """Return the number of GPU kernels that ``action`` launches; copies and fills of memory are not counted."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        action()
        torch.cuda.synchronize()
    return sum(
        event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
        for event in profile.events()
    )


def peak_bytes(action: Callable[[], object], device: torch.device) -> int:
    """Return the peak of GPU memory that ``action`` needs, beyond the memory in use before it."""
    _free(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    action()
    return torch.cuda.max_memory_allocated(device) - before


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """The measured limits of the device: bytes per second in a large copy, FLOP/s in a large GEMM."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, num_bytes: float, num_flops: float) -> float:
        """Return the shortest possible seconds."""
        return max(num_bytes / self.bytes_per_s, num_flops / self.flops_per_s)


def device_limits(device: torch.device, dtype: torch.dtype) -> DeviceLimits:
    """Measure the limits: on a GPU with a copy of 1 GiB and a GEMM of side 8,192, on a CPU with 64 MiB and side
    1,024."""
    on_gpu = device.type == "cuda"
    source = torch.zeros(2**30 if on_gpu else 2**26, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    multiply, flops = large_gemm(device, dtype)
    copy_s = time_op(lambda: target.copy_(source), device).seconds.minimum
    gemm_s = time_op(multiply, device).seconds.minimum
    return DeviceLimits(bytes_per_s=2 * source.numel() / copy_s, flops_per_s=flops / gemm_s)


def large_gemm(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], torch.Tensor], float]:
    """Return a GEMM that keeps the whole device busy, and its FLOPs: of side 8,192 on a GPU, 1,024 on a CPU."""
    side = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return lambda: left @ right, 2.0 * side**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Seconds of one short op, and how they were measured: ``"graph"``, ``"events"`` or ``"clock"``."""

    seconds: Spread
    by: str


def time_op(action: Callable[[], object], device: torch.device) -> Timed:
    """Time one short op; on a GPU, flush the caches before every call.

    On a GPU the op is captured in a CUDA graph and replayed: an op of microseconds takes less time than Python needs to
    launch it, so events around a launch would measure Python. If an op cannot be captured, it is timed by events; on a
    CPU, by the clock. The result says which.
    """
    if device.type != "cuda":
        return Timed(seconds=spread(_clock_seconds(action, device)), by="clock")
    try:
        return Timed(seconds=spread(_graph_seconds(action, device)), by="graph")
    except (RuntimeError, ValueError) as error:
        print(f"timed by events, because a graph of it cannot be replayed: {describe_error(error)}", flush=True)
        return Timed(seconds=spread(_event_seconds(action)), by="events")


def difference_per_call(seconds_with: Sequence[float], seconds_without: Sequence[float], num_calls: int) -> list[float]:
    """Return the seconds of a call, round by round, from rounds of ``num_calls`` calls between flushes and rounds of
    the flushes alone.

    Raises:
        ValueError: The flushes alone took as long: the op is too short to be measured with them.
    """
    found = [(one - other) / num_calls for one, other in zip(seconds_with, seconds_without, strict=True)]
    if min(found) <= 0:
        raise ValueError(f"expected rounds with the op to take longer than those without, found {min(found):.1e} s")
    return found


def _clock_seconds(action: Callable[[], object], device: torch.device) -> list[float]:
    turns = take_turns({"op": action}, 5, device)
    if turns.failed:
        raise RuntimeError(turns.failed["op"])
    return turns.seconds["op"]


def _event_seconds(action: Callable[[], object]) -> list[float]:
    from triton.testing import do_bench

    return [milliseconds / 1e3 for milliseconds in do_bench(action, return_mode="all")]


def _graph_seconds(action: Callable[[], object], device: torch.device) -> list[float]:
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device)
    # Compile kernels and upload tables on a stream that is not the default one; a capture must do neither.
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(_WARMUPS):
            action()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)

    def captured(*, with_op: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_CALLS):
                flushed.zero_()
                if with_op:
                    action()
        return graph

    graphs = [captured(with_op=True), captured(with_op=False)]
    rounds: list[list[float]] = [[], []]
    for number in range(_WARMUPS + _ROUNDS):
        for graph, durations in zip(graphs, rounds, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize(device)
            if number >= _WARMUPS:
                durations.append(start.elapsed_time(end) / 1e3)
    return difference_per_call(*rounds, _CALLS)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
