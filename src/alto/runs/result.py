"""The result of a finished run, derived from its history, and the adapters and states that its folder keeps."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable
from pathlib import Path

from alto.base import resume_command, writing
from alto.errors import JobCommandError, NoResultError, RunError, RunNotFoundError
from alto.records import JobResult, TaskOutcome, exit_reason
from alto.runs.events import CheckpointSaved, SavedJob, TaskCompleted
from alto.runs.history import RunHistory
from alto.runs.job_history import JobHistory, Stage
from alto.runs.journal import read_intact_entries
from alto.runs.lead import lead_of_winner
from alto.runs.progress import training_all_s
from alto.runs.run_dir import RunDir
from alto.spec import Keep


def task_outcome(history: RunHistory, run: RunDir) -> TaskOutcome:
    """Return the outcome of a finished task.

    Raises:
        NoResultError: The task is not finished, or has no usable adapter.
    """
    best = history.best
    if history.result is None or best is None:
        raise NoResultError(
            f"expected a finished run, found that {run.root} has no result yet; continue with: "
            f"{resume_command(run.root)}"
        )
    return TaskOutcome(
        task=history.name,
        run_dir=str(run.root),
        adapter_dir=str(run.best),
        best_job=best.job,
        best_validation_loss=best.best_validation_loss,
        jobs=tuple(_job_result(job) for job in history.jobs.values()),
        duration_s=history.duration_s,
        metric=history.metric,
        best_metrics=best.best_metrics,
        test_loss=best.best_test_loss,
        test_metrics=best.best_test_metrics,
        num_known_test=history.num_known_test,
        finalists=history.finalists,
        scorer=history.scorer,
        scorer_failure=history.scorer_failure,
        time_s={**history.time_s, "measuring": history.measuring_s},
        training_all_s=training_all_s(history),
        lead=lead_of_winner(history),
        adapter_check=history.adapter_check,
        refit_of="" if history.refit is None else history.refit.run,
    )


def has_result(run: RunDir) -> bool:
    """Return whether the task has its result and its best adapter is exported, so that only a report can be missing.

    False if its journal cannot be read; resuming the run reports that error.
    """
    try:
        entries = read_intact_entries(run.journal_file)
    except RunError:
        return False
    return bool(entries) and isinstance(entries[-1].event, TaskCompleted) and run.best.is_dir()


def _job_result(job: JobHistory) -> JobResult:
    return JobResult(
        job=job.job,
        config=job.config,
        steps=job.step,
        total_steps=job.total_steps,
        exit_reason=exit_reason(job.exit_reason) if job.exit_reason else None,
        exit_evidence={key: value if key == "reward" else float(value) for key, value in job.exit_evidence.items()},
        best_step=job.best_step,
        best_validation_loss=job.best_validation_loss if job.best_step else math.inf,
        samples_trained=job.samples_trained,
        samples_budgeted=job.samples_budgeted,
        best_metrics=job.best_metrics,
        test_loss=job.best_test_loss,
        test_metrics=job.best_test_metrics,
    )


_REMOVED = ".removed"


def kept_jobs(history: RunHistory, keep: Keep) -> set[str]:
    """Return the jobs of a finished run whose best adapters are kept.

    ``finalists`` are the winner, the jobs that did all their steps, the jobs ranked at the last decided rung, and the
    jobs whose generated answers were scored.
    """
    if keep == "all":
        return {*history.jobs}
    kept = set() if history.result is None else {history.result.best_job}
    if keep == "finalists":
        kept |= {job.job for job in history.jobs.values() if job.stage is Stage.COMPLETED}
        kept |= {score.job for score in history.finalists}
        for rung in history.rungs[-1:]:
            kept |= {*rung.kept, *rung.dropped}
    return kept


def remove_states(run: RunDir, history: RunHistory, keep: Keep) -> int:
    """Remove the files that a finished run does not keep, and return the number of bytes freed. Safe to repeat after a
    kill.

    With ``all`` nothing is removed. Otherwise only the best adapters of :func:`kept_jobs` stay, and no state from which
    a job could be resumed.

    Raises:
        RunBusyError: The lock of the run is lost.
        RunWriteError: The folder cannot be written.
    """
    if keep == "all":
        return 0
    run.check_lock()
    kept, removed, freed = kept_jobs(history, keep), run.root / _REMOVED, 0
    with writing(run.root, run.root / "jobs"):
        freed += _removed([removed])
        for folder in sorted((run.root / "jobs").glob("*")):
            if folder.name in kept:
                freed += _removed(part for part in folder.iterdir() if part.name != "best")
            else:
                # A single rename, so that no reader finds part of an adapter.
                removed.mkdir(exist_ok=True)
                folder.rename(removed / folder.name)
        freed += _removed([removed])
    return freed


def check_can_continue(run: RunDir) -> None:
    """Check that a finished run still has the states of all its jobs, so that it can train further jobs.

    Raises:
        JobCommandError: States are missing.
    """
    try:
        entries = read_intact_entries(run.journal_file)
    except RunNotFoundError:
        return
    if not entries or not isinstance(entries[-1].event, TaskCompleted):
        return
    saved = next((entry.event for entry in reversed(entries) if isinstance(entry.event, CheckpointSaved)), None)
    jobs = {} if saved is None else saved.jobs
    missing = [job for job, at in jobs.items() if not _has_states(run, job, at)]
    if missing:
        raise JobCommandError(
            f"expected a finished run with the states of all {len(jobs)} jobs, found that {len(missing)} are missing "
            f"in {run.root}, because they were removed at the end of the run or by alto prune. Jobs can be added only "
            "to a run with keep: all; set it in the task, and start a new run with: alto tune"
        )


def _has_states(run: RunDir, job: str, saved: SavedJob) -> bool:
    if not saved.is_resumable or not run.job(job, "last").exists():
        return False
    return not saved.best_step or run.job(job, "best").exists()


def _removed(paths: Iterable[Path]) -> int:
    """Remove files and folders, and return the total size of their files in bytes."""
    freed = 0
    for path in paths:
        if path.is_symlink() or path.is_file():
            freed += path.lstat().st_size
            path.unlink()
        elif path.is_dir():
            freed += sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
            shutil.rmtree(path)
    return freed
