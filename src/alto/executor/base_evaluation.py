"""Evaluates the starting point of the jobs, the frozen base model or a saved adapter on it, for the start value of
every job."""

from __future__ import annotations

from alto.executor.job_state import JobState
from alto.executor.memory_errors import RowTooLargeError
from alto.executor.recorder import JournalRecorder
from alto.executor.start_adapter import beginning_with
from alto.executor.tally import Evaluated
from alto.executor.task_state import TaskState
from alto.records import StartValue
from alto.spec import ObjectiveSettings
from alto.spec.metric import LOSS, score_of

__all__ = ["evaluate_base", "start_like_others"]


def evaluate_base(state: TaskState, recorder: JournalRecorder) -> None:
    """Evaluate the starting point of the jobs once and record it as the start value of every job.

    Nothing is recorded in three cases: there are no validation rows; the jobs have classification heads, which the base
    model does not have; or a row does not fit into memory (the jobs that evaluate this row report the error).
    """
    if state.context.objective.has_head or not state.context.data.has_validation:
        return
    alike: dict[ObjectiveSettings, list[JobState]] = {}  # jobs with equal objective settings have equal start values
    for job in state.jobs.values():
        alike.setdefault(job.config.objective, []).append(job)
    configs = [jobs[0].config for jobs in alike.values()]
    tested: list[Evaluated] = []
    evaluations, order = state.context.task.early_exit.evaluations, state.context.evaluation_order
    rows = None if evaluations is None else order[: evaluations[0][1]]
    try:
        with beginning_with(state.context.start, state.context.backbone, state.slot_manager.bank.reinject) as within:
            found = state.trainer.evaluate_base(state.context, configs, within=within, rows=rows)
            if state.context.data.test is not None and evaluations is None:
                tested = state.trainer.evaluate_base(state.context, configs, "test", within)
    except RowTooLargeError:
        return
    metric = state.context.task.metric
    for jobs, value in zip(alike.values(), found, strict=True):
        score = score_of(metric, value.metrics)
        start = StartValue(
            validation_loss=value.loss,
            score=score,
            score_rows=value.rows_of(state.context.row_metric),
            loss_rows=state.context.kept_rows(value),
        )
        for job in jobs:
            state.selection.observe_base(job.id, start)
    recorder.base_evaluated(
        [
            ([job.id for job in of_one], value, tested[index] if tested else None)
            for index, (of_one, value) in enumerate(zip(alike.values(), found, strict=True))
        ],
        state.context,
    )


def start_like_others(clone: JobState, state: TaskState, recorder: JournalRecorder) -> None:
    """Give a clone or suggestion that begins with new weights the start value of a job with the same objective
    settings.

    Args:
        clone: A job that was just added to the task.
        state: State of the task; its selection keeps the value.
        recorder: Writes the value into the journal.
    """
    metric = state.context.task.metric
    for job in state.jobs.values():
        start = state.selection.start_of(job.id)
        if start is not None and job.config.objective == clone.config.objective:
            state.selection.observe_base(clone.id, start)
            metrics = {} if metric == LOSS else {metric: start.score}
            rows = {metric: start.score_rows} if start.score_rows else {}
            rows = {LOSS: start.loss_rows} if start.loss_rows else rows
            known = Evaluated(loss=start.validation_loss, metrics=metrics, rows=rows)
            recorder.base_evaluated([([clone.id], known, None)], state.context)
            return
