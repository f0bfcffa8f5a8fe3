"""Measures the share of the work that the default early exit leaves, by replay on random parts of the recorded sweep.

It prints the numbers for ``MEASURED_EXIT_SHARES`` in ``src/alto/spec/simulation.py``::

    python -m tools.measure_exit_shares
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from alto.early_exit import Recording, policy_from, replay
from alto.spec import EarlyExit

RECORDING = Path(__file__).parents[1] / "benchmarks" / "recordings" / "gsm8k-alto-tiny.json.gz"
NUM_PARTS = 20
MIN_JOBS = 10


def exit_shares(recording: Recording) -> list[float]:
    """Return the shares of the budgeted samples that are trained, for parts of 10 jobs up to all jobs, smallest part
    first."""
    draw, settings = random.Random(0), EarlyExit()
    num_jobs = len(recording.jobs)
    sizes = [MIN_JOBS + index * (num_jobs - MIN_JOBS) // (NUM_PARTS - 1) for index in range(NUM_PARTS)]
    parts = [replace(recording, jobs=tuple(draw.sample(recording.jobs, size))) for size in sizes]
    return sorted(round(1 - replay(part, policy_from(settings), settings.ema_alpha).samples_saved, 3) for part in parts)


if __name__ == "__main__":
    print(exit_shares(Recording.read(RECORDING)))
