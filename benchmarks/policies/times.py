"""Replays early-exit policies in time, including the time of evaluations, for any size of the validation set.

The unit is the time to train one job to its end. A recorded sweep is replayed as if its validation set had a given
share of the rows that a job trains, all of equal length; this set consists of the recorded validation rows, repeated.
Evaluations on some of the rows use the recorded losses of these rows. Between two evaluations with recorded rows, the
losses of rows are interpolated, and shifted so that their mean is the recorded one.

    python -m benchmarks.paper times --scale cpu
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from alto import EarlyExit
from alto.early_exit import (
    LEAST_PAIRS,
    RecordedJob,
    Recording,
    Selection,
    budgeted,
    evaluation_order,
    mean_loss,
    policy_from,
    replay,
)
from alto.records import LossPoint
from alto.spec.early_exit import ceil_fraction
from alto.spec.scoring import loss_scale
from benchmarks.common import option_parser, publish_figures
from benchmarks.paper import curves
from benchmarks.paper.recordings import is_preference, read_recordings

FORWARD_SHARE = 0.5
"""Time to evaluate a row, divided by the time to train it."""

RATIOS = (0.05, 0.2, 0.5, 1.0)
"""Validation tokens, divided by the training tokens of a job."""

NUM_JOBS = {"smoke": (8,), "cpu": (8, 16, 32, 60)}
NUM_SEEDS = {"smoke": 1, "cpu": 6}

STUDY = {
    0.05: {8: 3.0, 16: 5.3, 32: 8.5, 60: 12.3},
    0.2: {8: 2.6, 16: 4.6, 32: 7.3, 60: 10.3},
    0.5: {8: 2.7, 16: 4.5, 32: 6.6, 60: 9.0},
    1.0: {8: 2.6, 16: 4.2, 32: 5.8, 60: 7.9},
}
"""Speed-ups that a study of such policies found, by ratio and number of jobs."""


def key_of(ratio: float, num_jobs: int) -> str:
    return f"speed_up_{ratio:g}_{num_jobs}"


GOALS = {
    **{key_of(ratio, count): (">=", goal) for ratio, goals in STUDY.items() for count, goal in goals.items()},
    "lost": ("<=", 0.003),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = option_parser(__doc__, NUM_JOBS).parse_args(arguments)
    recordings = {
        name: recording
        for name, recording in read_recordings(options.scale).items()
        if all(job.loss_rows and job.start is not None for job in recording.jobs)
    }
    failures = curves.gate(recordings) + gate(recordings)
    found = [] if failures else measured(recordings, NUM_JOBS[options.scale], NUM_SEEDS[options.scale])
    return publish_figures(
        options,
        "times",
        gate_failures=failures,
        figures=lambda: figures(found),
        goals=GOALS,
        rows=table(found),
        notes=[],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The time of a policy and the job that it keeps.

    Attributes:
        training, evaluating: Time, divided by the time to train one job to its end.
        winner: The job that is kept.
        step: Step of its checkpoint.
    """

    training: float
    evaluating: float
    winner: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a policy on some jobs of a recording.

    Attributes:
        speed_up: Time to train all jobs to their ends, divided by the time of the policy.
        evaluating: Share of its time for evaluations.
        lost: Lost share of the best job's improvement on the frozen base, on all validation rows.
    """

    recording: str
    is_preference: bool
    policy: str
    ratio: float
    num_jobs: int
    speed_up: float
    evaluating: float
    lost: float


def measured(recordings: Mapping[str, Recording], counts: Sequence[int], num_seeds: int) -> list[Outcome]:
    """Measure the default policy, and the same with all rows at every twentieth of the steps, on draws of the jobs."""
    return [
        outcome(name, drawn(recording, count, seed), policy, ratio, seed)
        for name, recording in recordings.items()
        for count in counts
        if count <= len(recording.jobs)
        for seed in range(num_seeds if count < len(recording.jobs) else 1)
        for policy in ("default", "all rows")
        for ratio in RATIOS
    ]


def drawn(recording: Recording, count: int, seed: int) -> Recording:
    """Return the recording with ``count`` of its jobs."""
    return replace(recording, jobs=tuple(Random(seed).sample(recording.jobs, count)))


def outcome(name: str, recording: Recording, policy: str, ratio: float, seed: int) -> Outcome:
    samples = statistics.fmean(samples_of(job) for job in recording.jobs)
    num_rows = max(1, round(ratio * samples))
    row_cost = FORWARD_SHARE / samples
    settings = default_of(recording)
    if policy == "default":
        settings = budgeted(
            settings,
            steps=[job.total_steps for job in recording.jobs],
            num_rows=num_rows,
            row_cost=row_cost,
            every=0.05,
            least_rows=LEAST_PAIRS if is_preference(recording) else 0,
        )
    found = replayed(recording, settings, num_rows, row_cost, seed)
    total = found.training + found.evaluating
    return Outcome(
        recording=name,
        is_preference=is_preference(recording),
        policy=policy,
        ratio=ratio,
        num_jobs=len(recording.jobs),
        speed_up=len(recording.jobs) / total,
        evaluating=found.evaluating / total,
        lost=lost(recording, found),
    )


def default_of(recording: Recording) -> EarlyExit:
    """Return the default settings for a task of this kind, with rungs that fit the steps of its jobs."""
    preset = EarlyExit(preset="preferences" if is_preference(recording) else "default")
    return preset.resolved(earliest=recording.earliest_rung, steps={job.total_steps for job in recording.jobs})


def replayed(recording: Recording, settings: EarlyExit, num_rows: int, row_cost: float, seed: int) -> Replayed:
    """Run the policy of ``settings`` on ``recording``; its evaluations are on the numbers of rows that it plans."""
    order, jobs = evaluation_order(num_rows, seed), {job.job: job for job in recording.jobs}
    weights = (1.0,) * num_rows
    selection = Selection(
        policy_from(settings),
        ema_alpha=settings.ema_alpha,
        total_steps={job.job: job.total_steps for job in recording.jobs},
        loss_scales={job.job: loss_scale(job.config) for job in recording.jobs},
        row_weights=weights,
    )
    at_start = settings.evaluations[0][1] if settings.evaluations else num_rows
    num_evaluated = at_start
    for job in recording.jobs:
        assert job.start is not None
        rows = rows_at(job, 0, job.start.validation_loss, order)[:at_start]
        selection.observe_base(job.job, replace(job.start, validation_loss=mean_loss(rows, weights), loss_rows=rows))
    left = {job.job: planned(job, settings, num_rows) for job in recording.jobs}
    played = dict.fromkeys(jobs, 0)
    while selection.training:
        for name in selection.training:
            while selection.is_training(name) and not selection.rungs.is_waiting(name):
                job = jobs[name]
                step, loss, count = left[name].pop(0) if left[name] else (len(job.train_losses), math.nan, 0)
                losses = job.train_losses[played[name] : step]
                verdict = selection.observe_losses(name, played[name] + 1, losses)
                played[name] = step
                if verdict is None:
                    rows = rows_at(job, step, loss, order)[:count]
                    found = mean_loss(rows, weights) if all(map(math.isfinite, rows)) else math.inf
                    selection.observe(name, step, found, loss_rows=rows)
                    num_evaluated += count
        while selection.rungs.is_ready():
            selection.select()
    num_evaluated += measure_best(selection, jobs, settings, order, weights)
    winner = selection.winner()
    assert winner is not None
    steps = {name: job.total_steps for name, job in jobs.items()}
    ends = {name: decision.step for name in jobs if (decision := selection.decision_on(name)) is not None}
    return Replayed(
        training=sum(ends.get(name, total) / total for name, total in steps.items()),
        evaluating=num_evaluated * row_cost,
        winner=winner.job,
        step=winner.step,
    )


def measure_best(
    selection: Selection,
    jobs: Mapping[str, RecordedJob],
    settings: EarlyExit,
    order: Sequence[int],
    weights: Sequence[float],
) -> int:
    """Measure the best adapters as a run does in the end; return the number of rows that this takes."""
    if settings.final_evaluations is None:
        return 0
    count, num_rows = settings.final_evaluations
    best: Sequence[LossPoint] = selection.leaders(count)
    for point in best:
        job = jobs[point.job]
        rows = rows_at(job, point.step, dict(job.evaluations)[point.step], order)[:num_rows]
        selection.observe_measured(point.job, mean_loss(rows, weights), rows)
    return len(best) * num_rows


def planned(job: RecordedJob, settings: EarlyExit, num_rows: int) -> list[tuple[int, float, int]]:
    """Return the recorded evaluations that a run makes: step, loss and number of rows."""
    if settings.evaluations is None:
        return [(step, loss, num_rows) for step, loss in job.evaluations]
    counts: dict[int, int] = {}
    for progress, count in settings.evaluations:
        wanted = max(1, ceil_fraction(progress, job.total_steps))
        step = next((step for step, _ in job.evaluations if step >= wanted), job.evaluations[-1][0])
        counts[step] = max(count, counts.get(step, 0))
    losses = dict(job.evaluations)
    return [(step, losses[step], count) for step, count in sorted(counts.items())]


def rows_at(job: RecordedJob, step: int, loss: float, order: Sequence[int]) -> tuple[float, ...]:
    """Return the losses of the validation rows after ``step`` steps, in ``order``; their mean is ``loss``."""
    before = max((at for at in job.loss_rows if at <= step), default=min(job.loss_rows))
    after = min((at for at in job.loss_rows if at >= step), default=max(job.loss_rows))
    share = 0.0 if before == after else math.log(step / max(before, 0.5)) / math.log(after / max(before, 0.5))
    rows = [one + share * (other - one) for one, other in zip(job.loss_rows[before], job.loss_rows[after], strict=True)]
    if not math.isfinite(loss) or not all(map(math.isfinite, rows)):
        return (loss,) * len(order)
    shift = loss - statistics.fmean(rows)
    return tuple(rows[row % len(rows)] + shift for row in order)


def samples_of(job: RecordedJob) -> int:
    """Return the number of rows that a job trains."""
    return (
        job.total_steps
        * int(job.config["per_device_train_batch_size"])
        * int(job.config.get("gradient_accumulation_steps", 1))
    )


def lost(recording: Recording, found: Replayed) -> float:
    jobs = {job.job: job for job in recording.jobs}
    best = min(loss for job in recording.jobs for _, loss in job.evaluations if math.isfinite(loss))
    start = max(job.start.validation_loss for job in recording.jobs if job.start is not None)
    return (dict(jobs[found.winner].evaluations)[found.step] - best) / (start - best)


def figures(found: Sequence[Outcome]) -> dict[str, float]:
    """Return means of the default policy over recordings: speed-ups for supervised fine-tuning and for preferences."""
    ours = [one for one in found if one.policy == "default"]
    answers, pairs = ([one for one in ours if one.is_preference is kind] for kind in (False, True))
    speed_ups = {
        ("dpo_" if of_kind is pairs else "") + key_of(ratio, count): statistics.fmean(
            one.speed_up for one in of_kind if (one.ratio, one.num_jobs) == (ratio, count)
        )
        for of_kind in (answers, pairs)
        for ratio, count in sorted({(one.ratio, one.num_jobs) for one in of_kind})
    }
    return {
        **speed_ups,
        "least_speed_up": min(one.speed_up for one in ours),
        "evaluating": statistics.fmean(one.evaluating for one in answers),
        "lost": statistics.fmean(one.lost for one in answers),
        "lost_worst": max(one.lost for one in answers),
        "dpo_lost": statistics.fmean(one.lost for one in pairs),
        "lost_on_all_rows": statistics.fmean(
            one.lost for one in found if one.policy == "all rows" and not one.is_preference
        ),
    }


def table(found: Sequence[Outcome]) -> list[dict[str, object]]:
    """Return means by recording and policy."""
    rows: list[dict[str, object]] = []
    for name, policy in dict.fromkeys((one.recording, one.policy) for one in found):
        for ratio in RATIOS:
            some = [one for one in found if (one.recording, one.policy, one.ratio) == (name, policy, ratio)]
            means = {
                key: statistics.fmean(getattr(one, key) for one in some) for key in ("speed_up", "evaluating", "lost")
            }
            rows.append({"recording": name, "policy": policy, "ratio": ratio, **means})
    return rows


def gate(recordings: Mapping[str, Recording]) -> list[str]:
    """Return the recordings for which this replay on all rows keeps another checkpoint than the executor's replay."""
    failures = []
    for name, recording in recordings.items():
        num_rows = len(next(iter(recording.jobs[0].loss_rows.values())))
        settings = default_of(recording)
        ours = replayed(recording, settings, num_rows, 0.0, seed=0)
        theirs = replay(recording, policy_from(settings), settings.ema_alpha)
        if (ours.winner, ours.step) != (theirs.winner, theirs.winner_step):
            failures.append(
                f"{name}: expected {theirs.winner} at step {theirs.winner_step}, found {ours.winner} at {ours.step}"
            )
    return failures
