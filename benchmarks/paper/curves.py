"""Experiments on recorded sweeps: nothing is trained, so they take seconds at any scale."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes

from alto import EarlyExit
from alto.early_exit import RecordedJob, Recording, ReplayResult, policy_from, replay
from benchmarks.paper.recordings import (
    best_accuracy,
    best_loss,
    by_batch_size,
    is_preference,
    loss_at,
    quarter_kept,
    spearman,
)

__all__ = [
    "Found",
    "batch_size",
    "draw_batch_size",
    "draw_early_exit_quality",
    "draw_patterns",
    "draw_rank_correlation",
    "draw_samples_saved",
    "draw_sensitivity",
    "draw_warmup_sweep",
    "early_exit_quality",
    "gate",
    "patterns",
    "rank_correlation",
    "samples_saved",
    "sensitivity",
    "warmup_sweep",
]

PAPER = EarlyExit(policy="paper")
PATTERNS = ("diverging", "overfitting", "underperforming")
SHARES = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
WARMUPS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2)

Recordings = Mapping[str, Recording]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of an experiment on recordings.

    Attributes:
        figures: See :class:`common.Result`, also for rows and notes.
    """

    figures: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = field(default=())


def default_of(recording: Recording) -> EarlyExit:
    """Return the default policy for a task of this kind."""
    preset = "preferences" if is_preference(recording) else "default"
    return EarlyExit(preset=preset).resolved(earliest=recording.earliest_rung)


def replayed(recording: Recording, settings: EarlyExit) -> ReplayResult:
    """Return the result of a policy on a recording."""
    return replay(recording, policy_from(settings), settings.ema_alpha)


# -- sensitivity ------------------------------------------------------------------------------------------------------


def sensitivity(recordings: Recordings) -> Found:
    """Measure how much the best validation loss differs between the configurations of a sweep, and the best reward
    accuracy for sweeps of preference tuning."""
    rows = []
    for name, recording in recordings.items():
        losses = sorted(best_loss(job) for job in recording.jobs)
        finite = [loss for loss in losses if math.isfinite(loss)]
        base = start_of(recording)
        rows.append(
            {
                "recording": name,
                "jobs": len(losses),
                "base": base,
                "best": finite[0],
                "median": statistics.median(finite),
                "worst": finite[-1],
                "median_improvement_share": (base - statistics.median(finite)) / (base - finite[0]),
                "losses": finite,
                **_accuracy_spread(recording),
            }
        )
    measured = [row for row in rows if "accuracies" in row]
    return Found(
        figures={
            "median_improvement_share": statistics.fmean(row["median_improvement_share"] for row in rows),
            "median_improvement_share_lowest": min(row["median_improvement_share"] for row in rows),
            **({"recordings_with_accuracy": float(len(measured)), **_accuracy_figures(measured)} if measured else {}),
        },
        rows=rows,
        notes=[
            "The improvement of a configuration is how far its best validation loss lies below that of the frozen "
            "base.",
            "The accuracy of a configuration is the best reward accuracy of its evaluations: the share of the "
            "validation pairs whose chosen reply earns more, 50 % before the first step. Accuracies are in per cent, "
            "differences in points, all of them means over the recordings that have accuracies."
            if measured
            else "No recording has accuracies.",
        ],
    )


def _accuracy_spread(recording: Recording) -> dict[str, Any]:
    """Return columns with the best, median and worst accuracy of the configurations, in per cent; none if the recording
    has no accuracies."""
    found = [accuracy for job in recording.jobs if (accuracy := best_accuracy(job)) is not None]
    if not found:
        return {}
    accuracies = sorted((100 * accuracy for accuracy in found), reverse=True)
    return {
        "best_accuracy": accuracies[0],
        "median_accuracy": statistics.median(accuracies),
        "worst_accuracy": accuracies[-1],
        "accuracies": accuracies,
    }


def _accuracy_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    best, median, worst = (
        statistics.fmean(row[f"{place}_accuracy"] for row in rows) for place in ("best", "median", "worst")
    )
    return {
        "best_accuracy": best,
        "median_accuracy": median,
        "worst_accuracy": worst,
        "best_over_median_points": best - median,
        "best_over_worst_points": best - worst,
    }


def draw_sensitivity(found: Found, axes: Sequence[Axes]) -> None:
    axis, of_accuracy = axes
    for number, row in enumerate(found.rows):
        shares = [(row["base"] - loss) / (row["base"] - row["best"]) for loss in row["losses"]]
        # The exact value below -50 % does not matter.
        axis.plot([100 * max(-0.5, share) for share in shares], [number] * len(shares), "|", markersize=11)
    axis.set_yticks(range(len(found.rows)), [row["recording"] for row in found.rows])
    axis.set_xlabel("improvement, % of the best configuration's")
    rows = [row for row in found.rows if "accuracies" in row]
    if not rows:
        of_accuracy.set_axis_off()
        of_accuracy.text(0.5, 0.5, "no recording has accuracies", ha="center", transform=of_accuracy.transAxes)
        return
    for number, row in enumerate(rows):
        of_accuracy.plot(row["accuracies"], [number] * len(row["accuracies"]), "|", markersize=11)
    of_accuracy.axvline(50, color="black", linestyle=":", label="before the first step")
    of_accuracy.set_yticks(range(len(rows)), [row["recording"] for row in rows])
    of_accuracy.set_xlabel("best reward accuracy, %")
    of_accuracy.legend(fontsize=8, frameon=False)


def start_of(recording: Recording) -> float:
    """Return the validation loss of the frozen base."""
    return max(job.start.validation_loss for job in recording.jobs if job.start is not None)


# -- batch size -------------------------------------------------------------------------------------------------------


def batch_size(recordings: Recordings) -> Found:
    """Measure the best loss with each batch size, divided by the best of the sweep."""
    rows = [
        {"recording": name, "batch_size": size, "best": min(map(best_loss, part.jobs)), "regret": regret}
        for name, recording in recordings.items()
        for size, part in by_batch_size(recording).items()
        for regret in [min(map(best_loss, part.jobs)) / min(map(best_loss, recording.jobs))]
    ]
    several = {row["recording"] for row in rows if row["batch_size"] != 1}
    best = {name: min((row for row in rows if row["recording"] == name), key=_best) for name in several}
    return Found(
        figures={
            "regret_of_worst_size": max(row["regret"] for row in rows if row["recording"] in several),
            "smallest_is_best": sum(
                row["batch_size"] == min(other["batch_size"] for other in rows if other["recording"] == name)
                for name, row in best.items()
            ),
            "recordings": float(len(several)),
        },
        rows=rows,
    )


def _best(row: Mapping[str, Any]) -> float:
    return float(row["best"])


def draw_batch_size(found: Found, axes: Sequence[Axes]) -> None:
    _draw_regret_by_batch_size(found, axes[0], "best loss / best of the sweep")


def _draw_regret_by_batch_size(found: Found, axis: Axes, label: str) -> None:
    """Draw a line for every recording that has several batch sizes."""
    for name in dict.fromkeys(row["recording"] for row in found.rows):
        of = [row for row in found.rows if row["recording"] == name]
        if len(of) > 1:
            axis.plot([row["batch_size"] for row in of], [row["regret"] for row in of], "o-", label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes := sorted({row["batch_size"] for row in found.rows}), [str(size) for size in sizes])
    axis.set_xlabel("batch size")
    axis.set_ylabel(label)
    axis.legend(fontsize=8, frameon=False)


# -- patterns ---------------------------------------------------------------------------------------------------------


def patterns(recordings: Recordings) -> Found:
    """Count the jobs that Algorithm 1 ends, by pattern, and find the curves of one job of each pattern."""
    rows: list[dict[str, Any]] = []
    shares: dict[str, list[float]] = {pattern: [] for pattern in PATTERNS}
    exits = {name: replayed(recording, PAPER).exits for name, recording in recordings.items()}
    for name, recording in recordings.items():
        counts = Counter(reason for reason, _ in exits[name].values())
        for pattern in PATTERNS:
            shares[pattern].append(counts[pattern] / len(recording.jobs))
        rows.append({"recording": name, "jobs": len(recording.jobs), **{key: counts[key] for key in PATTERNS}})
    for pattern in PATTERNS:
        if (example := _example(recordings, exits, pattern)) is not None:
            rows.append({"pattern": pattern, **example})
    return Found(
        figures={f"{pattern}_share": statistics.fmean(values) for pattern, values in shares.items()},
        rows=rows,
        notes=[
            "Shares of the jobs of a sweep that the paper's Algorithm 1 ends by each pattern, means over the "
            "recordings; the others train to their end."
        ],
    )


def _example(
    recordings: Recordings, exits: Mapping[str, Mapping[str, tuple[str, int]]], pattern: str
) -> dict[str, Any] | None:
    """Return the curves of the job of a pattern whose loss fell most after its exit, as a share of its loss before;
    None if no job of the pattern lost anything."""
    found: tuple[float, str, RecordedJob, int] | None = None
    for name, recording in recordings.items():
        jobs = {job.job: job for job in recording.jobs}
        for job, (reason, step) in exits[name].items():
            if reason != pattern:
                continue
            before = min((loss for at, loss in jobs[job].evaluations if at <= step and loss > 0), default=math.inf)
            lost = jobs[job].evaluations[-1][1] / before
            # A slow job loses nothing, so take the one that stays highest above the best of its sweep.
            if pattern == "underperforming":
                lost = best_loss(jobs[job]) / min(map(best_loss, recording.jobs))
            if math.isfinite(lost) and (found is None or lost > found[0]):
                found = lost, name, jobs[job], step
    if found is None:
        return None
    _, name, job, step = found
    smooth, average = [], job.train_losses[0]
    for loss in job.train_losses:
        average = PAPER.ema_alpha * loss + (1 - PAPER.ema_alpha) * average
        smooth.append(average)
    every = max(1, len(smooth) // 100)
    start = [] if job.start is None else [(0, job.start.validation_loss)]
    return {
        "recording": name,
        "job": job.job,
        "learning_rate": job.config["learning_rate"],
        "exit_step": step,
        "total_steps": job.total_steps,
        "train": [(at + 1, smooth[at]) for at in range(0, len(smooth), every)],
        "validation": [*start, *job.evaluations],
    }


def draw_patterns(found: Found, axes: Sequence[Axes]) -> None:
    examples = {row["pattern"]: row for row in found.rows if "pattern" in row}
    for axis, pattern in zip(axes, PATTERNS, strict=True):
        axis.set_title(pattern)
        if (row := examples.get(pattern)) is None:
            axis.text(0.5, 0.5, "no job of the recordings", ha="center", transform=axis.transAxes)
            continue
        axis.plot(*zip(*row["train"], strict=True), label="training (smoothed)", linewidth=1)
        axis.plot(*zip(*row["validation"], strict=True), "o-", label="validation", markersize=4)
        axis.axvline(row["exit_step"], color="black", linestyle=":", label="ended")
        axis.set_xlabel(f"step ({row['recording']}, lr {row['learning_rate']:g})")
    axes[0].set_ylabel("loss")
    axes[0].legend(fontsize=8, frameon=False)


# -- ranks ------------------------------------------------------------------------------------------------------------


def rank_correlation(recordings: Recordings) -> Found:
    """Measure how well the order of jobs at a share of their steps agrees with the order of their best losses."""
    rows = [
        {"recording": name, "share": share, "spearman": spearman(recording, share)}
        for name, recording in recordings.items()
        for share in SHARES
    ]
    at_warmup = [row["spearman"] for row in rows if row["share"] == 0.05]
    return Found(
        figures={"spearman_at_5_percent": statistics.fmean(at_warmup), "spearman_at_5_percent_lowest": min(at_warmup)},
        rows=rows,
    )


def draw_rank_correlation(found: Found, axes: Sequence[Axes]) -> None:
    (axis,) = axes
    for name in dict.fromkeys(row["recording"] for row in found.rows):
        of = [row for row in found.rows if row["recording"] == name]
        axis.plot([100 * row["share"] for row in of], [row["spearman"] for row in of], "o-", markersize=3, label=name)
    axis.axvline(5, color="black", linestyle=":")
    axis.set_xscale("log")
    axis.set_xticks((1, 5, 20, 100), ("1", "5", "20", "100"))
    axis.set_xlabel("% of the steps")
    axis.set_ylabel("Spearman with the best loss")
    axis.legend(fontsize=7, frameon=False)


def warmup_sweep(recordings: Recordings) -> Found:
    """Measure how much of the final best quarter remains if the best quarter after a warmup of 1 to 20 % of the steps
    is kept."""
    rows = []
    for name, recording in recordings.items():
        for share in WARMUPS:
            coverage, keeps_winner = quarter_kept(recording, share)
            rows.append({"recording": name, "warmup": share, "coverage": coverage, "winner_kept": keeps_winner})
    figures: dict[str, float] = {}
    for share in (0.01, 0.05, 0.1, 0.2):
        of = [row for row in rows if row["warmup"] == share]
        figures[f"coverage_{share:g}"] = statistics.fmean(row["coverage"] for row in of)
        figures[f"winners_kept_{share:g}"] = sum(row["winner_kept"] for row in of) / len(of)
    return Found(figures=figures, rows=rows, notes=["winners_kept is the share of recordings whose winner stays."])


def draw_warmup_sweep(found: Found, axes: Sequence[Axes]) -> None:
    (axis,) = axes
    for key, label in (("coverage", "final best quarter kept"), ("winner_kept", "winner kept")):
        means = [statistics.fmean(row[key] for row in found.rows if row["warmup"] == share) for share in WARMUPS]
        axis.plot([100 * share for share in WARMUPS], [100 * mean for mean in means], "o-", label=label)
    axis.set_ylim(0, 103)
    axis.set_xlabel("warmup, % of the steps")
    axis.set_ylabel("%, mean over recordings")
    axis.legend(fontsize=8, frameon=False)


# -- early exit -------------------------------------------------------------------------------------------------------


def samples_saved(recordings: Recordings) -> Found:
    """Measure what the default policy and Algorithm 1 save, by pattern, and what they lose."""
    rows = []
    for name, recording in recordings.items():
        for policy, settings in (("default", default_of(recording)), ("paper", PAPER)):
            result = replayed(recording, settings)
            rows.append(
                {
                    "recording": name,
                    "policy": policy,
                    "saved": result.samples_saved,
                    **{pattern: result.saved_by.get(pattern, 0.0) for pattern in PATTERNS},
                    "regret": result.regret,
                }
            )
    figures = {}
    for policy in ("default", "paper"):
        of = [row for row in rows if row["policy"] == policy]
        for key in ("saved", *PATTERNS):
            figures[f"{policy}_{key}"] = statistics.fmean(row[key] for row in of)
        figures[f"{policy}_regret_worst"] = max(row["regret"] for row in of)
    return Found(
        figures=figures,
        rows=rows,
        notes=[
            "regret is the best validation loss that a policy keeps over the best of the sweep; 1 keeps the winner."
        ],
    )


def draw_samples_saved(found: Found, axes: Sequence[Axes]) -> None:
    for axis, policy in zip(axes, ("default", "paper"), strict=True):
        rows = [row for row in found.rows if row["policy"] == policy]
        left = [0.0] * len(rows)
        for pattern in PATTERNS:
            values = [100 * row[pattern] for row in rows]
            axis.barh(range(len(rows)), values, left=left, label=pattern)
            left = [one + other for one, other in zip(left, values, strict=True)]
        names = [row["recording"] for row in rows]
        axis.set_yticks(range(len(rows)), names if policy == "default" else [""] * len(rows))
        axis.set_xlim(0, 100)
        axis.set_xlabel("samples saved, %")
        axis.set_title(policy if policy == "default" else "Algorithm 1")
    axes[1].legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=1)


def early_exit_quality(recordings: Recordings) -> Found:
    """Measure for each batch size separately the best loss with early exit, divided by that of training every job to
    its end."""
    rows = []
    for name, recording in recordings.items():
        for size, part in by_batch_size(recording).items():
            result = replayed(part, default_of(part))
            rows.append(
                {
                    "recording": name,
                    "batch_size": size,
                    "jobs": len(part.jobs),
                    "regret": result.regret,
                    "saved": result.samples_saved,
                }
            )
    return Found(
        figures={
            "regret_worst": max(row["regret"] for row in rows),
            "regret_mean": statistics.fmean(row["regret"] for row in rows),
            "winners_kept": sum(row["regret"] == 1 for row in rows) / len(rows),
            "saved_mean": statistics.fmean(row["saved"] for row in rows),
        },
        rows=rows,
        notes=["Sweeps of few jobs can save less: the winner alone is a large part of them."],
    )


def draw_early_exit_quality(found: Found, axes: Sequence[Axes]) -> None:
    _draw_regret_by_batch_size(found, axes[0], "best loss kept / best of all")


def gate(recordings: Recordings) -> list[str]:
    """Return the faults of the recordings; empty if a policy that ends no job keeps the lowest loss of each."""
    failures = []
    for name, recording in recordings.items():
        result = replayed(recording, EarlyExit(enabled=False))
        lowest = min(map(best_loss, recording.jobs))
        if result.best_kept != lowest or result.samples_saved != 0:
            failures.append(f"{name}: expected {lowest} kept and nothing saved, found {result.best_kept}")
        if any(loss_at(job, 1.0) != job.evaluations[-1][1] for job in recording.jobs if math.isfinite(best_loss(job))):
            failures.append(f"{name}: expected the last evaluation at the last step, found another one")
    return failures
