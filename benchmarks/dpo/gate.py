"""Checks that the three systems did the same work, so that their times may be compared."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.dpo.measured import Measured, Tuned

__all__ = ["TOLERANCE", "gate_failures"]

CURVE_STEPS = 3
"""Number of first steps of every job in which TRL and ALTO, from one adapter, must have the same loss. The first loss
is log 2 whatever is trained; later, rounding errors grow with the learning rate."""

CURVE_TOLERANCE = 1e-3
"""Tolerance of these losses in nats; relative if they are above one."""

TOLERANCE = 1e-4
"""The same tolerance for the loss of a finished adapter."""


def gate_failures(measured: Measured) -> list[str]:
    """Return the faults, one sentence each.

    Every job of ``batched`` must have done all its steps, on as many pairs as TRL's; its first losses must be TRL's;
    and the values that ALTO reports for its best adapters must be those that PEFT computes with the model's own forward
    pass.
    """
    failures = [*_unfinished(measured)]
    if not failures:
        failures += _curves(measured)
    for name, runs in (("batched", measured.batched), ("early exit", measured.early_exit)):
        for seed, tuned in runs.items():
            failures += _worth(f"best adapter of {name}, seed {seed}", tuned, measured.num_validation)
    return failures


def _unfinished(measured: Measured) -> list[str]:
    jobs = [(seed, job) for seed, tuned in measured.batched.items() for job in tuned.result.job_results]
    failures = [
        f"batched, seed {seed}: expected {job.total_steps} steps of {job.job}, found {job.steps} ({job.exit_reason})"
        for seed, job in jobs
        if job.steps != job.total_steps
    ]
    for seed, job in jobs:
        theirs = measured.sequential[job.job].samples if seed == measured.first_seed else job.samples_trained
        if theirs != job.samples_trained:
            failures.append(f"{job.job}: expected the {theirs} pairs that TRL trained, found {job.samples_trained}")
    return failures


def _curves(measured: Measured) -> list[str]:
    failures = []
    for job in measured.recording.jobs:
        theirs, ours = (
            losses[:CURVE_STEPS] for losses in (measured.sequential[job.job].train_losses, job.train_losses)
        )
        failures += _differences(f"ALTO, first steps of {job.job}", theirs, ours, CURVE_TOLERANCE)
    return failures


def _worth(name: str, tuned: Tuned, num_pairs: int) -> list[str]:
    failures = _differences(name, [tuned.validation.loss], [tuned.result.best_validation_loss], TOLERANCE)
    # A pair whose margin is only rounding may count as right or wrong.
    if abs(tuned.validation.accuracy - tuned.reported_accuracy) > 1.5 / num_pairs:
        failures.append(f"{name}: expected an accuracy of {tuned.validation.accuracy}, found {tuned.reported_accuracy}")
    return failures


def _differences(name: str, expected: Sequence[float], found: Sequence[float], tolerance: float) -> list[str]:
    limits = [tolerance * max(1.0, abs(one)) for one in expected]
    close = (abs(one - other) <= limit for one, other, limit in zip(expected, found, limits, strict=True))
    return [] if all(close) else [f"{name}: expected {list(expected)} within {tolerance}, found {list(found)}"]
