"""Checks that the losses of all systems mean the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from peft import PeftModel

from benchmarks.baselines.bare_peft import bare_peft_one, evaluate
from benchmarks.baselines.job import BaselineJob, Prepared
from benchmarks.baselines.stacked import share
from benchmarks.baselines.trl_sequential import train_one
from benchmarks.end_to_end.systems import Outcome, Sweep

__all__ = ["adapter_loss", "baseline_failures", "outcome_failures", "tolerance_of"]

STEPS = 3
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
BEST_TOLERANCE = 1e-2
"""Tolerances. Training amplifies rounding differences of sums, more so for larger learning rates."""


def baseline_failures(sweep: Sweep) -> list[str]:
    """Return the faults of the baselines' losses; empty if TRL and the loop on PEFT agree.

    They are compared on the first steps of the job with the largest batch, from the same initial weights, without any
    tuning in between.
    """
    job = max(sweep.task.jobs, key=lambda job: job.config.per_device_train_batch_size)
    size = job.config.per_device_train_batch_size
    few = replace(sweep.prepared, train=sweep.prepared.train[: STEPS * size], validation=sweep.prepared.validation[:8])
    config = job.config.model_dump() | {"num_train_epochs": 1}
    steps = [-(-len(few.train) // size)]
    trl, bare = (train(few, config, eval_at_steps=steps) for train in (train_one, bare_peft_one))
    return _differences("the loop on PEFT", _losses(trl), _losses(bare), tolerance_of(sweep.prepared))


def outcome_failures(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return the faults of the outcomes; empty if all losses mean the same as TRL's and PEFT's.

    For systems that train all jobs to their end, the first step of every job is compared: adapters start at zero, so
    its loss is that of the base on the same rows in the same order. These systems must also have trained all rows. The
    resulting adapters, loaded by PEFT, must have the validation losses that the systems report. Systems that keep no
    adapter must find the lowest loss of ``batched``.
    """
    tolerance, failures = tolerance_of(sweep.prepared), list[str]()
    first = {job: found.train_losses[0] for job, found in outcomes["sequential"].jobs.items()}
    for system, outcome in outcomes.items():
        found = {job: each.train_losses[0] for job, each in outcome.jobs.items()}
        if outcome.recording is not None:
            found = {job.job: job.train_losses[0] for job in outcome.recording.jobs if job.train_losses}
        for job, loss in found.items():
            failures += _differences(f"{system}, first step of {job}", [first[job]], [loss], tolerance)
        if outcome.adapter is not None:
            loss = adapter_loss(sweep.prepared, outcome.adapter, sweep.prepared.validation)
            failures += _differences(f"{system}, best adapter", [loss], [outcome.loss], tolerance)
    whole, batched = outcomes["sequential"].samples, outcomes["batched"]
    for system in ("batched", *sweep.size.batched_baselines):
        if outcomes[system].samples != whole:
            failures.append(f"{system}: expected {whole} rows as TRL trained, found {outcomes[system].samples}")
    for system in sweep.size.batched_baselines:  # they keep no adapter, and begin with those of batched
        failures += _differences(f"{system}, best loss", [batched.loss], [outcomes[system].loss], BEST_TOLERANCE)
    return failures


def adapter_loss(prepared: Prepared, adapter: Path, rows: Sequence[Mapping[str, list[int]]]) -> float:
    """Return the mean loss over the trained tokens of ``rows`` with an adapter that PEFT loads."""
    model = PeftModel.from_pretrained(share(prepared.model), str(adapter))
    return evaluate(model, rows, 8, prepared.tokenizer.pad_token_id)


def _differences(name: str, expected: Sequence[float], found: Sequence[float], tolerance: float) -> list[str]:
    close = (math.isclose(one, other, rel_tol=tolerance) for one, other in zip(expected, found, strict=True))
    return [] if all(close) else [f"{name}: expected {list(expected)} within {tolerance}, found {list(found)}"]


def _losses(job: BaselineJob) -> list[float]:
    return [*job.train_losses, *(item.loss for item in job.evaluations)]


def tolerance_of(prepared: Prepared) -> float:
    """Return the largest relative difference between losses of the same adapter, by the precision of the base model."""
    return TOLERANCES[prepared.model.dtype]
