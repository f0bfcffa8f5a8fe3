"""``python benchmarks/memory_lib/child.py``: plans a task, takes its steps, or trains it, in a process of its own.

A request on stdin, what was found on the last line of stdout, both JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch
from kernels_lib.lengths import RowLength
from kernels_lib.workload import random_rows

from alto.backbone import load_backbone
from alto.data import DataOrder, TaskData
from alto.executor import Executor, Trainer, plan_jobs
from alto.executor.profiling import Subject, pack, plan
from alto.executor.profiling.meter import peak_bytes, reset_peak
from alto.lora import linear_modules
from alto.runs import Journal, RunDir, read_entries
from alto.runs.events import JobCompleted
from alto.spec import Task

STEPS = 8


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What ``request["action"]`` finds out about its task."""
    torch.set_num_threads(request["threads"])
    task = Task(**request["task"])
    backbone = load_backbone(task.model, dtype=task.dtype, device=request["device"])
    lengths = [RowLength(*row) for row in request["lengths"]]
    vocabulary = backbone.model.config.vocab_size
    data = TaskData(
        train=random_rows(lengths, vocabulary).train, validation=random_rows(lengths[::4], vocabulary, seed=1).train
    )
    subject = Subject(task=task, backbone=backbone, data=data, runs=plan_jobs(task, backbone, data))
    match request["action"]:
        case "plan":
            return find_plan(subject)
        case "peak":
            return find_peak(subject, request["num_jobs"], request["batch_size"])
        case _:
            return find_duration(subject)


def find_plan(subject: Subject) -> dict[str, Any]:
    """The plan, measured now."""
    return asdict(plan(subject, refresh=True))


def find_peak(subject: Subject, num_jobs: int, batch_size: int) -> dict[str, Any]:
    """The peak of a few steps of the task's first jobs together, and the largest pass of them."""
    backbone, data = subject.backbone, subject.data
    targeted = {module for run in subject.runs for module in run.shape.targets}
    runs = [
        replace(run, order=DataOrder(len(data.train), batch_size, run.config.seed)) for run in subject.runs[:num_jobs]
    ]
    trainer = Trainer(
        backbone,
        data,
        modules=tuple(module for module in linear_modules(backbone.model) if module in targeted),
        max_rank=max(run.shape.rank for run in subject.runs),
        num_slots=num_jobs,
        max_tokens_per_pass=subject.task.max_tokens_per_pass or 2**62,
        optims={run.config.optim for run in runs},
    )
    reset_peak(backbone.device)
    for slot, run in enumerate(runs):
        run.slot = slot
        trainer.admit_fresh(run, slot)
    for _ in range(STEPS):
        trainer.step(runs)
        for run in runs:
            run.step += 1
    return {"peak_bytes": peak_bytes(backbone.device), "num_tokens": trainer.micro_batches.largest}


def find_duration(subject: Subject) -> dict[str, Any]:
    """Seconds that the task trains and evaluates, checkpoints included, packed as its plan says."""
    task, _ = pack(subject)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir.create(folder, task)
        start = time.perf_counter()
        with Journal(run_dir.journal_file) as journal:
            Executor(task, subject.runs, subject.backbone, subject.data, run_dir=run_dir, journal=journal).run()
        duration_s = time.perf_counter() - start
        completed = sum(isinstance(entry.event, JobCompleted) for entry in read_entries(run_dir.journal_file))
    if completed != len(subject.runs):
        raise RuntimeError(f"expected {len(subject.runs)} jobs that came to their end, found {completed}")
    return {"duration_s": duration_s}


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
