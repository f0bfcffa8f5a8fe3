"""Turns the measurements into figures, rows and notes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from alto import EarlyExit
from alto.records import ExitReason
from benchmarks.baselines.job import BaselineJob
from benchmarks.dpo.measured import Measured, Tuned

__all__ = ["figures", "notes", "rows"]

PAPER_SAVED = {ExitReason.OVERFITTING: 0.24, ExitReason.DIVERGING: 0.12}
"""Share of the samples that the paper's early exit saves in preference tuning, by pattern."""


def figures(measured: Measured) -> dict[str, float]:
    batched, early_exit = measured.batched[measured.first_seed], measured.early_exit[measured.first_seed]
    deltas = accuracy_deltas(measured)
    paper = measured.replayed(EarlyExit(policy="paper"))
    loss_ratios = [
        measured.early_exit[seed].result.best_validation_loss / measured.batched[seed].result.best_validation_loss
        for seed in measured.batched
    ]
    return {
        "batched_over_sequential": measured.sequential_s / batched.duration_s,
        "early_exit_over_sequential": measured.sequential_s / early_exit.duration_s,
        "accuracy_delta_points": abs(statistics.mean(deltas)),
        "accuracy_delta_worst_points": max(map(abs, deltas)),
        "batched_accuracy": _mean_accuracy(measured.batched),
        "early_exit_accuracy": _mean_accuracy(measured.early_exit),
        "best_loss_ratio": statistics.mean(loss_ratios),
        "best_loss_ratio_worst": max(loss_ratios),
        "best_loss_over_sequential": early_exit.result.best_validation_loss
        / min(map(best_loss, measured.sequential.values())),
        "samples_saved": _mean(tuned.result.samples_saved for tuned in measured.early_exit.values()),
        "paper_samples_saved": paper.samples_saved,
        "paper_best_loss_ratio": paper.regret,
        "sequential_s": measured.sequential_s,
        "sequential_eval_s": sum(job.eval_s for job in measured.sequential.values()),
        "batched_s": batched.duration_s,
        "early_exit_s": early_exit.duration_s,
    }


def rows(measured: Measured) -> list[dict[str, Any]]:
    """Return one row per job of the first seed, per run of ALTO, and per reason of an exit."""
    early = {job.job: job for job in measured.early_exit[measured.first_seed].result.job_results}
    jobs = [
        {
            "job": job.job,
            "learning_rate": job.config["learning_rate"],
            "r": job.config["r"],
            "per_device_train_batch_size": job.config["per_device_train_batch_size"],
            "sequential_s": measured.sequential[job.job].duration_s,
            "sequential_eval_s": measured.sequential[job.job].eval_s,
            "sequential_best_loss": best_loss(measured.sequential[job.job]),
            "sequential_best_accuracy": best_accuracy(measured.sequential[job.job]),
            "batched_best_loss": job.best_validation_loss,
            "early_exit_best_loss": early[job.job].best_validation_loss,
            "exit": early[job.job].exit_reason,
            "steps": early[job.job].steps,
            "total_steps": job.total_steps,
        }
        for job in measured.batched[measured.first_seed].result.job_results
    ]
    runs = [
        {
            "seed": seed,
            "system": system,
            "duration_s": tuned.duration_s,
            "best_job": tuned.result.best_job,
            "validation_loss": tuned.validation.loss,
            "validation_accuracy": tuned.validation.accuracy,
            "heldout_loss": tuned.heldout.loss,
            "heldout_accuracy": tuned.heldout.accuracy,
            "samples_saved": tuned.result.samples_saved,
        }
        for system, tuned_by_seed in (("batched", measured.batched), ("early_exit", measured.early_exit))
        for seed, tuned in tuned_by_seed.items()
    ]
    return [*jobs, *runs, *exit_rows(measured)]


def exit_rows(measured: Measured) -> list[dict[str, Any]]:
    """Return the share of the samples that every pattern saves: the mean over seeds; by Algorithm 1, replayed on the
    curves of the first seed; and in the paper."""
    replayed = measured.replayed(EarlyExit(policy="paper")).saved_by
    return [
        {
            "exit": reason.value,
            "saved": _mean(tuned.saved_by.get(reason, 0.0) for tuned in measured.early_exit.values()),
            "saved_by_algorithm_1": replayed.get(reason, 0.0),
            "saved_in_the_paper": PAPER_SAVED.get(reason),
        }
        for reason in (ExitReason.OVERFITTING, ExitReason.DIVERGING, ExitReason.UNDERPERFORMING)
    ]


def notes(measured: Measured) -> list[str]:
    """Return the findings beside the figures, in sentences."""
    saved = [
        f"{row['exit']} {row['saved']:.1%} ({row['saved_by_algorithm_1']:.1%} by Algorithm 1 on the same curves"
        + (f"; the paper: {row['saved_in_the_paper']:.0%})" if row["saved_in_the_paper"] is not None else ")")
        for row in exit_rows(measured)
    ]
    deltas = ", ".join(f"{delta:+.2f}" for delta in accuracy_deltas(measured))
    return [
        f"Samples saved by pattern: {', '.join(saved)}.",
        f"Accuracy with early exit less accuracy without, points, seed by seed: {deltas}. One of the "
        f"{measured.num_heldout} held-out pairs is {100 / measured.num_heldout:.2f} points; chance is 50 %, give or "
        f"take {100 * math.sqrt(0.25 / measured.num_heldout):.1f}.",
    ]


def accuracy_deltas(measured: Measured) -> list[float]:
    """Return by seed how many points the winner with early exit is better on held-out pairs than the winner without."""
    return [
        100 * (tuned.heldout.accuracy - measured.batched[seed].heldout.accuracy)
        for seed, tuned in measured.early_exit.items()
    ]


def best_loss(job: BaselineJob) -> float:
    return min(item.loss if math.isfinite(item.loss) else math.inf for item in job.evaluations)


def best_accuracy(job: BaselineJob) -> float | None:
    """Return the reward accuracy at the lowest loss."""
    return min(job.evaluations, key=lambda item: item.loss if math.isfinite(item.loss) else math.inf).reward_accuracy


def _mean_accuracy(runs: Mapping[int, Tuned]) -> float:
    return _mean(tuned.heldout.accuracy for tuned in runs.values())


def _mean(values: Iterable[float]) -> float:
    return statistics.mean(list(values))
