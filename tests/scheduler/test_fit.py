"""Fits of memory and time find known constants again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.errors import ProfileError
from alto.records import MemoryPoint, ThroughputPoint
from alto.scheduler import fit_memory, fit_throughput, max_tokens, saturated_pass, saturation

GRID = [(jobs, jobs * rows * 100) for jobs in (1, 2, 4) for rows in (1, 4, 16)]


def peaks(fixed: float, per_token: float, factors: list[float] | None = None) -> list[MemoryPoint]:
    factors = factors or [1.0] * len(GRID)
    return [
        MemoryPoint(num_jobs=jobs, num_tokens=tokens, peak_bytes=round((fixed + per_token * tokens) * factor))
        for (jobs, tokens), factor in zip(GRID, factors, strict=True)
    ]


def steps(step_s: float, job_s: float, token_s: float) -> list[ThroughputPoint]:
    return [
        ThroughputPoint(num_jobs=jobs, num_tokens=tokens, duration_s=step_s + job_s * jobs + token_s * tokens)
        for jobs, tokens in GRID
    ]


@given(st.integers(10**6, 10**11), st.integers(10**3, 10**8))
def test_the_law_of_memory_is_found_again(fixed: int, per_token: int) -> None:
    fit = fit_memory(peaks(fixed, per_token))
    assert fit.fixed_bytes == pytest.approx(fixed, rel=1e-3, abs=1e-3 * per_token)
    assert fit.bytes_per_token == pytest.approx(per_token, rel=1e-3)
    assert fit.error_worst < 1e-6


@given(st.lists(st.floats(0.95, 1.05), min_size=len(GRID), max_size=len(GRID)))
def test_noise_moves_the_law_of_memory_by_no_more_than_itself(factors: list[float]) -> None:
    points = peaks(1e9, 1e6, factors)
    fit = fit_memory(points)
    predicted = [fit.fixed_bytes + fit.bytes_per_token * point.num_tokens for point in points]
    for (_, tokens), bytes_predicted in zip(GRID, predicted, strict=True):
        assert bytes_predicted == pytest.approx(1e9 + 1e6 * tokens, rel=0.11)
    errors = sorted(abs(one / point.peak_bytes - 1) for one, point in zip(predicted, points, strict=True))
    assert fit.error_median == pytest.approx(errors[len(errors) // 2], abs=1e-9)
    assert fit.error_worst == pytest.approx(errors[-1], abs=1e-9)


def test_peaks_that_fall_with_tokens_are_a_constant() -> None:
    points = [MemoryPoint(num_jobs=1, num_tokens=n, peak_bytes=peak) for n, peak in ((100, 1200), (200, 1000))]
    fit = fit_memory(points)
    assert fit.bytes_per_token == 0.0
    assert 1000 < fit.fixed_bytes < 1200
    assert max_tokens(fit, capacity_bytes=2000, margin=0.9, bank_bytes=0) is None


def test_tokens_that_fit_beside_the_bank_within_the_margin() -> None:
    fit = fit_memory(peaks(1e9, 1e6))
    fitting = max_tokens(fit, capacity_bytes=10 * 10**9, margin=0.9, bank_bytes=2 * 10**9)
    assert fitting == pytest.approx(6000, abs=1)
    assert max_tokens(fit, capacity_bytes=10**9, margin=0.9, bank_bytes=0) == 0


@given(st.floats(0, 1), st.floats(0, 0.1), st.floats(1e-6, 1e-3))
def test_the_law_of_durations_is_found_again(step_s: float, job_s: float, token_s: float) -> None:
    fit = fit_throughput(steps(step_s, job_s, token_s))
    assert fit.error_worst < 1e-6
    assert (fit.step_s, fit.job_s, fit.token_s) == pytest.approx((step_s, job_s, token_s), rel=1e-3, abs=1e-6)


def test_two_steps_whose_jobs_and_tokens_double_cost_their_tokens() -> None:
    """Both steps of a busy machine, on which no third one was measured."""
    points = [
        ThroughputPoint(num_jobs=1, num_tokens=159, duration_s=1.69),
        ThroughputPoint(num_jobs=2, num_tokens=323, duration_s=1.95),
    ]
    fit = fit_throughput(points)
    assert (fit.step_s, fit.job_s, fit.token_s) == pytest.approx((1.438, 0.0, 0.001585), rel=1e-3)


@given(st.lists(st.floats(0.01, 10.0), min_size=len(GRID), max_size=len(GRID)))
def test_no_coefficient_of_time_is_negative(durations: list[float]) -> None:
    points = [
        ThroughputPoint(num_jobs=jobs, num_tokens=tokens, duration_s=duration)
        for (jobs, tokens), duration in zip(GRID, durations, strict=True)
    ]
    fit = fit_throughput(points)
    assert min(fit.step_s, fit.job_s, fit.token_s) >= 0.0
    assert max(fit.step_s, fit.job_s, fit.token_s) > 0.0


def test_if_speed_still_rises_at_the_largest_step_a_pass_is_as_large_as_the_model_says() -> None:
    def points(fixed_s: float) -> list[ThroughputPoint]:
        return [
            ThroughputPoint(num_jobs=jobs, num_tokens=tokens, duration_s=fixed_s + jobs * 0.01 + tokens * 1e-3)
            for jobs, tokens in ((1, 100), (2, 200), (1, 400), (8, 800))
        ]

    assert saturated_pass(points(0.03)) == pytest.approx(19 * 0.04 / 1e-3, rel=0.01)
    assert saturated_pass(points(0.99)) == 4 * 800, "the model is not trusted further"
    alike = [ThroughputPoint(num_jobs=1, num_tokens=tokens, duration_s=tokens * 1e-3) for tokens in (100, 400)]
    assert saturated_pass(alike) == 100, "the smallest step is fast enough"
    constant = [ThroughputPoint(num_jobs=jobs, num_tokens=12 * jobs, duration_s=2.0 * jobs) for jobs in (1, 2)]
    assert saturated_pass(constant) == 4 * 24, "nothing is known of larger passes"


def test_saturation_is_the_smallest_step_that_is_nearly_as_fast_as_any() -> None:
    points = [
        ThroughputPoint(num_jobs=1, num_tokens=tokens, duration_s=tokens / rate)
        for tokens, rate in ((100, 50.0), (200, 90.0), (400, 96.0), (800, 100.0))
    ]
    assert saturation(points) == 400


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (lambda: fit_memory([]), "two or more different numbers of tokens"),
        (lambda: fit_memory(peaks(1e9, 1e6)[:1] * 3), "two or more different numbers of tokens"),
        (lambda: fit_memory(peaks(1e9, 1e6, [0.0] * len(GRID))), "above 0, found 0"),
        (lambda: fit_throughput([]), "expected measured steps, found none"),
        (lambda: saturation([]), "expected measured steps, found none"),
    ],
)
def test_measurements_that_say_too_little(measure: object, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        measure()
