"""Rungs: the step at which a job reaches a rung, how many jobs continue from it, and presets of rungs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from alto.records import Rung

__all__ = [
    "EARLIEST_IN_WARMUP",
    "LEAST_RANKED_STEPS",
    "PRESETS",
    "Preset",
    "PresetName",
    "ceil_share",
    "no_earlier",
    "places_at",
    "rung_step",
    "without_floor",
]

# A product this close to a whole number, relative to it, counts as that number: 0.07 * 100 is 7.000000000000001 in
# float64.
ROUNDING = 1e-9


def ceil_share(share: float, total: int) -> int:
    """Return ``ceil(share * total)``, unaffected by float rounding of the product."""
    product = share * total
    nearest = round(product)
    return nearest if abs(product - nearest) <= ROUNDING * max(1, nearest) else math.ceil(product)


def rung_step(rung: Rung, total_steps: int) -> int:
    """Return the number of steps, at least 1, after which a job of ``total_steps`` steps reaches ``rung``."""
    return max(1, ceil_share(rung.progress, total_steps))


def places_at(rungs: Sequence[Rung], index: int, num_jobs: int) -> int:
    """Return how many of ``num_jobs`` jobs continue from rung number ``index`` (from 0).

    The shares of all rungs up to it are multiplied, and only their product is rounded:
    ``max(ceil(keep_0 * … * keep_index * num_jobs), min(min_kept, num_jobs))``, and at most ``max_kept``.
    """
    rung = rungs[index]
    share = math.prod(earlier.keep for earlier in rungs[: index + 1])
    places = max(ceil_share(share, num_jobs), min(rung.min_kept, num_jobs))
    return places if rung.max_kept is None else min(places, rung.max_kept)


EARLIEST_IN_WARMUP = 0.25
"""Share of a learning-rate warmup after which jobs may be compared. On recorded sweeps of supervised fine-tuning with
warmups of 3 to 10 %, comparing that early loses nothing (``benchmarks/policies``)."""

LEAST_RANKED_STEPS = 3
"""Jobs with fewer steps are not ranked, because they are almost done after the first step."""

PresetName: TypeAlias = Literal["default", "cautious", "greedy", "preferences"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A successive halving of the jobs of a task.

    Attributes:
        rungs: ``(progress, keep)`` pairs.
        min_kept: Smallest number of jobs that continue from each rung, in the order of the rungs.
        finish_from: Share of its steps from which only the best job continues; None for no such point.
        clear_from: Share of its steps from which rungs also end jobs clearly behind the best; None for no such point.
    """

    rungs: tuple[tuple[float, float], ...]
    min_kept: tuple[int, ...]
    finish_from: float | None
    clear_from: float | None = None


def _preset(
    first: float, then: float, min_kept: Mapping[float, int], finish: float | None, clear: float | None = None
) -> Preset:
    """Return a preset with rungs at the keys of ``min_kept``; the first keeps ``first``, the others keep ``then``."""
    keeps = (first, *[then] * (len(min_kept) - 1))
    rungs = tuple(zip(min_kept, keeps, strict=True))
    return Preset(rungs=rungs, min_kept=tuple(min_kept.values()), finish_from=finish, clear_from=clear)


PRESETS: Mapping[PresetName, Preset] = {
    "default": _preset(1 / 6, 1 / 2, {0.01: 8, 0.025: 8, 0.05: 5, 0.1: 3, 0.25: 2}, finish=0.6, clear=0.25),
    "cautious": _preset(1 / 3, 2 / 3, {0.025: 8, 0.05: 6, 0.1: 5, 0.2: 4, 0.4: 3, 0.8: 2}, finish=None),
    "greedy": _preset(1 / 8, 1 / 2, {0.005: 8, 0.025: 8, 0.05: 5, 0.1: 3}, finish=0.3),
    "preferences": Preset(rungs=((0.1, 1 / 2), (0.2, 0.3), (0.3, 1 / 2)), min_kept=(16, 6, 4), finish_from=0.6),
}
"""The presets of ``policy: alto`` by name; found by replay on recorded sweeps."""


def without_floor(rungs: tuple[tuple[float, float], ...]) -> Preset:
    """Return the selection at ``rungs`` without a higher minimum than one job, and without a finish."""
    return Preset(rungs=rungs, min_kept=(1,) * len(rungs), finish_from=None)


def no_earlier(halving: Preset, earliest: float) -> Preset:
    """Return the same selection with no rung before the share ``earliest``; rungs up to it merge into one at it."""
    early = [index for index, (progress, _) in enumerate(halving.rungs) if progress <= earliest]
    if not early:
        return halving
    keep = math.prod(halving.rungs[index][1] for index in early)
    return Preset(
        rungs=((earliest, keep), *halving.rungs[len(early) :]),
        min_kept=halving.min_kept[early[-1] :],
        finish_from=halving.finish_from,
        clear_from=halving.clear_from,
    )
