"""The correctness gate: every way is compared with PEFT in one process, from the same adapters on the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from transformers import PreTrainedModel

from benchmarks.adapter_parallel.one_by_one import Way
from benchmarks.kernels.gate import distances, random_adapters
from benchmarks.kernels.variants import JobFacts, Sequential
from benchmarks.kernels.workload import Workload

__all__ = ["TOLERANCE", "gate_failures", "wrong"]

TOLERANCE = 1e-4
"""Largest relative error, in float32, of a loss, and, in norm, of the gradients of a job's ``A`` or ``B`` over the
modules of a rank."""


def gate_failures(
    ways: Mapping[str, Way], base: PreTrainedModel, workload: Workload, batch_sizes: Sequence[int]
) -> list[str]:
    """Return the faults of the ways in their first step, one sentence each; the list is the same on every rank."""
    adapters = random_adapters(base, workload.ranks)
    alone = Sequential(base, workload)
    failures = []
    for batch_size in batch_sizes:
        expected = alone.facts(batch_size, adapters)
        for name, way in ways.items():
            found = way.facts(batch_size, adapters)
            of_ranks: list[tuple[list[str], set[tuple[int, str]]]] = [([], set())] * dist.get_world_size()
            mine = {(job, module) for job, facts in found.items() for module in facts.gradients}
            dist.all_gather_object(of_ranks, (wrong(found, expected), mine))
            differences = list(
                dict.fromkeys(failure for failures_of_rank, _ in of_ranks for failure in failures_of_rank)
            )
            missing = {(job, module) for job in range(len(expected)) for module in expected[job].gradients}
            missing -= set().union(*(known for _, known in of_ranks))
            differences += [f"job {job}: no gradient of {module}" for job, module in sorted(missing)]
            failures += [f"{name}, batch size {batch_size}, {failure}" for failure in differences]
    return failures


def wrong(found: Mapping[int, JobFacts], expected: Sequence[JobFacts]) -> list[str]:
    """Return the differences between the results of one rank and those of PEFT alone, one sentence each."""
    return [
        f"job {job}: {what} {distance:.1e} from PEFT alone, tolerance {TOLERANCE:.0e}"
        for job, facts in found.items()
        for what, distance in distances(facts, expected[job]).items()
        if not distance <= TOLERANCE
    ]
