from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.early_exit import Ema, ema_of
from alto.errors import SpecError

losses = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=50)


def test_the_formula_by_hand() -> None:
    assert ema_of([4.0, 2.0, 0.0], 0.5) == (4.0, 3.0, 1.5)
    assert ema_of([4.0, 2.0, 0.0], 1.0) == (4.0, 2.0, 0.0)
    assert ema_of([], 0.5) == ()


@given(losses, st.floats(0.001, 1.0), st.integers(0, 50))
def test_incremental_and_whole_agree_bit_for_bit(values: list[float], alpha: float, cut: int) -> None:
    ema = Ema(alpha)
    incremental = [ema.update(loss) for loss in values[:cut]] + [ema.update(loss) for loss in values[cut:]]
    assert tuple(incremental) == ema_of(values, alpha)
    assert ema.count == len(values)


def test_nan_stays() -> None:
    assert [math.isnan(value) for value in ema_of([1.0, math.nan, 1.0], 0.5)] == [False, True, True]


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.1, math.nan])
def test_alpha_is_checked(alpha: float) -> None:
    with pytest.raises(SpecError, match="ema_alpha: expected a weight in"):
        Ema(alpha)
