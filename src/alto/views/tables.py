"""Rows of the job table, and sentences that explain why a job ended early.

The table shows only the configuration keys that vary between jobs; the values that all jobs share belong in the
settings.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from alto.records import ExitReason
from alto.runs import JobHistory, RunHistory, Stage
from alto.spec import LOSS
from alto.views.metrics import metric_name, shown_metrics
from alto.views.wording import (
    clean,
    describe_adapter_check,
    describe_config,
    describe_memory_event,
    describe_origin,
    format_count,
    format_loss,
    format_percent,
    format_score,
    format_setting,
    short_name,
    tidy_config,
    varying_keys,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTableRow:
    """One line of the job table.

    Attributes:
        job: Job id, safe to print.
        history: The job; a copy, because a live display draws the row while the job goes on.
        origin: Origin of the job, such as ``clone of job-001``, safe to print; empty if it came with the task.
        settings: Value of every configuration column of the table, as text, in the order of the columns.
        raw_settings: The same values unformatted, for sorting.
        label: The varying configuration in one line; empty if nothing varies.
        outcome: Reason of the exit, else the stage.
        explanation: Why the job ended early or was chosen, as a phrase; empty for other jobs.
        metrics: Values of the table's metrics at the job's best evaluation, in their order; None for a missing value.
        score: Score of the job's answers with its interval, as text: as a finalist, or at the last rung that scored it.
        raw_score: The score as a number; None if the job was not scored.
    """

    job: str
    history: JobHistory
    origin: str
    settings: tuple[str, ...]
    raw_settings: tuple[Any, ...]
    label: str
    outcome: str
    explanation: str
    is_best: bool
    progress: float
    metrics: tuple[float | None, ...]
    score: str
    raw_score: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTable:
    """The job table.

    Attributes:
        columns: Short names of the configuration columns.
        metrics: Names of the metrics that have columns.
        rows: Jobs, best first.
    """

    columns: tuple[str, ...]
    metrics: tuple[str, ...]
    rows: tuple[JobTableRow, ...]

    @property
    def has_scores(self) -> bool:
        """Whether the answers of any job were scored."""
        return any(row.raw_score is not None for row in self.rows)


def job_table(history: RunHistory) -> JobTable:
    """Return the job table of a run, finished or not: the chosen job first, the others by their best evaluation."""
    configs = {name: tidy_config(job.config) for name, job in history.jobs.items()}
    keys = varying_keys(list(configs.values()))
    metrics = shown_metrics(history)
    dropped_at = {name: outcome.progress for outcome in history.rungs for name in outcome.dropped}
    has_repetitions = any(job.configuration is not None for job in history.jobs.values())
    scores = {score.job: score for scored in history.rung_scores for score in scored.scores}
    scores |= {score.job: score for score in history.finalists}
    best = history.best
    rows: list[JobTableRow] = []
    for job in history.ranked():
        config, score = configs[job.job], scores.get(job.job)
        row = JobTableRow(
            job=clean(job.job),
            history=copy.copy(job),
            origin=describe_origin(job),
            settings=tuple(format_setting(config.get(key)) for key in keys),
            raw_settings=tuple(config.get(key) for key in keys),
            label=describe_config(config, keys),
            outcome=clean(job.outcome),
            explanation=explain_exit(job, rung_progress=dropped_at.get(job.job), has_repetitions=has_repetitions),
            is_best=job is best,
            progress=1.0 if job.stage is Stage.COMPLETED else job.progress,
            metrics=tuple(job.best_metrics.get(name) for name in metrics),
            score=format_score(score),
            raw_score=None if score is None else score.score,
        )
        rows.append(row)
    if any(row.explanation for row in rows):
        rows = [
            replace(row, explanation=_explain_choice(history)) if row.is_best and not row.explanation else row
            for row in rows
        ]
    return JobTable(columns=tuple(clean(short_name(key)) for key in keys), metrics=metrics, rows=tuple(rows))


def _explain_choice(history: RunHistory) -> str:
    """Return what the winner was chosen by; empty while the run is not finished."""
    if history.result is None:
        return ""
    if history.finalists:
        return "chosen by its answers"
    return f"chosen by {'validation loss' if history.metric == LOSS else metric_name(history.metric)}"


def run_notes(history: RunHistory) -> list[str]:
    """Return notices about the task's data and model (rows cut, skipped, …), the last out-of-memory event, and a
    difference when PEFT loads the best adapter; safe to print."""
    notes = [clean(note) for note in history.notes]
    if events := history.memory_events:
        times = "" if len(events) == 1 else f" ({len(events)} times so far)"
        notes.append(describe_memory_event(events[-1]) + times)
    if history.adapter_check is not None and history.adapter_check.status == "different":
        notes.append(describe_adapter_check(history.adapter_check))
    return notes


def explain_exit(job: JobHistory, *, rung_progress: float | None = None, has_repetitions: bool = False) -> str:
    """Explain in one phrase why ``job`` ended early, with the numbers of its evidence; empty if it did not.

    Evidence without the numbers of a known rule is listed as ``key value`` pairs.

    Args:
        rung_progress: Share of its steps at which a rung ranked it; None takes its own progress.
        has_repetitions: Whether jobs of its run repeat configurations; then configurations were ranked.
    """
    if job.exit_reason is None:
        return ""
    numbers = {key: value for key, value in job.exit_evidence.items() if isinstance(value, int | float)}
    sentence: str | None = None
    if job.exit_reason == ExitReason.DIVERGING:
        sentence = _explain_diverging(numbers)
    elif job.exit_reason == ExitReason.OVERFITTING:
        sentence = _explain_overfitting(numbers)
    elif job.exit_reason == ExitReason.COLLAPSED:
        sentence = _explain_collapsed(numbers)
    elif job.exit_reason == ExitReason.UNDERPERFORMING:
        progress = numbers.get("progress", job.progress if rung_progress is None else rung_progress)
        sentence = _explain_underperforming(numbers, progress, has_repetitions=has_repetitions)
    elif job.exit_reason == ExitReason.FAILED:
        sentence = explain_failure(job.exit_evidence)
    listed = ", ".join(f"{clean(key)} {format_setting(value)}" for key, value in job.exit_evidence.items())
    return sentence or listed or _BARE_REASONS.get(job.exit_reason, clean(job.exit_reason))


def explain_failure(evidence: Mapping[str, object]) -> str:
    """Explain in one phrase why a job failed; empty if the evidence is not that of a known failure."""
    numbers = {key: value for key, value in evidence.items() if isinstance(value, int | float)}
    if "adapter_bytes" in numbers:
        size = f"{numbers['adapter_bytes'] / 2**20:,.1f} MiB"
        return f"its adapter ({size} with gradient and optimizer state) does not fit into memory"
    if "row_tokens" in numbers:
        return f"a single row of {format_count(numbers['row_tokens'])} tokens does not fit into memory"
    reward = evidence.get("reward")
    return f"a reward failed: {clean(reward)}" if isinstance(reward, str) else ""


def _times(evidence: Mapping[str, float]) -> str:
    count = int(evidence.get("in_a_row", 1))
    return {1: "", 2: " twice in a row"}.get(count, f" {count} times in a row")


def _explain_diverging(evidence: Mapping[str, float]) -> str | None:
    named = {"train_loss": "training loss", "train_ema": "smoothed training loss", "validation_loss": "validation loss"}
    for key, name in named.items():
        if key in evidence and not math.isfinite(evidence[key]):
            return f"{name} became {format_loss(evidence[key])}"
    if {"train_slope", "validation_slope", "tau_slope"} <= evidence.keys():
        return (
            f"training loss rose by {evidence['train_slope']:.3g} and validation loss by "
            f"{evidence['validation_slope']:.3g} per evaluation{_times(evidence)} (allowed: {evidence['tau_slope']:g})"
        )
    return None


def _explain_collapsed(evidence: Mapping[str, float]) -> str | None:
    if not {"reward", "in_a_row"} <= evidence.keys():
        return None
    steps = f"for {evidence['in_a_row']:.0f} steps, with a mean reward of {evidence['reward']:.3g}"
    if "equal_groups" in evidence:
        return f"all completions of each prompt had equal rewards {steps}"
    if "entropy" in evidence:
        return f"tokens were certain (entropy {evidence['entropy']:.2g} nats) {steps}"
    if {"truncated", "first_reward"} <= evidence.keys():
        return (
            f"{format_percent(evidence['truncated'])} of the completions did not end {steps} "
            f"({evidence['first_reward']:.3g} at the start)"
        )
    return None


def _explain_overfitting(evidence: Mapping[str, float]) -> str | None:
    if {"rise", "margin", "validation_loss", "best_validation_loss"} <= evidence.keys():
        return (
            f"validation {format_loss(evidence['validation_loss'])} was {evidence['rise']:.2g} above its best "
            f"{format_loss(evidence['best_validation_loss'])}{_times(evidence)} (allowed: {evidence['margin']:.2g})"
        )
    if {"gap", "tau_gap", "validation_loss", "train_ema"} <= evidence.keys():
        return (
            f"validation {format_loss(evidence['validation_loss'])} was {format_percent(evidence['gap'])} above train "
            f"{format_loss(evidence['train_ema'])}{_times(evidence)} (allowed: {format_percent(evidence['tau_gap'])})"
        )
    return None


def _explain_underperforming(evidence: Mapping[str, float], progress: float, *, has_repetitions: bool) -> str | None:
    if not {"rank", "num_competing", "num_kept"} <= evidence.keys():
        return None
    what = " configurations" if has_repetitions else ""
    return (
        f"rank {evidence['rank']:.0f} of {evidence['num_competing']:.0f}{what} at {format_percent(progress)}: "
        f"{evidence['num_kept']:.0f} kept"
    )


_BARE_REASONS: Mapping[str, str] = {
    ExitReason.STOPPED: "stopped by the user",
    ExitReason.FAILED: "failed",
    ExitReason.BUDGET: "the task's budget was spent",
}
