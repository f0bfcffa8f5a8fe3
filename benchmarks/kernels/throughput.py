"""Measures samples per second of ALTO's trainer and of a bare PEFT loop: the same jobs on the same rows, one row per
step each."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from transformers import PreTrainedModel

from alto.backbone import load_tokenizer
from alto.spec import BaseModelSpec
from benchmarks.baselines.bare_peft import bare_peft_one
from benchmarks.baselines.job import BaselineJob, Prepared
from benchmarks.common import Spread, spread
from benchmarks.kernels.variants import Ours
from benchmarks.kernels.workload import Workload

__all__ = ["Throughput", "measure_throughput"]

_LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Samples per second of both, the ratio of each round, and the faults of the losses, one sentence each."""

    alto: Spread
    peft: Spread
    alto_over_peft: Spread
    failures: tuple[str, ...]


def measure_throughput(base: PreTrainedModel, workload: Workload, repeats: int) -> Throughput:
    """Train one epoch of every job at batch size one, both ways in turn; PEFT's model copies and set-up are not
    counted.

    The gate: every job's first loss, when its adapter still has no effect, is the same in both.
    """
    ours, prepared = Ours(base, workload), _prepared(base, workload)
    first_losses = ours.backward(1)
    _alto_epoch_s(ours)
    failures = [
        f"throughput, job {number}: a first loss of {loss:.6f} where PEFT's is {job.train_losses[0]:.6f}, tolerance "
        f"{_LOSS_TOLERANCE}"
        for number, (loss, job) in enumerate(zip(first_losses, _peft_epoch(prepared, workload), strict=True))
        if not math.isclose(loss, job.train_losses[0], rel_tol=_LOSS_TOLERANCE)
    ]
    samples = len(workload.ranks) * len(workload.data.train)
    alto, peft = [], []
    for _ in range(repeats):
        alto.append(samples / _alto_epoch_s(ours))
        jobs = _peft_epoch(prepared, workload)
        peft.append(sum(job.samples for job in jobs) / sum(job.train_s for job in jobs))
    return Throughput(
        alto=spread(alto),
        peft=spread(peft),
        alto_over_peft=spread(one / other for one, other in zip(alto, peft, strict=True)),
        failures=tuple(failures),
    )


def _alto_epoch_s(ours: Ours) -> float:
    start = time.perf_counter()
    ours.epoch(1)
    return time.perf_counter() - start


def _peft_epoch(prepared: Prepared, workload: Workload) -> list[BaselineJob]:
    return [bare_peft_one(prepared, job.config.model_dump(), eval_at_steps=[]) for job in workload.jobs(1)]


def _prepared(base: PreTrainedModel, workload: Workload) -> Prepared:
    rows = workload.examples()
    tokenizer = load_tokenizer(BaseModelSpec(id="alto-tiny"))
    return Prepared(model=base, tokenizer=tokenizer, train=rows, validation=rows[:1], duration_s=0.0)
