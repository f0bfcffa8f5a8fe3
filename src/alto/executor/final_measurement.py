"""Measures the best adapters of a task again at its end, and tests them on its test rows."""

from __future__ import annotations

from collections.abc import Sequence

from alto.executor.job_state import JobState
from alto.executor.memory_errors import RowTooLargeError
from alto.executor.recorder import JournalRecorder
from alto.executor.tally import Evaluated
from alto.executor.task_state import TaskState
from alto.records import LossPoint
from alto.spec import Task
from alto.spec.metric import LOSS

__all__ = ["measure_best", "tested_losses", "to_be_tested"]


def measure_best(state: TaskState, recorder: JournalRecorder) -> None:
    """Measure the best adapters of the leading jobs, among which the winner is chosen, and test the adapters that may
    win. Do nothing if every evaluation was on all rows.

    Args:
        state: State of the task; all its jobs have ended and the bank has a free slot.
        recorder: Writes the result into the journal.
    """
    context, selection, planned = state.context, state.selection, state.context.task.early_exit.final_evaluations
    if not context.has_final_evaluations:
        return
    assert planned is not None, "evaluations are planned together"
    count, num_rows = planned
    found: list[tuple[LossPoint, Evaluated]] = []
    for best in selection.leaders(count):
        job = state.jobs[best.job]
        with state.slot_manager.holding_best(job):
            [value] = state.trainer.evaluate([job], rows=[context.evaluation_order[:num_rows]])
        found.append((best, value))
    for best, value in found:
        selection.observe_measured(best.job, value.loss, context.kept_rows(value))
    tested = _tested_best(state, [best for best, _ in found])
    for best, value in found:
        recorder.best_measured(best, value, context, tested.get(best.job))


def _tested_best(state: TaskState, measured: Sequence[LossPoint]) -> dict[str, Evaluated]:
    """Return the losses on the test rows of the measured jobs that may win, by job."""
    found: dict[str, Evaluated] = {}
    if state.context.data.test is None or state.context.task.test_jobs == "all":
        return found
    winner = state.selection.winner()
    for best in measured:
        if _is_won_by_loss(state.context.task) and winner is not None and best.job != winner.job:
            continue
        job = state.jobs[best.job]
        with state.slot_manager.holding_best(job):
            found |= tested_losses(state, [job])
    return found


def tested_losses(state: TaskState, jobs: Sequence[JobState]) -> dict[str, Evaluated]:
    """Return the losses of resident ``jobs`` on the test rows, by job; omit jobs whose test rows do not fit into
    memory."""
    while jobs and state.context.data.test is not None:
        try:
            return dict(zip((job.id for job in jobs), state.trainer.evaluate(jobs, "test"), strict=True))
        except RowTooLargeError as error:
            jobs = [job for job in jobs if job.slot != error.slot]
    return {}


def to_be_tested(state: TaskState, best: Sequence[JobState]) -> Sequence[JobState]:
    """Return the jobs among ``best``, which have a new best evaluation, whose test loss the result may need.

    If the lowest validation loss decides alone, that is the current leader: the winner has led since its best
    evaluation. If anything else can choose the winner, any job may win. If adapters are tested at the end, the list is
    empty.
    """
    task = state.context.task
    if state.context.has_final_evaluations and task.test_jobs != "all":
        return []
    if task.test_jobs == "all" or not _is_won_by_loss(task):
        return best
    leader = state.selection.winner()
    return [job for job in best if leader is not None and job.id == leader.job]


def _is_won_by_loss(task: Task) -> bool:
    """Return whether the job with the lowest validation loss wins, and nothing else can choose another job."""
    return task.metric == LOSS and task.select_by == "metric" and not task.repetitions
