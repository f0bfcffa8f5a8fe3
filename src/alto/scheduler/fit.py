"""Fits the memory model and the throughput model to measured steps. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alto.errors import ProfileError
from alto.records import MemoryPoint, MemoryProfile, ThroughputPoint

SATURATED = 0.95
"""Share of the best measured tokens per second above which more tokens in a step hardly increase the speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Peak memory of a step without the bank: ``fixed_bytes + bytes_per_token * tokens``.

    ``error_median`` and ``error_worst`` are relative errors at the measured points.
    """

    fixed_bytes: float
    bytes_per_token: float
    error_median: float
    error_worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputFit:
    """Duration of a training step: ``step_s + job_s * jobs + token_s * tokens`` seconds; errors as in `MemoryFit`."""

    step_s: float
    job_s: float
    token_s: float
    error_median: float
    error_worst: float


def fit_memory(points: Sequence[MemoryPoint]) -> MemoryFit:
    """Fit a line to ``points`` by least squares of the relative errors; both coefficients are at least 0.

    Measured peaks lie on both sides of the line; the memory margin that is not planned covers the peaks above it.

    Raises:
        ProfileError: There are not two different numbers of tokens.
    """
    if len({point.num_tokens for point in points}) < 2:
        raise ProfileError(
            f"memory profile: expected peaks at two or more different numbers of tokens, found {len(points)} "
            "measurements at fewer; measure steps of several sizes"
        )
    columns = np.array([[1.0, point.num_tokens] for point in points])
    peaks = np.array([float(point.peak_bytes) for point in points])
    coefficients = _least_relative_squares(columns, peaks)
    fixed_bytes, bytes_per_token = map(float, coefficients)
    error_median, error_worst = _errors(columns @ coefficients, peaks)
    return MemoryFit(
        fixed_bytes=fixed_bytes, bytes_per_token=bytes_per_token, error_median=error_median, error_worst=error_worst
    )


def max_tokens(model: MemoryFit | MemoryProfile, *, capacity_bytes: int, margin: float, bank_bytes: int) -> int | None:
    """Return the largest number of tokens of a step that fits, together with the bank, into ``margin *
    capacity_bytes``.

    Return 0 if the base model and the bank alone do not fit, and None if the memory per token is negligible.

    Args:
        margin: Share of the capacity that may be planned, in (0, 1].
    """
    left = margin * capacity_bytes - bank_bytes - model.fixed_bytes
    if left <= 0.0:
        return 0
    return math.floor(left / model.bytes_per_token) if model.bytes_per_token else None


def fit_throughput(points: Sequence[ThroughputPoint]) -> ThroughputFit:
    """Fit the model of step durations by least squares of the relative errors; no coefficient is below 0.

    Two steps may be explained in several ways. Then the time is that of the tokens first, and that of the jobs last.

    Raises:
        ProfileError: There is no point.
    """
    _check_measured(points)
    columns = np.array([[point.num_tokens, 1.0, point.num_jobs] for point in points])
    durations = np.array([point.duration_s for point in points])
    coefficients = _least_relative_squares(columns, durations)
    token_s, step_s, job_s = map(float, coefficients)
    error_median, error_worst = _errors(columns @ coefficients, durations)
    return ThroughputFit(
        step_s=step_s, job_s=job_s, token_s=token_s, error_median=error_median, error_worst=error_worst
    )


def saturation(points: Sequence[ThroughputPoint]) -> int:
    """Return the tokens of the smallest measured step that reaches `SATURATED` of the best measured tokens per second.

    Raises:
        ProfileError: There is no point.
    """
    _check_measured(points)
    rates = {point: point.num_tokens / point.duration_s for point in points}
    best = max(rates.values())
    return min(point.num_tokens for point, rate in rates.items() if rate >= SATURATED * best)


_EXTRAPOLATED = 4
"""Largest number of tokens that the fitted model is trusted for, relative to the largest measured step."""

_ALIKE = 1.5
"""Ratio up to which the tokens per job of two steps are about the same."""


def saturated_pass(points: Sequence[ThroughputPoint]) -> int:
    """Return the tokens above which a larger micro-batch is not faster.

    Only steps of the fewest jobs are compared, because more jobs make a step of the same tokens slower. If speed still
    rises at the largest of them, return the tokens at which the fitted model reaches `SATURATED` of its highest speed,
    but no more than four times the tokens of any measured step. Return this maximum if all steps have about the same
    tokens per job, because then nothing is known about larger micro-batches.

    Raises:
        ProfileError: There is no point.
    """
    _check_measured(points)
    fewest = min(point.num_jobs for point in points)
    alike = [point for point in points if point.num_jobs == fewest]
    measured, fit = saturation(alike), fit_throughput(points)
    if measured < max(point.num_tokens for point in alike):
        return max(measured, saturation(points))
    of_model = most = _EXTRAPOLATED * max(point.num_tokens for point in points)
    per_job = [point.num_tokens / point.num_jobs for point in points]
    if fit.token_s and max(per_job) > _ALIKE * min(per_job):
        of_model = math.ceil(SATURATED / (1.0 - SATURATED) * (fit.step_s + fit.job_s * fewest) / fit.token_s)
    return max(measured, saturation(points), min(of_model, most))


def _check_measured(points: Sequence[ThroughputPoint]) -> None:
    if not points:
        raise ProfileError("throughput profile: expected measured steps, found none; measure one or more packings")


def _least_relative_squares(columns: NDArray[np.float64], measured: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return coefficients, none below 0, of the columns that minimise the sum of squares of ``predicted / measured -
    1``.

    The best non-negative solution is the unconstrained solution on a subset of the columns. There are at most three
    columns, so all subsets are tried. Of equally good ones, the first is returned: it has the fewest and the first
    columns.

    Raises:
        ProfileError: A measured value is not above 0.
    """
    if not (measured > 0.0).all():
        raise ProfileError(
            f"profile: expected bytes and seconds above 0, found {float(measured.min()):g}; subtract no more than the "
            "bank's own bytes, and use a monotonic clock"
        )
    relative = columns / measured[:, None]
    # Normalise the columns: otherwise rounding decides, because bytes and tokens differ by a factor of millions.
    scale = np.linalg.norm(relative, axis=0)
    relative = relative / scale
    best, least = np.zeros(columns.shape[1]), math.inf
    for count in range(1, columns.shape[1] + 1):
        for chosen in itertools.combinations(range(columns.shape[1]), count):
            solution, _, rank, _ = np.linalg.lstsq(relative[:, chosen], np.ones(len(measured)))
            if rank < count or (solution < 0.0).any():
                continue
            squares = float(np.sum((relative[:, chosen] @ solution - 1.0) ** 2))
            # A further column must reduce the error by more than rounding.
            if squares < least * (1.0 - 1e-9) - 1e-24:
                best, least = np.zeros(columns.shape[1]), squares
                best[list(chosen)] = solution
    coefficients: NDArray[np.float64] = best / scale
    return coefficients


def _errors(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> tuple[float, float]:
    """Return the median and the largest relative error."""
    errors = [abs(float(error)) for error in predicted / measured - 1.0]
    return statistics.median(errors), max(errors)
