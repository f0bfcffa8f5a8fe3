from __future__ import annotations

import math

import pytest

from alto.early_exit import judge_step_loss
from alto.early_exit.patterns import judge_point
from alto.records import ExitReason


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_step_loss_that_is_not_finite_is_diverging(loss) -> None:
    verdict = judge_step_loss("a", 7, loss)
    assert verdict is not None
    assert (verdict.job, verdict.step, verdict.reason) == ("a", 7, ExitReason.DIVERGING)
    assert verdict.evidence["train_loss"] == pytest.approx(loss, nan_ok=True)


@pytest.mark.parametrize("loss", [0.0, -1.0, 1e308])
def test_a_finite_step_loss_is_no_verdict(loss) -> None:
    assert judge_step_loss("a", 7, loss) is None


@pytest.mark.parametrize(("ema", "validation"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, math.inf)])
def test_an_evaluation_with_either_loss_not_finite_is_diverging(history, ema, validation) -> None:
    verdict = judge_point(history([validation], [ema])[0])
    assert verdict is not None
    assert verdict.reason is ExitReason.DIVERGING
    assert verdict.evidence == pytest.approx({"validation_loss": validation, "train_ema": ema}, nan_ok=True)


def test_a_finite_evaluation_is_no_verdict(history) -> None:
    assert judge_point(history([2.0], [1.0])[0]) is None
