from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.early_exit import Ema
from alto.errors import SpecError

losses = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=50)


def averages(values: list[float], alpha: float) -> list[float]:
    ema = Ema(alpha)
    return [ema.update(loss) for loss in values]


def test_the_formula_by_hand() -> None:
    assert averages([4.0, 2.0, 0.0], 0.5) == [4.0, 3.0, 1.5]
    assert averages([4.0, 2.0, 0.0], 1.0) == [4.0, 2.0, 0.0]
    assert averages([], 0.5) == []


@given(losses, st.floats(0.001, 1.0))
def test_every_loss_counts(values: list[float], alpha: float) -> None:
    ema, expected = Ema(alpha), None
    for loss in values:
        expected = loss if expected is None else alpha * loss + (1.0 - alpha) * expected
        assert ema.update(loss) == expected
    assert ema.count == len(values)


def test_nan_stays() -> None:
    assert [math.isnan(value) for value in averages([1.0, math.nan, 1.0], 0.5)] == [False, True, True]


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.1, math.nan])
def test_alpha_is_checked(alpha: float) -> None:
    with pytest.raises(SpecError, match="ema_alpha: expected a weight in"):
        Ema(alpha)
