"""The end of a task: chooses the best job, or raises an error that says why there is none."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from alto.early_exit import choose, scores_of
from alto.errors import NoResultError
from alto.executor.lifecycle import JobLifecycle
from alto.executor.recorder import JournalRecorder
from alto.executor.slot_manager import TrainingState
from alto.records import AdapterCheck, Candidate, ExitReason, Judgement, LossPoint, RungResult, Samples
from alto.runs import RunDir
from alto.runs.events import AdapterChecked, FinalistsJudged, RungScored, SamplesGenerated, WarmupEnded

Check: TypeAlias = Callable[[Path], AdapterCheck]
"""A check that PEFT loads an adapter (its folder) as it was trained."""

Judge: TypeAlias = Callable[[Mapping[str, Path], Callable[[], None]], Judgement]
"""A scorer for the answers of adapters (folders by job). It calls the given function regularly, and an error of that
function ends it. If scoring fails, it raises no error: the judgement says why."""

TextGenerator: TypeAlias = Callable[[Mapping[str, Path], Callable[[], None]], Samples]
"""A generator that continues prompts with the base model and with adapters (folders by job, the winner first). It calls
the given function as a :data:`Judge` does; if generation fails, it raises no error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Functions that the caller of an executor provides.

    Attributes:
        is_interrupted: Called before every step; once it returns true, the task stops and can be resumed.
        judge: Scores the finalists, in this process only, to choose the winner; without it (None) the metric chooses.
        generate: Generates samples of the best adapters, in this process only; None generates none.
        check: Checks the best adapter on the first rank, for the journal; None checks nothing.
        clock: Returns the time in seconds for the budget; never goes back.
    """

    is_interrupted: Callable[[], bool] = lambda: False
    judge: Judge | None = None
    generate: TextGenerator | None = None
    check: Check | None = None
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """The winner of a task.

    Attributes:
        winner: The winner's best evaluation.
        tied: Best evaluations of the jobs within noise of the winner.
        runner_up: The next best job; None if there is no other.
    """

    winner: LossPoint
    tied: Sequence[LossPoint]
    runner_up: str | None


def conclude(
    state: TrainingState, recorder: JournalRecorder, run_dir: RunDir, hooks: Hooks, check_stop: Callable[[], None]
) -> None:
    """Choose the winner of a task whose jobs have all ended, generate samples, check the winning adapter, and record
    the result.

    Args:
        check_stop: Raises an error if the run has to stop; called while adapters generate texts.

    Raises:
        NoResultError: No job was ever evaluated with a finite loss.
        TaskInterruptedError: The run was stopped while adapters generated texts; a resumed run generates them again.
    """
    chosen = _first_choice(state)
    if chosen is None:
        raise NoResultError(
            f"task {state.context.task.name!r}: expected at least one job to reach an evaluation with a finite loss, "
            f"found that {_no_winner_reason(state)}"
        )
    if hooks.judge is not None:
        chosen = _judged(state, recorder, run_dir, hooks.judge, check_stop) or chosen
    winner = chosen.winner
    if hooks.generate is not None:
        jobs = [winner.job] if chosen.runner_up is None else [winner.job, chosen.runner_up]
        with state.stopwatch.timing("evaluation"):
            samples = hooks.generate({job: run_dir.job(job, "best") for job in jobs}, check_stop)
        recorder.append(SamplesGenerated(samples=samples.rows, failure=samples.failure))
    if hooks.check is not None and state.context.ranks.is_first:
        recorder.append(AdapterChecked(job=winner.job, **asdict(hooks.check(run_dir.job(winner.job, "best")))))
    recorder.task_completed(winner, chosen.tied, state.jobs.values(), state.stopwatch.time_s)


def _first_choice(state: TrainingState) -> _Choice | None:
    """Return the job with the best metric; without validation rows, the job that did all its steps. None if there is no
    such job."""
    if not state.context.data.has_validation:
        finished = _finished(state)
        return None if finished is None else _Choice(winner=finished, tied=(), runner_up=None)
    leaders = state.selection.leaders(2)
    if not leaders:
        return None
    runner_up = leaders[1].job if len(leaders) > 1 else None
    return _Choice(winner=leaders[0], tied=state.selection.within_noise_of_winner(), runner_up=runner_up)


def _finished(state: TrainingState) -> LossPoint | None:
    """Return the last step of the job that did all its steps without validation; None if the job ended early."""
    done = (job for job in state.jobs.values() if state.selection.decision_on(job.id) is None)
    nan = math.nan
    points = (
        LossPoint(job=job.id, step=job.step, total_steps=job.total_steps, train_ema=nan, validation_loss=nan)
        for job in done
    )
    return next(points, None)


def _judged(
    state: TrainingState, recorder: JournalRecorder, run_dir: RunDir, judge: Judge, check_stop: Callable[[], None]
) -> _Choice | None:
    """Return the finalist with the best answers, the finalists within noise of it, and the runner-up; None if the
    scorer failed."""
    finalists = state.selection.leaders(state.context.task.num_finalists)
    with state.stopwatch.timing("evaluation"):
        judgement = judge({point.job: run_dir.job(point.job, "best") for point in finalists}, check_stop)
    scores = scores_of(judgement)
    recorder.append(FinalistsJudged(scores=tuple(scores), scorer=judgement.scorer, failure=judgement.failure))
    if judgement.failure:
        return None
    winner, tied = choose(finalists, {score.job: score for score in scores}, scorer=judgement.scorer)
    others = [score for score in scores if score.job != winner.job]
    runner_up = max(others, key=lambda score: score.score).job if others else None
    return _Choice(winner=winner, tied=tied, runner_up=runner_up)


def _no_winner_reason(state: TrainingState) -> str:
    decisions = [state.selection.decision_on(job) for job in state.jobs]
    failed = [decision for decision in decisions if decision and "row_tokens" in decision.evidence]
    unpaid = [decision for decision in decisions if decision and decision.reason is ExitReason.BUDGET]
    if unpaid:
        return (
            f"search.budget was spent before the first evaluation of {len(unpaid)} of {len(decisions)} jobs; raise "
            "it, or lower eval_steps"
        )
    by_user = [decision for decision in decisions if decision and decision.reason is ExitReason.STOPPED]
    if not failed and by_user:
        return (
            f"{len(by_user)} of {len(decisions)} jobs were stopped before their first evaluation; start a new run "
            "with: alto tune"
        )
    rewards = [decision.evidence["reward"] for decision in decisions if decision and "reward" in decision.evidence]
    if rewards and not failed:
        return f"a reward failed in {len(rewards)} of {len(decisions)} jobs: {rewards[0]}"
    if not failed:
        return f"all {len(decisions)} jobs diverged before that; lower the learning rates"
    row, fits = int(failed[0].evidence["row_tokens"]), state.trainer.passes.micro_batches.largest
    remedy = f"lower max_length to {fits} or fewer" if 0 < fits < row else "lower max_length"
    return (
        f"{len(failed)} of {len(decisions)} jobs have a row that does not fit into memory even alone: it has {row:,} "
        f"tokens (the largest micro-batch that fitted has {fits:,}); {remedy}, or set gradient_checkpointing: true"
    )


def hold_rung(
    state: TrainingState,
    recorder: JournalRecorder,
    lifecycle: JobLifecycle,
    judge: Judge | None,
    check_stop: Callable[[], None],
) -> RungResult:
    """Decide the next rung, which all jobs have reached, and end the jobs that it drops; for the arguments see
    :func:`_score_rung`."""
    selection = state.selection
    rung, index = selection.rungs.next, selection.rungs.held
    assert rung is not None
    # The selection counts the steps of a job that ran ahead, so the journal records them too.
    for job in state.jobs.values():
        recorder.losses(job)
    _score_rung(state, recorder, judge, check_stop)
    result = selection.select()
    dropped = tuple(decision.job for decision in result.dropped)
    recorder.append(WarmupEnded(rung=index, progress=rung.progress, kept=tuple(result.kept), dropped=dropped))
    for decision in result.dropped:
        lifecycle.end(state.jobs[decision.job], decision)
    return result


def _score_rung(
    state: TrainingState, recorder: JournalRecorder, judge: Judge | None, check_stop: Callable[[], None]
) -> None:
    """Score the jobs at the next rung if the task names this rung in ``select_by.at``. The selection and the journal
    get the scores; if scoring fails, the journal gets the reason and the metric decides.

    Args:
        state: State of the task; every job that trains waits at the rung.
        check_stop: Raises an error if the run has to stop.

    Raises:
        TaskInterruptedError: The run was stopped; a resumed run scores the rung again.
    """
    selection, scoring = state.selection, state.context.task.scoring
    rung, index = selection.rungs.next, selection.rungs.held
    if judge is None or rung is None or scoring is None or not scoring.is_at(rung.progress):
        return
    candidates = [one for one in selection.rungs.candidates() if math.isfinite(one.validation_loss)]
    if len(candidates) < 2:
        return
    try:
        judgement = judge({one.job: _adapter(state, one) for one in candidates}, check_stop)
    finally:
        state.slot_manager.bank.reinject()  # the judge has injected other adapters into the base model
    scores = scores_of(judgement)
    recorder.append(
        RungScored(
            rung=index,
            progress=rung.progress,
            scores=tuple(scores),
            scorer=judgement.scorer,
            failure=judgement.failure,
        )
    )
    selection.observe_scores(scores)


def _adapter(state: TrainingState, candidate: Candidate) -> Path:
    """Return the folder of the adapter that is scored for a job: its current adapter while it trains, or its best
    adapter if it has ended."""
    return state.slot_manager.saved(state.jobs[candidate.job], "last" if candidate.is_training else "best")
