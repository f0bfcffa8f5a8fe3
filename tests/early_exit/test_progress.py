from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.early_exit import evaluation_steps, rung_notes
from alto.errors import SpecError
from alto.records import Rung
from alto.spec.early_exit import ceil_fraction, rung_step


@pytest.mark.parametrize(
    ("share", "total", "expected"),
    [
        (0.2, 30, 6),
        (0.07, 100, 7),  # 7.000000000000001 in float64
        (0.1 + 0.2, 10, 3),  # 3.0000000000000004
        (0.29, 100, 29),  # 28.999999999999996
        (0.25, 60, 15),
        (0.25, 61, 16),
        (0.025, 41, 2),
        (1.0, 7, 7),
    ],
)
def test_ceil_fraction(share: float, total: int, expected: int) -> None:
    assert ceil_fraction(share, total) == expected


@given(st.integers(1, 1000), st.integers(0, 100_000))
def test_ceil_fraction_of_written_decimals_is_exact(thousandths: int, total: int) -> None:
    assert ceil_fraction(thousandths / 1000, total) == math.ceil(Fraction(thousandths, 1000) * total)


@pytest.mark.parametrize(("progress", "total", "step"), [(0.05, 1, 1), (0.05, 90, 5), (0.025, 10, 1), (0.05, 720, 36)])
def test_rung_step(progress: float, total: int, step: int) -> None:
    assert rung_step(Rung(progress=progress, keep=0.5), total) == step


def test_evaluation_steps_by_hand() -> None:
    rungs = [Rung(progress=0.025, keep=0.5), Rung(progress=0.05, keep=0.2)]
    assert evaluation_steps(90, 0.25, rungs) == (3, 5, 23, 45, 68, 90)
    assert evaluation_steps(10, 0.3, ()) == (3, 6, 9, 10)
    assert evaluation_steps(7, 0.05, rungs) == (1, 2, 3, 4, 5, 6, 7)
    assert evaluation_steps(1, 1.0, rungs) == (1,)


@given(
    st.integers(1, 5000), st.floats(0.0001, 1.0), st.lists(st.floats(0.001, 0.999), max_size=3, unique=True).map(sorted)
)
def test_evaluation_steps_are_rising_and_hold_every_rung_and_the_end(
    total: int, every: float, progresses: list[float]
) -> None:
    rungs = [Rung(progress=progress, keep=0.5) for progress in progresses]
    steps = evaluation_steps(total, every, rungs)
    assert list(steps) == sorted(set(steps))
    assert steps[0] >= 1
    assert steps[-1] == total
    assert {rung_step(rung, total) for rung in rungs} <= set(steps)
    assert len(steps) <= math.ceil(1 / every) + len(rungs) + 1


@pytest.mark.parametrize("every", [0.0, -0.5, 1.5, math.nan])
def test_every_is_checked(every: float) -> None:
    with pytest.raises(SpecError, match="expected a fraction"):
        evaluation_steps(10, every, ())


@pytest.mark.parametrize(
    ("first", "rise", "note"),
    [
        (0.025, 0.0, None),
        (0.025, 0.02, None),
        (0.05, 0.1, None),
        (0.025, 0.1, "rises for 10 % of its steps, so no job ends as underperforming before 2.5 %"),
        (0.25, 1.0, "rises for 100 % of its steps, so no job ends as underperforming before 25 %"),
        (0.02, 0.1, "rises for 10 % of its steps, and the rung at 2 % ranks it before 2.5 %, from where on"),
    ],
)
def test_rungs_and_the_rise_of_a_learning_rate_are_noted(first: float, rise: float, note: str | None) -> None:
    found = rung_notes((Rung(progress=first, keep=0.5),), lr_warmup=rise, earliest=rise / 4)
    assert len(found) == (note is not None)
    assert note is None or note in found[0]
