"""Measures the time of Python for the launches of a training step's kernels, on a machine without a GPU.

    python -m benchmarks.paper launches --scale cpu

The adapters are those of one layer of a 1B Llama (``q k v``, ``o``, ``gate up``, ``down``), 32 of them with ranks from
16 to 64, forward and backward. Kernels are compiled for sm_90, and a launch ends where Triton's launcher, C code, would
begin. ``alto`` is the backend as it trains. ``triton`` makes every launch through ``kernel[grid](…)``. Both take turns.
The gate: both launch the same kernels with the same grids and arguments.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

# This is read when the kernels are imported; an interpreted kernel cannot be compiled.
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch import Tensor

from alto.kernels import LoraOperands, TokenSchedule, triton_backend
from alto.kernels.triton_config import KernelConfig
from benchmarks.common import option_parser, publish_figures
from benchmarks.kernels.stub_driver import StubDriver

GOALS = {"us_per_launch": ("<=", 25.0)}
GROUPS = {
    "qkv": (2048, (2048, 512, 512)),
    "o": (2048, (2048,)),
    "gate_up": (2048, (8192, 8192)),
    "down": (8192, (2048,)),
}
"""In-features and out-features of the modules of a layer that share an input."""
NUM_LAYERS = 16
RANKS = (16, 32, 64)
MAX_RANK = max(RANKS)
TOKENS = 16
"""Tokens of an adapter. No kernel runs, so they are few, and the host's own tensors are small."""
SIZES = {"smoke": (2, 1, 2), "cpu": (32, 9, 50)}
"""Numbers of adapters, of turns of both ways, and of passes in a turn."""

Group = Callable[[], None]


def main(arguments: Sequence[str] | None = None) -> int:
    options = option_parser(__doc__, SIZES).parse_args(arguments)
    torch.set_num_threads(1)
    driver = StubDriver()
    triton.runtime.driver.set_active(driver)
    num_slots, turns, passes = SIZES[options.scale]
    groups = {name: group_pass(number, *GROUPS[name], num_slots) for number, name in enumerate(GROUPS)}
    ways = {"alto": triton_backend.launch, "triton": launch_by_triton}
    failures = gate(groups, ways, driver)
    rows: list[dict[str, Any]] = []
    for turn in range(turns):
        for way in sorted(ways, reverse=bool(turn % 2)):
            triton_backend.launch = ways[way]
            for name, group in groups.items():
                rows.append({"way": way, "group": name} | timed(group, passes, driver))
    triton_backend.launch = ways["alto"]
    return publish_figures(
        options, "launches", gate_failures=failures, figures=lambda: figures(rows), goals=GOALS, rows=rows
    )


def group_pass(number: int, in_features: int, out_features: tuple[int, ...], num_slots: int) -> Group:
    """Return a function that runs one group's ops, forward and backward."""
    num_members = len(out_features)
    # Adapters are neither read nor written, so all of them may use the same memory.
    params_ZP = torch.zeros(1, (in_features * num_members + sum(out_features)) * MAX_RANK).expand(num_slots, -1)
    operands = LoraOperands(
        number=number,
        in_features=in_features,
        out_features=out_features,
        params_ZP=params_ZP,
        grads_ZP=params_ZP,
        max_rank=MAX_RANK,
    )
    for slot in range(num_slots):
        rank = RANKS[slot % len(RANKS)]
        starts = [(in_features * num_members + sum(out_features[:member])) * rank for member in range(num_members)]
        operands.assign(slot, [rank] * num_members, 0, starts)
    schedule = TokenSchedule.build(list(range(num_slots)), [TOKENS] * num_slots, [2.0] * num_slots)
    num_tokens = num_slots * TOKENS
    x_TK = torch.zeros(num_tokens, in_features, dtype=torch.bfloat16)
    ys = [torch.zeros(num_tokens, width, dtype=torch.bfloat16) for width in out_features]

    def run() -> None:
        s_TQ = triton_backend.grouped_shrink(x_TK, operands, schedule)
        triton_backend.grouped_expand(s_TQ, operands, ys, schedule)
        triton_backend.grouped_backward(x_TK, s_TQ, ys, operands, x_TK, schedule)

    return run


def launch_by_triton(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    config: KernelConfig,
    **constants: Any,
) -> None:
    """Launch like :func:`alto.kernels.triton_config.launch`, but let Triton do all its work every time."""
    kernel[grid](*tensors, *sizes, **constants, **config.arguments)


def timed(group: Group, passes: int, driver: StubDriver) -> dict[str, float]:
    """Return the launches of a pass, and the median microseconds of one launch over ``passes`` passes."""
    before, seconds = driver.num_launches, []
    for _ in range(passes):
        began = time.perf_counter()
        group()
        seconds.append(time.perf_counter() - began)
    launches = (driver.num_launches - before) // passes
    return {"launches": launches, "us_per_launch": statistics.median(seconds) / launches * 1e6}


def gate(groups: dict[str, Group], ways: dict[str, Any], driver: StubDriver) -> list[str]:
    """Return the differences between the launches of ``alto`` and ``triton``; afterwards everything is compiled."""
    failures = []
    for name, group in groups.items():
        seen = {}
        for way in ("alto", "alto", "triton"):  # the first time, ``alto`` asks Triton as well
            triton_backend.launch = ways[way]
            driver.seen = []
            group()
            seen[way] = driver.seen
        # The narrow tensors are new in every pass, so their addresses differ.
        alto, by_triton = ([_without_addresses(launch) for launch in seen[way]] for way in ("alto", "triton"))
        if not alto or alto != by_triton:
            failures.append(f"{name}: launches {alto}, and by Triton's own way {by_triton}")
    driver.seen = None
    return failures


def _without_addresses(launch: tuple[Any, ...]) -> tuple[Any, ...]:
    name, grid, *arguments = launch
    return name, grid, *(a if not isinstance(a, int) or a < 1 << 32 else "address" for a in arguments)


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return medians over turns; the time of a launch is weighted by the number of launches of each group."""
    found: dict[str, float] = {}
    launches = {row["group"]: row["launches"] for row in rows}
    for way in ("alto", "triton"):
        micros = {
            name: statistics.median(r["us_per_launch"] for r in rows if (r["way"], r["group"]) == (way, name))
            for name in launches
        }
        total = sum(launches[name] * micros[name] for name in launches)
        prefix = "" if way == "alto" else "triton_"
        found[f"{prefix}us_per_launch"] = total / sum(launches.values())
        found[f"{prefix}host_ms_per_step_1b"] = NUM_LAYERS * total / 1e3
    found["launches_per_step_1b"] = NUM_LAYERS * sum(launches.values())
    return found
