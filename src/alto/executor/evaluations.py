"""The evaluations of a task: of the base model before training, of jobs that are due, and of the best adapters at the
end."""

from __future__ import annotations

from collections.abc import Sequence

from alto.executor.context import JobState
from alto.executor.init_adapter import beginning_with
from alto.executor.lifecycle import JobLifecycle
from alto.executor.micro_batches import JobFailedError
from alto.executor.recorder import JournalRecorder
from alto.executor.slot_manager import TrainingState
from alto.executor.tally import Evaluated
from alto.records import LossPoint, StartValue
from alto.runs.events import MeasurementFailed
from alto.spec import LOSS, ObjectiveSettings, Task, score_of


def evaluate_base(state: TrainingState, recorder: JournalRecorder) -> None:
    """Evaluate the starting point of the jobs once and record it as the start value of every job.

    Nothing is recorded if there are no validation rows, or if the jobs have classification heads, which the base model
    does not have. If a row does not fit into memory or a reward fails, only the reason is recorded.
    """
    if state.context.objective.has_head or not state.context.data.has_validation:
        return
    alike: dict[ObjectiveSettings, list[JobState]] = {}  # jobs with equal objective settings have equal start values
    for job in state.jobs.values():
        alike.setdefault(job.config.objective, []).append(job)
    configs = [jobs[0].config for jobs in alike.values()]
    tested: list[Evaluated] = []
    evaluations, order = state.context.task.early_exit.evaluations, state.context.evaluation_order
    rows = order[: evaluations[0][1]] if evaluations and order else None
    try:
        with beginning_with(state.context.start, state.context.backbone, state.slot_manager.bank.reinject) as within:
            measured = state.trainer.evaluate_base(state.context, configs, within=within, rows=rows)
            if state.context.data.test is not None and not order:
                try:
                    tested = state.trainer.evaluate_base(state.context, configs, "test", within)
                except JobFailedError as error:
                    recorder.append(MeasurementFailed(job="", split="test", evidence=error.evidence))
    except JobFailedError as error:
        recorder.append(MeasurementFailed(job="", evidence=error.evidence))
        return
    metric = state.context.task.metric
    for jobs, value in zip(alike.values(), measured, strict=True):
        score = score_of(metric, value.metrics)
        start = StartValue(
            validation_loss=value.loss,
            score=score,
            score_rows=value.rows_of(state.context.row_metric),
            loss_rows=value.kept_rows(state.context),
        )
        for job in jobs:
            state.selection.observe_base(job.id, start)
    recorder.base_evaluated(
        [
            ([job.id for job in of_one], value, tested[index] if tested else None)
            for index, (of_one, value) in enumerate(zip(alike.values(), measured, strict=True))
        ],
        state.context,
    )


def evaluate_jobs(
    jobs: Sequence[JobState], state: TrainingState, recorder: JournalRecorder, lifecycle: JobLifecycle
) -> int:
    """Evaluate the jobs that are due, keep new best adapters, and end jobs as the policy decides.

    Returns:
        Number of jobs that were evaluated.
    """
    selection, context = state.selection, state.context
    with state.stopwatch.timing("evaluation"):
        jobs, found = _evaluated(jobs, state, lifecycle)
    decisions = [
        selection.observe(
            job.id,
            job.step,
            value.loss,
            score_of(context.task.metric, value.metrics),
            value.rows_of(context.row_metric),
            value.kept_rows(context),
        )
        for job, value in zip(jobs, found, strict=True)
    ]
    best = [job for job in jobs if (point := selection.best(job.id)) is not None and point.step == job.step]
    for job in best:
        state.slot_manager.keep_best(job)
    with state.stopwatch.timing("evaluation"):
        tested = _tested_losses(state, recorder, _to_be_tested(state, best))
    for job, value, decision in zip(jobs, found, decisions, strict=True):
        recorder.losses(job)
        train_ema = selection.history(job.id)[-1].train_ema
        recorder.job_evaluated(job, value, train_ema, is_best=job in best, test=tested.get(job.id))
        if not selection.is_training(job.id):
            lifecycle.end(job, decision)
    return len(jobs)


def finish_jobs(
    jobs: Sequence[JobState], state: TrainingState, recorder: JournalRecorder, lifecycle: JobLifecycle
) -> None:
    """End jobs of a task without validation rows after their last step: their current adapters are the result."""
    for job in jobs:
        state.selection.finish(job.id)
        state.slot_manager.keep_best(job)
    tested = _tested_losses(state, recorder, jobs)
    for job in jobs:
        lifecycle.finish(job, tested.get(job.id))


def _evaluated(
    jobs: Sequence[JobState], state: TrainingState, lifecycle: JobLifecycle
) -> tuple[Sequence[JobState], Sequence[Evaluated]]:
    """Evaluate ``jobs``; a job with a row that does not fit into memory ends."""
    order = state.context.evaluation_order
    while jobs:
        rows = [order[: job.planned.evaluation_rows[job.step]] for job in jobs] if order else None
        try:
            return jobs, state.trainer.evaluate(jobs, rows=rows)
        except JobFailedError as error:
            lifecycle.fail(error)
        jobs = [job for job in jobs if state.is_competing(job)]
    return (), ()


def measure_best(state: TrainingState, recorder: JournalRecorder) -> None:
    """Measure the best adapters of the leading jobs, and test the adapters that may win. The winner is one of these
    jobs. Do nothing if every evaluation was on all rows.

    Args:
        state: State of the task; all its jobs have ended and the bank has a free slot.
    """
    context, selection, planned = state.context, state.selection, state.context.task.early_exit.final_evaluations
    if not context.has_final_evaluations:
        return
    assert planned is not None, "evaluations are planned together"
    count, num_rows = planned
    found: list[tuple[LossPoint, Evaluated]] = []
    for best in selection.leaders(count):
        job = state.jobs[best.job]
        try:
            with state.slot_manager.holding_best(job):
                [value] = state.trainer.evaluate([job], rows=[context.evaluation_order[:num_rows]])
        except JobFailedError as error:  # it keeps its earlier evaluation
            recorder.append(MeasurementFailed(job=best.job, evidence=error.evidence))
            continue
        found.append((best, value))
    for best, value in found:
        selection.observe_measured(best.job, value.loss, value.kept_rows(context))
    tested = _tested_best(state, recorder, [best for best, _ in found])
    for best, value in found:
        recorder.best_measured(best, value, context, tested.get(best.job))


def _tested_best(
    state: TrainingState, recorder: JournalRecorder, measured: Sequence[LossPoint]
) -> dict[str, Evaluated]:
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
            found |= _tested_losses(state, recorder, [job])
    return found


def _tested_losses(state: TrainingState, recorder: JournalRecorder, jobs: Sequence[JobState]) -> dict[str, Evaluated]:
    """Return the losses of resident ``jobs`` on the test rows, by job; record why a job could not be tested."""
    while jobs and state.context.data.test is not None:
        try:
            return dict(zip((job.id for job in jobs), state.trainer.evaluate(jobs, "test"), strict=True))
        except JobFailedError as error:
            failed = next(job for job in jobs if job.slot == error.slot)
            recorder.append(MeasurementFailed(job=failed.id, split="test", evidence=error.evidence))
            jobs = [job for job in jobs if job is not failed]
    return {}


def _to_be_tested(state: TrainingState, best: Sequence[JobState]) -> Sequence[JobState]:
    """Return the jobs to evaluate on the test rows now.

    If the winner is the job with the lowest validation loss, only the current leader can win, because the winner leads
    from its best evaluation on. If other values can decide, any job may win. If adapters are tested at the end of the
    task, the list is empty.

    Args:
        best: Jobs with a new best evaluation.
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
