"""A cluster whose executors train nothing: they immediately write the journals and results that real ones would write.

Like real ones, they take the lock and the lease of a run, resume its journal, and end it once.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from alto.cluster import AttemptEnded, ClusterEvent, EntryWritten, Launch, Outcome
from alto.errors import AltoError
from alto.records import Node
from alto.runs import Journal, RunDir, has_result
from alto.runs.events import (
    Event,
    JobAdmitted,
    JobCompleted,
    JobDescription,
    JobEvaluated,
    JobExited,
    TaskCompleted,
    TaskInterrupted,
    TaskResumed,
    TaskStarted,
)

__all__ = ["SimulatedCluster"]

JOBS = ("job-000", "job-001")
NUM_STEPS = 100


@dataclass(slots=True)
class _Executor:
    launch: Launch
    began_at: float
    stack: contextlib.ExitStack
    journal: Journal
    evaluated: int = 0
    is_stopped: bool = False


@dataclass(kw_only=True)
class SimulatedCluster:
    """Executors on slots that replace GPUs.

    Attributes:
        num_gpus: Number of simultaneous executors.
        duration_s: Seconds that a run takes.
        num_evaluations: Number of evaluations of each of the two jobs of a run.
        waits_for: Runs get no further than half of their evaluations before this file exists; None does not wait.
        nodes: The single machine.
    """

    num_gpus: int = 4
    duration_s: float = 0.2
    num_evaluations: int = 4
    waits_for: Path | None = None
    has_gpus: bool = False
    nodes: Sequence[Node] = ()
    _executors: dict[str, _Executor] = field(default_factory=dict)
    _events: list[ClusterEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nodes = (Node(name="simulated", gpus=tuple(range(self.num_gpus))),)

    def start(self, launch: Launch) -> None:
        """Begin or resume a run."""
        stack = contextlib.ExitStack()
        run = RunDir(Path(launch.run_dir))
        try:
            stack.enter_context(run.locked())
            journal = stack.enter_context(Journal(run.journal_file, check=run.check_lock))
            executor = _Executor(launch, time.monotonic(), stack, journal)
            if has_result(run):
                stack.close()
                self._end(launch, Outcome.FINISHED)
                return
            if journal.past:
                self._write(executor, TaskResumed(notes=(), versions={}, max_slots=None, num_ranks=None))
                done = [entry.event for entry in journal.past if isinstance(entry.event, JobEvaluated)]
                executor.evaluated = len(done)
                # Finished work counts.
                executor.began_at -= self.duration_s * len(done) / (len(JOBS) * self.num_evaluations)
            else:
                self._write(executor, _started())
                for slot, job in enumerate(JOBS):
                    self._write(executor, JobAdmitted(job=job, slot=slot, step=0, reason="start"))
        except (AltoError, OSError) as error:
            stack.close()
            self._end(launch, Outcome.LOST, str(error))
            return
        self._executors[launch.task] = executor

    def stop(self, task: str) -> None:
        """Let an executor save and end."""
        if task in self._executors:
            self._executors[task].is_stopped = True

    def poll(self, timeout_s: float) -> list[ClusterEvent]:
        """Return the events since the last call."""
        until = time.monotonic() + min(timeout_s, 0.05)
        while True:
            for task, executor in list(self._executors.items()):
                try:
                    self._work(task, executor)
                except (AltoError, OSError) as error:
                    self._close(task)
                    self._end(executor.launch, Outcome.LOST, str(error))
            if self._events or time.monotonic() >= until:
                events, self._events = self._events, []
                return events
            time.sleep(0.01)

    def close(self) -> None:
        """Kill all running executors."""
        for task in list(self._executors):
            self._close(task)

    def _work(self, task: str, executor: _Executor) -> None:
        if executor.is_stopped:
            self._write(executor, TaskInterrupted(training=JOBS))
            self._close(task)
            self._end(executor.launch, Outcome.INTERRUPTED)
            return
        total = len(JOBS) * self.num_evaluations
        most = 1.0 if self.waits_for is None or self.waits_for.exists() else 0.5
        share = min(most, (time.monotonic() - executor.began_at) / self.duration_s)
        while executor.evaluated < int(share * total):
            number, job = divmod(executor.evaluated, len(JOBS))
            step = NUM_STEPS * (number + 1) // self.num_evaluations
            loss = (3.0 if job else 2.0) - number / self.num_evaluations
            self._write(
                executor,
                JobEvaluated(
                    job=JOBS[job],
                    step=step,
                    total_steps=NUM_STEPS,
                    train_ema=loss + 0.1,
                    validation_loss=loss,
                    is_best=True,
                ),
            )
            executor.evaluated += 1
        if share >= 1.0:
            self._finish(task, executor)

    def _finish(self, task: str, executor: _Executor) -> None:
        best_loss = 2.0 - (self.num_evaluations - 1) / self.num_evaluations
        run = RunDir(Path(executor.launch.run_dir))
        run.best.mkdir(exist_ok=True)
        (run.best / "adapter_config.json").write_text(json.dumps({"r": 4, "peft_type": "LORA"}))
        (run.best / "adapter_model.safetensors").write_bytes(bytes(64))
        common = {"best_step": NUM_STEPS, "samples_trained": 100}
        self._write(
            executor,
            JobExited(
                job=JOBS[1], reason="underperforming", evidence={}, slot=1, step=NUM_STEPS,
                best_validation_loss=best_loss + 1.0, **common,
            ),
        )  # fmt: skip
        self._write(
            executor, JobCompleted(job=JOBS[0], slot=0, step=NUM_STEPS, best_validation_loss=best_loss, **common)
        )
        self._write(
            executor,
            TaskCompleted(best_job=JOBS[0], best_validation_loss=best_loss, samples_trained=200, samples_budgeted=1000),
        )
        self._close(task)
        self._end(executor.launch, Outcome.FINISHED)

    def _write(self, executor: _Executor, event: Event) -> None:
        entry = executor.journal.append(event)
        launch = executor.launch
        self._events.append(EntryWritten(task=launch.task, attempt=launch.attempt, entry=entry))

    def _close(self, task: str) -> None:
        self._executors.pop(task).stack.close()

    def _end(self, launch: Launch, outcome: Outcome, reason: str = "") -> None:
        self._events.append(AttemptEnded(task=launch.task, attempt=launch.attempt, outcome=outcome, reason=reason))


def _started() -> TaskStarted:
    jobs = tuple(
        JobDescription(
            job=job,
            config={"learning_rate": 1e-3 * (number + 1), "r": 4, "per_device_train_batch_size": 4,
                    "num_train_epochs": 1.0},
            total_steps=NUM_STEPS,
            samples_budgeted=500,
        )
        for number, job in enumerate(JOBS)
    )  # fmt: skip
    return TaskStarted(
        task="simulated",
        model="alto-tiny",
        base_model="alto-tiny",
        dataset="training.jsonl",
        method="sft",
        metric="loss",
        num_train=500,
        num_validation=50,
        data={"train_rows": 500, "train_tokens": 5000},
        max_slots=2,
        early_exit={},
        device="cpu",
        num_ranks=1,
        versions={},
        jobs=jobs,
    )
