"""Rungs: the answers of jobs are scored if the task asks for it, then the rung is decided."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from alto.early_exit import scores_of
from alto.executor.conclusion import Judge
from alto.executor.lifecycle import JobLifecycle
from alto.executor.recorder import JournalRecorder
from alto.executor.task_state import TaskState
from alto.records import RungResult, Standing

__all__ = ["hold_rung"]


def hold_rung(
    state: TaskState,
    recorder: JournalRecorder,
    lifecycle: JobLifecycle,
    judge: Judge | None,
    stop_if_asked: Callable[[], None],
) -> RungResult:
    """Decide the next rung, which all jobs have reached, and end the jobs that it drops; for the arguments see
    :func:`_score_rung`."""
    selection = state.selection
    rung, index = selection.next_rung, selection.rungs_held
    assert rung is not None
    # The selection counts the steps of a job that ran ahead, so the journal records them too.
    for job in state.jobs.values():
        recorder.losses(job)
    _score_rung(state, recorder, judge, stop_if_asked)
    result = selection.select()
    recorder.rung_held(index, rung, result)
    for decision in result.dropped:
        lifecycle.end(state.jobs[decision.job], decision)
    return result


def _score_rung(
    state: TaskState, recorder: JournalRecorder, judge: Judge | None, stop_if_asked: Callable[[], None]
) -> None:
    """Score the jobs at the next rung if the task names this rung in ``select_by.at``. The selection and the journal
    get the scores; if scoring fails, the journal gets the reason and the metric decides.

    Args:
        state: State of the task; every job that trains waits at the rung.
        recorder: Writes the scores into the journal.
        judge: Scores adapters.
        stop_if_asked: Raises an error if the run has to stop.

    Raises:
        TaskInterruptedError: The run was stopped; a resumed run scores the rung again.
    """
    selection, scoring = state.selection, state.context.task.scoring
    rung, index = selection.next_rung, selection.rungs_held
    if judge is None or rung is None or scoring is None or not scoring.is_at(rung.progress):
        return
    standings = [one for one in selection.standings() if math.isfinite(one.validation_loss)]
    if len(standings) < 2:
        return
    try:
        judgement = judge({one.job: _adapter(state, one) for one in standings}, stop_if_asked)
    finally:
        state.slot_manager.bank.reinject()  # the judge has injected other adapters into the base model
    scores = scores_of(judgement)
    recorder.rung_scored(index, rung, judgement, scores)
    selection.observe_scores(scores)


def _adapter(state: TaskState, standing: Standing) -> Path:
    """Return the folder of the adapter that is scored for a job: its present adapter while it trains, or its best
    adapter if it has ended."""
    return state.slot_manager.saved(state.jobs[standing.job], "last" if standing.is_training else "best")
