"""``python -m benchmarks.memory.child``: plans a task, takes its steps, or trains it, in a process of its own.

The request is on stdin, and the result on the last line of stdout; both are JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import asdict, replace
from typing import Any

import torch

from alto.backbone import load_backbone
from alto.data import DataOrder, TaskData
from alto.executor import (
    BankSize,
    MicroBatches,
    RunInputs,
    TaskContext,
    TaskSession,
    build_trainer,
    initial_states,
    run_alone,
)
from alto.executor.profiling import pack, plan
from alto.executor.profiling.meter import peak_bytes, reset_peak
from alto.runs import Journal, RunDir, read_entries
from alto.runs.events import JobCompleted
from alto.spec import Task
from benchmarks.kernels.lengths import RowLength
from benchmarks.kernels.workload import random_rows

STEPS = 8


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the result of ``request["action"]`` for its task."""
    torch.set_num_threads(request["threads"])
    task = Task(**request["task"])
    backbone = load_backbone(task.base_model, device=request["device"])
    lengths = [RowLength(*row) for row in request["lengths"]]
    vocabulary = backbone.model.config.vocab_size
    data = TaskData(
        train=random_rows(lengths, vocabulary).train, validation=random_rows(lengths[::4], vocabulary, seed=1).train
    )
    context = TaskContext.of(task, backbone, data)
    match request["action"]:
        case "plan":
            return find_plan(context)
        case "peak":
            return find_peak(context, request["num_jobs"], request["batch_size"])
        case _:
            return find_duration(context)


def find_plan(context: TaskContext) -> dict[str, Any]:
    """Return the plan, measured now."""
    return asdict(plan(context, refresh=True))


def find_peak(context: TaskContext, num_jobs: int, batch_size: int) -> dict[str, Any]:
    """Return the peak of a few steps of the task's first jobs together, and their largest pass."""
    backbone, data = context.backbone, context.data
    jobs = [
        replace(job, planned=replace(job.planned, order=DataOrder(len(data.train), batch_size, job.config.seed)))
        for job in initial_states(context)[:num_jobs]
    ]
    micro_batches = MicroBatches(context.task.max_tokens_per_pass or 2**62, lambda event: None)
    trainer = build_trainer(backbone, BankSize.of(context.jobs, backbone, num_slots=num_jobs), micro_batches)
    reset_peak(backbone.device)
    for slot, job in enumerate(jobs):
        job.slot = slot
        trainer.admit(job, slot)
    for _ in range(STEPS):
        trainer.step(jobs)
        for job in jobs:
            job.step += 1
    return {"peak_bytes": peak_bytes(backbone.device), "num_tokens": micro_batches.largest}


def find_duration(context: TaskContext) -> dict[str, Any]:
    """Return the seconds in which the task trains, evaluates and saves, packed as in its plan."""
    context, _ = pack(context)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir.create(folder, context.task)
        start = time.perf_counter()
        with Journal(run_dir.journal_file) as journal:
            run_alone(TaskSession(context, journal, RunInputs(run_dir=run_dir)))
        duration_s = time.perf_counter() - start
        completed = sum(isinstance(entry.event, JobCompleted) for entry in read_entries(run_dir.journal_file))
    if completed != len(context.jobs):
        raise RuntimeError(f"expected {len(context.jobs)} jobs that came to their end, found {completed}")
    return {"duration_s": duration_s}


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
