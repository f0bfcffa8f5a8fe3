"""Progress of a run, its remaining time, and the savings of early exit: the numbers that tables and pages share."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alto.base import is_number
from alto.errors import SpecError
from alto.records import Rung
from alto.runs.history import RunHistory
from alto.runs.job_history import JobHistory
from alto.spec import places_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The progress of a run, its speed and its remaining time.

    Attributes:
        fraction_done: Fraction of the samples expected to be trained in total that are trained, in [0, 1].
        remaining_s: Seconds until its end; None if nothing was measured beforehand and nothing was trained.
        tokens_per_s: Tokens trained per second over the last three minutes, evaluations included. None if nothing was
            trained since the run began or was resumed, or the journal does not have the tokens of the rows.
    """

    fraction_done: float
    remaining_s: float | None
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitTotal:
    """Totals of one outcome over all jobs.

    Attributes:
        outcome: Exit reason, or stage of the jobs.
        share: Saved samples as a share of all budgeted samples.
    """

    outcome: str
    num_jobs: int
    samples_trained: int
    samples_saved: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RungCost:
    """The samples trained between two rungs.

    Attributes:
        until: Share of a job's own steps at which the second rung ranks; 1 after the last rung.
        num_kept, num_dropped: Jobs that the second rung kept and ended; None after the last rung.
        samples_trained: Rows that all jobs have seen since the previous rung.
    """

    until: float
    num_kept: int | None
    num_dropped: int | None
    samples_trained: int
    share: float


def rung_costs(history: RunHistory) -> list[RungCost]:
    """Return the cost of each rung in order, and of the part after the last one; empty if no rung was decided."""
    costs, before, total = [], 0, max(1, history.samples_trained)
    ends = [(rung.progress, len(rung.kept), len(rung.dropped), rung.samples_trained) for rung in history.rungs]
    for until, num_kept, num_dropped, samples in [*ends, (1.0, None, None, history.samples_trained)] if ends else []:
        costs.append(
            RungCost(
                until=until,
                num_kept=num_kept,
                num_dropped=num_dropped,
                samples_trained=samples - before,
                share=(samples - before) / total,
            )
        )
        before = samples
    return costs


def outlook(history: RunHistory, now: float) -> Outlook:
    """Return the outlook of a run at ``now`` (unix seconds). All views use this estimate of the remaining time.

    The estimate begins as the duration measured beforehand (``alto plan``, journal event ``profile``), if there is one.
    Later the run's own pace gets more and more weight.
    """
    left, rate = expected_samples_left(history), history.pace.per_second(now)
    done = _fraction_done(history, left)
    by_pace_s = left / rate if rate else None
    if history.result is not None or done == 1.0:
        remaining_s: float | None = 0.0
    elif history.forecast is None:
        remaining_s = by_pace_s
    else:
        remaining_s = remaining_duration_s(
            history.forecast.expected_duration_s,
            elapsed_s=history.worked_s(now),
            fraction_before=0.0,
            fraction_done=done,
            by_pace_s=by_pace_s,
        )
    row_tokens = _row_tokens(history)
    return Outlook(
        fraction_done=done,
        remaining_s=remaining_s,
        tokens_per_s=rate * row_tokens if rate and row_tokens else None,
    )


def fraction_done(history: RunHistory) -> float:
    """Return the fraction of the samples expected to be trained in total that are trained, in [0, 1]."""
    return _fraction_done(history, expected_samples_left(history))


def _fraction_done(history: RunHistory, samples_left: float) -> float:
    if history.result is not None:
        return 1.0
    total = history.samples_trained + samples_left
    if total <= 0.0:
        return 1.0 if history.jobs else 0.0
    return min(1.0, max(0.0, history.samples_trained / total))


def remaining_duration_s(
    expected_s: float, *, elapsed_s: float, fraction_before: float, fraction_done: float, by_pace_s: float | None = None
) -> float:
    """Return the remaining seconds of a running task: by the estimate, and more and more by the task's own pace.

    Args:
        expected_s: Remaining seconds estimated when the task began, ``elapsed_s`` seconds ago.
        elapsed_s: Seconds since the task began.
        fraction_before, fraction_done: Values of :func:`fraction_done` when the task began and now.
        by_pace_s: Remaining seconds by its recent pace; None uses its mean pace since it began.
    """
    weight = (fraction_done - fraction_before) / (1.0 - fraction_before) if fraction_before < 1.0 else 1.0
    if weight <= 0.0:
        return max(expected_s - elapsed_s, 0.0)
    if by_pace_s is None:
        by_pace_s = elapsed_s * (1.0 - weight) / weight
    trust = weight / (weight + _HALF_TRUSTED)
    # A geometric mean, because an estimate can be wrong by any factor.
    return float(((1.0 - weight) * expected_s) ** (1.0 - trust) * by_pace_s**trust)


_HALF_TRUSTED = 0.05
"""Fraction done at which a task's own pace counts as much as the estimate."""


def trained_tokens(history: RunHistory) -> int | None:
    """Return the tokens that all jobs trained, from the mean length of a training row; None if the journal lacks it."""
    row_tokens = _row_tokens(history)
    return None if row_tokens is None else round(history.samples_trained * row_tokens)


def _row_tokens(history: RunHistory) -> float | None:
    """Return the mean number of tokens of a training row; None if the journal does not have it."""
    counts: Mapping[str, Any] = {} if history.started is None else history.started.data
    num_rows, num_tokens = counts.get("train_rows", 0), counts.get("train_tokens", 0)
    if not (is_number(num_rows, least=1, most=2**63) and is_number(num_tokens, least=1, most=2**63)):
        return None
    return float(num_tokens) / float(num_rows)


def expected_samples_left(history: RunHistory) -> float:
    """Return the number of samples left to train if every rung ahead keeps its share of the jobs.

    Exits for other reasons reduce it further.
    """
    ahead = _rungs_ahead(history)
    survivals = _survivals(history, [index for index, _ in ahead])
    samples = 0.0
    for job in history.jobs.values():
        if job.has_ended:
            continue
        fraction, at, survival = 0.0, job.progress, 1.0
        for (_, rung), kept in zip(ahead, survivals, strict=True):
            reached = max(at, rung.progress)
            fraction += survival * (reached - at)
            at, survival = reached, survival * kept
        samples += (fraction + survival * (1.0 - at)) * job.samples_budgeted
    return samples


def _survivals(history: RunHistory, ahead: list[int]) -> list[float]:
    """Return, for each rung ahead, the fraction of the jobs reaching it that continue."""
    rungs, num_jobs = history.rung_settings, len(history.jobs)
    num_left, survivals = sum(not job.has_ended for job in history.jobs.values()), []
    for index in ahead:
        num_kept = min(num_left, places_at(rungs, index, num_jobs))
        survivals.append(num_kept / max(1, num_left))
        num_left = num_kept
    return survivals


def next_stop(history: RunHistory, job: JobHistory) -> tuple[str, float]:
    """Return the next stop of ``job``, ``rung`` or ``end``, and the steps until it: 0 or less if it is reached."""
    ahead = _rungs_ahead(history)
    if ahead:
        return "rung", ahead[0][1].progress * job.total_steps - job.step
    return "end", job.total_steps - job.step


def _rungs_ahead(history: RunHistory) -> list[tuple[int, Rung]]:
    """Return the rungs that have not been decided, with their numbers."""
    held = {outcome.rung for outcome in history.rungs}
    return [(index, rung) for index, rung in enumerate(history.rung_settings) if index not in held]


def time_saved_s(history: RunHistory) -> float | None:
    """Return the seconds that the saved samples would have taken at the pace of the run; None if nothing was saved or
    the pace is unknown."""
    return training_time_s(history, history.samples_saved) if history.samples_saved else None


def training_time_s(history: RunHistory, num_samples: int) -> float | None:
    """Return the seconds that samples would take at the pace of the run; None if unknown.

    Evaluations are not counted if the journal lists their time separately.
    """
    training_s = history.time_s.get("training") or history.duration_s
    if not history.samples_trained or training_s <= 0:
        return None
    return num_samples * training_s / history.samples_trained


def training_all_s(history: RunHistory) -> float | None:
    """Return the seconds that training every job to its end would take; None if unknown.

    They are the seconds that the run took, evaluations included, and those that the samples not trained would take,
    see :func:`training_time_s`. So if no budget cut off jobs of a finished run, they are its duration and
    :func:`time_saved_s`.
    """
    rest_s = training_time_s(history, max(0, history.samples_budgeted - history.samples_trained))
    return None if rest_s is None else history.duration_s + rest_s


def exit_totals(history: RunHistory) -> list[ExitTotal]:
    """Return jobs and samples per outcome, the outcome that saved most first."""
    totals = []
    for outcome in dict.fromkeys(job.outcome for job in history.jobs.values()):
        jobs = [job for job in history.jobs.values() if job.outcome == outcome]
        saved = sum(job.samples_saved for job in jobs)
        totals.append(
            ExitTotal(
                outcome=outcome,
                num_jobs=len(jobs),
                samples_trained=sum(job.samples_trained for job in jobs),
                samples_saved=saved,
                share=saved / history.samples_budgeted if history.samples_budgeted else 0.0,
            )
        )
    return sorted(totals, key=lambda total: -total.samples_saved)


PRICE_VARIABLE = "ALTO_GPU_HOUR_PRICE"
"""Environment variable with the price of an hour of one GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHours:
    """The cost of a run in hours of GPUs, or of CPU slots if it had no GPU.

    Attributes:
        device: ``GPU`` or ``CPU slot``.
        num_devices: Ranks that train the run since it was last resumed.
        spent_h: Hours from its first event to its latest, without interruptions, times ``num_devices``.
        saved_h: Hours that the samples saved by early exit would have taken at the run's own average pace; None if
            nothing was saved or the pace is unknown.
        whole_h: Hours of :func:`training_all_s`; None if ``saved_h`` is None.
        price: Price of one such hour; None if none was given.
    """

    device: str
    num_devices: int
    spent_h: float
    saved_h: float | None
    whole_h: float | None
    price: float | None = None

    def cost(self, hours: float | None) -> float | None:
        """Return the price of ``hours``, in the currency of the price; None if either is unknown."""
        return None if hours is None or self.price is None else hours * self.price


def device_hours(history: RunHistory, price: float | None = None) -> DeviceHours:
    """Return the device hours that a run took so far."""
    is_gpu = history.started is not None and history.started.device.startswith("cuda")
    saved_s, whole_s = time_saved_s(history), training_all_s(history)
    return DeviceHours(
        device="GPU" if is_gpu else "CPU slot",
        num_devices=history.num_ranks,
        spent_h=history.duration_s * history.num_ranks / 3600,
        saved_h=None if saved_s is None else saved_s * history.num_ranks / 3600,
        whole_h=None if saved_s is None or whole_s is None else whole_s * history.num_ranks / 3600,
        price=price,
    )


def price_of_hour(given: float | None, of_task: float | None = None) -> float | None:
    """Return the price of an hour of one GPU.

    It is ``given``, else the environment variable ``ALTO_GPU_HOUR_PRICE``, else the price in the task's budget, else
    None.

    Raises:
        SpecError: The environment variable holds no price.
    """
    if given is not None:
        return given
    text = os.environ.get(PRICE_VARIABLE, "").strip()
    if not text:
        return of_task
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise SpecError(
            f"{PRICE_VARIABLE}: expected the price of an hour of one GPU, a number of 0 or more, found {text!r:.40}; "
            "correct or unset it"
        )
    return price
