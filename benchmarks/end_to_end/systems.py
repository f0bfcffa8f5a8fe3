"""The ways to do a sweep, as users would run them, each with the same rows, order of rows, evaluations and seeds."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from peft import PeftModel

from alto import EarlyExit, Engine, Task, TaskResult
from alto.early_exit import Recording, evaluation_steps
from alto.records import JobResult, Rung
from alto.runs import read_entries
from alto.spec import Job
from benchmarks.baselines.best import BestAdapter
from benchmarks.baselines.job import BaselineJob, Evaluation, JobSettings, Prepared
from benchmarks.baselines.resident import train_in_batches
from benchmarks.baselines.trl_sequential import train_one
from benchmarks.end_to_end.plans import DATA_SEED, Size

__all__ = ["Outcome", "Sweep", "best_loss", "eval_steps", "observed", "tune"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The times and results of a system.

    Attributes:
        duration_s: All seconds: loading, tokenising, set-up, training, evaluating, saving.
        loss: Lowest validation loss.
        samples: Rows trained, counting repeats.
        adapter: Folder of the adapter with that loss, in PEFT's format; None if the system keeps none.
        eval_s: Seconds of evaluations, if the system times them.
        jobs: Every job by its id, for a system that trains all of them to their end one by one.
        recording: The curves of all jobs, if ALTO trained them to their end.
        results: The result of every job, if ALTO trained them.
    """

    system: str
    duration_s: float
    loss: float
    samples: int
    adapter: Path | None
    eval_s: float | None = None
    jobs: Mapping[str, BaselineJob] = field(default_factory=dict)
    recording: Recording | None = None
    results: Sequence[JobResult] = ()


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep.

    Attributes:
        task: The task, as a user gives it to ALTO.
        prepared: The same base model and rows for the others; their time counts once in each of them.
        folder: Folder for the files of all systems.
    """

    task: Task
    prepared: Prepared
    size: Size
    folder: Path

    def systems(self) -> Mapping[str, Callable[[], Outcome]]:
        """Return the systems that do the sweep in one go, by name; ``sequential`` is done in two halves, see
        :meth:`sequential`."""
        return {
            **{way: lambda way=way: self._in_batches(way) for way in self.size.batched_baselines},
            "batched": lambda: self._alto("batched", self.task.replace(early_exit=False)),
            "early_exit": lambda: self._alto("early_exit", self.task),
            "ray_asha": self._ray_asha,
            "optuna_hyperband": lambda: self._optuna("hyperband"),
            "optuna_median": lambda: self._optuna("median"),
        }

    def sequential(self, jobs: Sequence[Job], best: BestAdapter) -> dict[str, BaselineJob]:
        """Train ``jobs`` with TRL, one after the other; ``best`` keeps the best adapter of this and other calls."""
        found = {}
        for number, job in enumerate(jobs, start=1):
            found[job.id] = train_one(
                self.prepared, job.config.model_dump(), eval_at_steps=self.steps_of(job), on_evaluation=best.keep
            )
            print(f"trl {number}/{len(jobs)} {job.id}: {found[job.id].duration_s:.1f} s", flush=True)
        return found

    def sequential_outcome(self, jobs: Mapping[str, BaselineJob], best: BestAdapter) -> Outcome:
        """Return the outcome of both halves of ``sequential`` together."""
        return Outcome(
            system="sequential",
            duration_s=self.prepared.duration_s + sum(job.duration_s for job in jobs.values()),
            eval_s=sum(job.eval_s for job in jobs.values()),
            loss=best.loss,
            samples=sum(job.samples for job in jobs.values()),
            adapter=best.folder,
            jobs={job.id: jobs[job.id] for job in self.task.jobs},
        )

    def steps_of(self, job: Job, early: Sequence[float] = ()) -> tuple[int, ...]:
        """Return the steps after which a job is evaluated: the same in every system, and ``early`` shares of its steps
        at which a system may stop it."""
        return self._steps(JobSettings.of(job.config.model_dump()), early)

    def _steps(self, settings: JobSettings, early: Sequence[float]) -> tuple[int, ...]:
        rungs = [Rung(progress=share, keep=1.0) for share in early]
        return evaluation_steps(settings.total_steps(len(self.prepared.train)), self.task.eval_steps, rungs)

    def _in_batches(self, way: str) -> Outcome:
        began = time.perf_counter()
        jobs = train_in_batches(
            way,
            self.prepared,
            self.task.jobs,
            at_once=self.size.at_once,
            eval_at_steps={job.id: self.steps_of(job) for job in self.task.jobs},
        )
        return Outcome(
            system=way,
            duration_s=self.prepared.duration_s + time.perf_counter() - began,
            eval_s=sum(job.eval_s for job in jobs.values()),
            loss=min(best_loss(job) for job in jobs.values()),
            samples=sum(job.samples for job in jobs.values()),
            adapter=None,
            jobs=jobs,
        )

    def _alto(self, system: str, task: Task) -> Outcome:
        result, duration_s = tune(task, self.folder / "runs")
        journal = Path(result.run_dir) / "journal.jsonl"
        return Outcome(
            system=system,
            duration_s=duration_s,
            loss=result.best_validation_loss,
            samples=result.samples_trained,
            adapter=Path(result.adapter_dir),
            recording=Recording.from_journal(read_entries(journal)) if system == "batched" else None,
            results=result.job_results,
        )

    def _ray_asha(self) -> Outcome:
        from benchmarks.baselines import ray_peft  # a machine with a GPU may have no Ray

        found = ray_peft.ray_asha(
            self.prepared,
            [job.config.model_dump() for job in self.task.jobs],
            eval_at_steps=[self.steps_of(job, ray_peft.EARLY_SHARES) for job in self.task.jobs],
            concurrent_trials=self.size.concurrent_trials,
            folder=self.folder,
        )
        return Outcome(
            system="ray_asha",
            duration_s=self.prepared.duration_s + found.duration_s,
            loss=found.loss,
            samples=found.samples,
            adapter=found.adapter,
        )

    def _optuna(self, pruner: str) -> Outcome:
        import optuna

        from benchmarks.baselines import optuna_peft

        began = time.perf_counter()
        best = BestAdapter(self.folder / f"optuna-{pruner}")
        configs = [job.config.model_dump() for job in self.task.jobs]
        grid = list(range(len(configs)))

        def keep(model: PeftModel, evaluation: Evaluation) -> bool:
            best.keep(model, evaluation)
            return False

        samples = optuna_peft.optuna_search(
            self.prepared,
            lambda trial: configs[trial.suggest_categorical("number", grid)],
            sampler=optuna.samplers.GridSampler({"number": grid}, seed=DATA_SEED),
            pruner=pruner,
            eval_at_steps=lambda settings: self._steps(settings, optuna_peft.EARLY_SHARES),
            on_evaluation=keep,
        )
        return Outcome(
            system=f"optuna_{pruner}",
            duration_s=self.prepared.duration_s + time.perf_counter() - began,
            loss=best.loss,
            samples=samples,
            adapter=best.folder,
        )


def tune(task: Task, output_dir: Path) -> tuple[TaskResult, float]:
    """Run ``alto tune`` with an empty cache, already imported; return its result and its duration in seconds."""
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, ALTO_CACHE=cache):
        began = time.perf_counter()
        result = Engine(output_dir=output_dir).tune(task)
        return result, time.perf_counter() - began


def observed(task: Task) -> Task:
    """Return ``task`` with evaluations at the points of its policy, on all rows, and without early ends of jobs."""
    rungs = tuple((rung.progress, 1.0) for rung in task.early_exit.selection_rungs)
    everything = EarlyExit(rungs=rungs, detect_divergence=False, detect_overfitting=False, evaluation_share="all")
    return task.replace(early_exit=everything)


def eval_steps(task: Task, settings: JobSettings, num_train: int) -> tuple[int, ...]:
    """Return the steps at which a job is evaluated, including the rungs of its task."""
    return evaluation_steps(settings.total_steps(num_train), task.eval_steps, task.early_exit.selection_rungs)


def best_loss(job: BaselineJob) -> float:
    """Return the lowest validation loss of a job; infinite if none was finite."""
    return min((item.loss for item in job.evaluations if math.isfinite(item.loss)), default=math.inf)
