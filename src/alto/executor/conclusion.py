"""The end of a task: chooses the best job, or raises why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from alto.early_exit import choose, scores_of
from alto.errors import NoResultError
from alto.executor.recorder import JournalRecorder
from alto.executor.task_state import TaskState
from alto.records import AdapterCheck, ExitReason, Judgement, LossPoint
from alto.runs import RunDir

__all__ = ["Check", "Hooks", "Judge", "conclude"]

Check: TypeAlias = Callable[[Path], AdapterCheck]
"""Checks that PEFT reads an adapter (its folder) as it was trained."""

Judge: TypeAlias = Callable[[Mapping[str, Path], Callable[[], None]], Judgement]
"""Scores the answers of adapters (folders by job). It calls the given function regularly; an error of that function
ends it. A scorer that fails is no error: the judgement says why."""


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Functions that the caller of an executor provides.

    Attributes:
        is_interrupted: Called before every step; once it returns true, the task stops and can be resumed.
        judge: Chooses the winner among the finalists, in this process only; None chooses by the metric.
        check: Checks the best adapter, for the journal; called on the first rank. None: no check.
    """

    is_interrupted: Callable[[], bool] = _never
    judge: Judge | None = None
    check: Check | None = None


def conclude(
    state: TaskState, recorder: JournalRecorder, run_dir: RunDir, hooks: Hooks, stop_if_asked: Callable[[], None]
) -> None:
    """Choose the winner of a task whose jobs have all ended, check its adapter, and record both.

    Args:
        state: Of the task.
        recorder: Writes the result into the journal.
        run_dir: Contains the best adapters of all jobs.
        hooks: Judge finalists and check the best adapter.
        stop_if_asked: Raises if the run has to stop; called while finalists generate answers.

    Raises:
        NoResultError: No job was ever evaluated with a finite loss.
        TaskInterruptedError: The run was stopped while finalists answered; a resumed run judges them again.
    """
    winner = state.selection.winner() if state.context.data.has_validation else _finished(state)
    if winner is None:
        raise NoResultError(
            f"task {state.context.task.name!r}: expected at least one job to reach an evaluation with a finite loss, "
            f"found that {_why_there_is_none(state)}"
        )
    tied: Sequence[LossPoint] = ()
    if state.context.data.has_validation:
        tied = state.selection.within_noise_of_winner()
    if hooks.judge is not None:
        winner, tied = _judged(state, recorder, run_dir, hooks.judge, stop_if_asked) or (winner, tied)
    if hooks.check is not None and state.context.ranks.is_first:
        recorder.adapter_checked(winner.job, hooks.check(run_dir.job(winner.job, "best")))
    recorder.task_completed(winner, tied, state.jobs.values())


def _finished(state: TaskState) -> LossPoint | None:
    """The end of the job that did all its steps without validation; None where it has ended before."""
    done = (job for job in state.jobs.values() if state.selection.decision_on(job.id) is None)
    nan = math.nan
    points = (
        LossPoint(job=job.id, step=job.step, total_steps=job.total_steps, train_ema=nan, validation_loss=nan)
        for job in done
    )
    return next(points, None)


def _judged(
    state: TaskState, recorder: JournalRecorder, run_dir: RunDir, judge: Judge, stop_if_asked: Callable[[], None]
) -> tuple[LossPoint, Sequence[LossPoint]] | None:
    """The finalist with the best answers, and those within noise of it; None where the scorer failed."""
    finalists = state.selection.leaders(state.context.task.num_finalists)
    judgement = judge({point.job: run_dir.job(point.job, "best") for point in finalists}, stop_if_asked)
    scores = scores_of(judgement)
    recorder.finalists_judged(judgement, scores)
    if judgement.failure:
        return None
    return choose(finalists, {score.job: score for score in scores}, scorer=judgement.scorer)


def _why_there_is_none(state: TaskState) -> str:
    decisions = [state.selection.decision_on(job) for job in state.jobs]
    failed = [decision for decision in decisions if decision and "row_tokens" in decision.evidence]
    unpaid = [decision for decision in decisions if decision and decision.reason is ExitReason.BUDGET]
    if unpaid:
        return (
            f"search.budget was spent before the first evaluation of {len(unpaid)} of {len(decisions)}; raise it, or "
            "lower eval_steps"
        )
    by_user = [decision for decision in decisions if decision and decision.reason is ExitReason.STOPPED]
    if not failed and by_user:
        return (
            f"{len(by_user)} of {len(decisions)} were stopped before their first evaluation; start a new run with: "
            "alto tune"
        )
    if not failed:
        return f"all {len(decisions)} diverged before; lower the learning rates"
    row, fits = failed[0].evidence["row_tokens"], state.slot_manager.largest_micro_batch
    remedy = f"lower max_length to {fits} or fewer" if 0 < fits < row else "lower max_length"
    return (
        f"{len(failed)} of {len(decisions)} have a row that does not fit into memory by itself, of {row:,} tokens "
        f"(the largest micro-batch that fitted has {fits:,}); {remedy}, or set gradient_checkpointing: true"
    )
