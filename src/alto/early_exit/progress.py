"""From fractions of a job's steps to steps: where it is evaluated, where it is ranked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from alto.errors import SpecError
from alto.records import Rung

__all__ = ["ceil_share", "evaluation_steps", "rung_notes", "rung_step"]

# A product this close to a whole number, relative to it, is that number: 0.07 * 100 is 7.000000000000001 in float64.
ROUNDING = 1e-9


def ceil_share(share: float, total: int) -> int:
    """``ceil(share * total)`` of the numbers as they were written, undisturbed by float rounding of the product."""
    product = share * total
    nearest = round(product)
    return nearest if abs(product - nearest) <= ROUNDING * max(1, nearest) else math.ceil(product)


def rung_step(rung: Rung, total_steps: int) -> int:
    """The step (1-based count of steps done) at which a job of ``total_steps`` steps reaches ``rung``."""
    return max(1, ceil_share(rung.progress, total_steps))


def rung_notes(rungs: Sequence[Rung], total_steps: Iterable[int]) -> tuple[str, ...]:
    """What a user should know where jobs have too few steps for their rungs, in sentences."""
    steps = list(total_steps)
    if not rungs or not steps:
        return ()
    reached = [tuple(rung_step(rung, total) for rung in rungs) for total in steps]
    hasty = sum(at[0] == 1 or len(set(at)) < len(at) for at in reached)
    if not hasty:
        return ()
    return (
        f"{hasty} of {len(steps)} jobs have so few steps (the shortest {min(steps)}) that rungs fall on their first "
        "step or on one another: they are ranked by next to nothing; move the rungs, for example "
        "early_exit: {rungs: [[0.25, 0.5]]}, or train longer.",
    )


def evaluation_steps(total_steps: int, every: float, rungs: Iterable[Rung]) -> tuple[int, ...]:
    """The steps (1-based counts of steps done) after which a job is evaluated, rising and unique.

    They are the fractions ``every``, ``2 * every``, … of the job's own steps, rounded up, the step of every rung, and
    the last step. So jobs of different lengths are compared at equal progress, and a rung always has a fresh value.

    Raises:
        SpecError: ``every`` is not in (0, 1].
    """
    if not 0.0 < every <= 1.0:
        raise SpecError(
            f"evaluate every: expected a fraction of a job's steps in (0, 1], found {every}."
            " 0.05 evaluates a job twenty times."
        )
    if every * total_steps <= 1.0:
        return tuple(range(1, total_steps + 1))
    regular = (ceil_share(count * every, total_steps) for count in range(1, math.ceil(1.0 / every) + 1))
    steps = {min(step, total_steps) for step in regular}
    steps.update(rung_step(rung, total_steps) for rung in rungs)
    steps.add(total_steps)
    return tuple(sorted(steps))
