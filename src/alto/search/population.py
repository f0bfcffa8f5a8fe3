"""Population-based training (arXiv:1711.09846): the worst jobs continue as copies of better jobs, with changed
settings."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

EXPLORED: Mapping[str, tuple[float, float]] = {
    "learning_rate": (0.0, 1.0),
    "weight_decay": (0.0, 1.0),
    "lora_dropout": (0.0, 0.9),
}
"""Settings that a copy changes, with the bounds of their values. All other settings belong to the copied state, or
would make jobs of unequal lengths."""

_FACTORS = (0.8, 1.25)
_FIRST = {"weight_decay": 0.01, "lora_dropout": 0.05}
"""Values that a setting of 0 may change to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A job that continues the training of another job.

    Attributes:
        replaces: The ended job that the fork replaces.
        origin: The job whose weights and optimizer state the fork begins with.
        changes: The fork's settings that differ from those of ``origin``.
    """

    replaces: str
    origin: str
    changes: Mapping[str, float]


def population_rungs(interval: float) -> tuple[float, ...]:
    """Return the shares of a job's steps at which a population is ranked and its worst jobs are replaced. There is none
    in the last tenth of the steps, so that the final settings are trained for a while."""
    count = math.floor(0.9 / interval + 1e-9)
    return tuple(round(number * interval, 9) for number in range(1, count + 1))


def forks_of(
    kept: Sequence[str],
    dropped: Sequence[str],
    configs: Mapping[str, Mapping[str, Any]],
    bounds: Mapping[str, tuple[float, float]],
    *,
    exchanged: float,
    seed: int,
    rung: int,
) -> list[Fork]:
    """Return a fork for each of ``dropped``: a copy of a job drawn from the best, with its learning rate, weight decay
    and dropout each raised or lowered by a factor.

    Args:
        kept: Jobs that train on, best first.
        bounds: Smallest and largest value of the settings that the search space limits.
        exchanged: Share of the population that counts as the best, from which the origins are drawn.
        rung: Number of the rung; it decides all draws together with ``seed``.
    """
    if not kept:
        return []
    best = list(kept)[: max(1, math.ceil(exchanged * (len(kept) + len(dropped))))]
    forks = []
    for replaced in dropped:
        source = random.Random(f"{seed}/population/{rung}/{replaced}")
        origin = source.choice(best)
        changes = {}
        for key, (least, most) in EXPLORED.items():
            value = configs[origin][key]
            factor = source.choice(_FACTORS)
            least, most = bounds.get(key, (least, most))
            changed = value * factor if value else (_FIRST.get(key, 0.0) if factor > 1 else 0.0)
            changes[key] = min(max(changed, least), most)
        forks.append(Fork(replaces=replaced, origin=origin, changes=changes))
    return forks
