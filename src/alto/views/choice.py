"""Notices about how the winner of a run was chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence

from alto.records import ExitReason, Lead
from alto.runs import JobHistory, RunHistory
from alto.runs.lead import ConfigurationHistory, lead_of_winner, repeated_configurations
from alto.spec import LOSS, loss_scale
from alto.views.tables import explain_failure
from alto.views.wording import format_percent

_MAX_NAMES = 3


def choice_notes(history: RunHistory) -> tuple[str, ...]:
    """Return notices about the winner of a finished run; empty if none applies.

    They say whether its scorer or a measurement of held-out rows failed, which other jobs are within noise of it, why
    it won although early exit had ended it as underperforming, and where a budget ended it.
    """
    winner = history.best
    if history.result is None or winner is None:
        return ()
    notes = []
    if configurations := repeated_configurations(history):
        notes.append(_repetitions_note(winner, configurations))
    ranked = "validation loss" if history.metric == LOSS else history.metric.replace("_", " ")
    notes += [
        f"select_by: at the rung at {100 * scored.progress:.3g} % the scorer {scored.scorer} failed "
        f"({scored.failure}), so the {ranked} ranked the jobs there."
        for scored in history.rung_scores
        if scored.failure
    ]
    if history.scorer_failure:
        notes.append(
            f"select_by: the scorer {history.scorer} failed ({history.scorer_failure}), so the {ranked} chose "
            f"{winner.job}."
        )
    notes += _measuring_notes(history)
    if tied := [other.job for other in history.result.within_noise]:
        notes.append(_tied_jobs_note(history, winner, tied))
    lead = lead_of_winner(history)
    if lead is not None and lead.metric == LOSS and lead.is_within_noise:
        notes.append(_close_losses_note(history, winner, lead))
    if winner.exit_reason == ExitReason.UNDERPERFORMING:
        notes.append(_why_underperforming(history, winner))
    if winner.exit_reason == ExitReason.BUDGET:
        notes.append(
            f"search.budget was spent when {winner.job} had done {winner.step} of {winner.total_steps} steps: a larger "
            "one may give a better adapter."
        )
    return tuple(notes)


def _measuring_notes(history: RunHistory) -> list[str]:
    """Return notes about held-out rows that could not be measured; jobs without a test loss share one."""
    notes, untested = [], {}
    for (job, split), evidence in history.measuring_failures.items():
        why = explain_failure(evidence)
        if split == "test":
            untested[job or "the starting point"] = why
        elif job:
            notes.append(f"{job} could not be measured once more at the end ({why}), so its earlier evaluation counts.")
        else:
            notes.append(f"The starting point could not be measured before training ({why}).")
    if untested:
        why = next(iter(untested.values()))
        notes.append(f"The test rows could not be measured ({why}), so there is no test loss of {_named([*untested])}.")
    return notes


def _tied_jobs_note(history: RunHistory, winner: JobHistory, tied: Sequence[str]) -> str:
    names = _named(tied)
    metric = (history.scorer if history.finalists else history.metric).replace("_", " ")
    num_rows = history.started.num_validation if history.started is not None else 0
    if history.finalists:
        num_rows = history.finalists[0].num_questions
    jobs = [history.jobs[job] for job in (winner.job, *tied) if job in history.jobs]
    if len({loss_scale(job.config) for job in jobs}) == 1:
        decided = "the lowest validation loss"
    elif all(job.start is not None and 0 < job.start.validation_loss < math.inf for job in jobs):
        decided = "the lowest validation loss, as a share of the base's,"
    else:
        decided = f"the highest {metric} (losses of different scale)"
    return f"{metric}: {num_rows} validation rows cannot separate {winner.job} from {names}; {decided} decided."


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")


def _repetitions_note(winner: JobHistory, configurations: Sequence[ConfigurationHistory]) -> str:
    metric = configurations[0].metric.replace("_", " ")
    first, *others = map(_spread, configurations)
    next_best = f"; the next best configuration ({configurations[1].jobs[0].job}): {others[0]}" if others else ""
    last = "; configurations with a job that diverged or failed rank last"
    ranked = (
        f"Configurations were ranked by their means{last if any(one.has_failed for one in configurations) else ''}."
    )
    return f"{metric} of {winner.job}'s configuration: {first}{next_best}. {ranked}"


def _spread(one: ConfigurationHistory) -> str:
    seeds = "1 seed" if len(one.jobs) == 1 else f"{len(one.jobs)} seeds"
    if math.isnan(one.mean):
        return f"unknown over {seeds}, as a job has no finite loss"
    return f"{one.mean:.4g}{'' if math.isnan(one.deviation) else f' ± {one.deviation:.2g}'} over {seeds}"


def _close_losses_note(history: RunHistory, winner: JobHistory, lead: Lead) -> str:
    low, high = lead.interval
    return (
        f"loss: {lead.num_rows} validation rows cannot separate {winner.job} from {describe_runner_up(history, lead)}: "
        f"its loss is lower by {lead.difference:.2g}, with a 95 % interval from {low:.2g} to {high:.2g}."
    )


def describe_runner_up(history: RunHistory, lead: Lead) -> str:
    """Return the name of the next best job, and the share of its steps at which it ended if the winner trained for
    longer: ``job-004 (ended at 60 % of its steps)``."""
    best, other = history.best, history.jobs.get(lead.runner_up)
    if best is None or other is None or other.progress >= best.progress:
        return lead.runner_up
    return f"{lead.runner_up} (ended at {format_percent(other.progress)} of its steps)"


def _why_underperforming(history: RunHistory, winner: JobHistory) -> str:
    evidence = {key: float(value) for key, value in winner.exit_evidence.items()}
    rank = f", as rank {evidence['rank']:.0f} of {evidence['num_competing']:.0f}" if "num_competing" in evidence else ""
    dropped_at = (rung.progress for rung in reversed(history.rungs) if winner.job in rung.dropped)
    progress = next(dropped_at, winner.progress)
    why = "no job that continued has a better adapter"
    if history.finalists:
        is_counted = all(score.num_correct is not None for score in history.finalists)
        why = "it gave the most right answers" if is_counted else "its answers had the best score"
        if history.result is not None and history.result.within_noise:
            why = "no finalist's score was better by more than noise"
    is_papers = history.started is not None and history.started.early_exit.get("policy") == "paper"
    remedy = "A larger select_ratio lets" if is_papers else "A larger early_exit.min_kept, or later rungs, lets"
    return (
        f"{winner.job} was ended as underperforming at {100 * progress:.3g} % of its steps{rank}, and won "
        f"nevertheless with its adapter of step {winner.best_step} of {winner.total_steps}: {why}. "
        f"{remedy} more jobs train for longer."
    )
