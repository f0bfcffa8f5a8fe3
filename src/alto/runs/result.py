"""The result of a finished run, derived from its history."""

from __future__ import annotations

import math

from alto.base import resume_command
from alto.errors import NoResultError, RunError
from alto.records import JobResult, TaskOutcome, exit_reason
from alto.runs.events import TaskCompleted
from alto.runs.history import RunHistory
from alto.runs.job_history import JobHistory
from alto.runs.journal import read_intact_entries
from alto.runs.lead import lead_of_winner
from alto.runs.run_dir import RunDir


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
        finalists=history.finalists,
        scorer=history.scorer,
        scorer_failure=history.scorer_failure,
        time_s={**history.time_s, "measuring": history.measuring_s},
        training_all_s=history.training_all_s,
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
        exit_evidence={key: float(value) for key, value in job.exit_evidence.items()},
        best_step=job.best_step,
        best_validation_loss=job.best_validation_loss if job.best_step else math.inf,
        samples_trained=job.samples_trained,
        samples_budgeted=job.samples_budgeted,
        best_metrics=job.best_metrics,
        test_loss=job.best_test_loss,
        test_metrics=job.best_test_metrics,
    )
