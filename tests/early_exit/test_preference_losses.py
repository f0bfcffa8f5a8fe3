"""Losses of preference methods have other scales than token losses: rules for one scale would end jobs that learn.

DPO's sigmoid loss begins at log 2 and may fall to nothing; IPO's begins at ``1 / (4 beta²)``, 25 where beta is 0.1 and
2,500 where it is 0.01; ORPO's is that of tokens and a little more; a robust loss may be negative; a hinge is 0 at last.
"""

from __future__ import annotations

import math

import pytest

from alto.early_exit import OverfittingGap, OverfittingUpturn, policy_from
from alto.records import ExitReason
from alto.spec.early_exit import EarlyExit

LOG_2 = math.log(2)
ALTO, PAPER = EarlyExit(), EarlyExit(policy="paper")


def falling(start: float, end: float, count: int = 20) -> list[float]:
    return [end + (start - end) * math.exp(-4 * index / count) for index in range(1, count + 1)]


def turning(start: float, lowest: float, end: float) -> list[float]:
    """Return losses that fall for half of their way, and then rise."""
    down = falling(start, lowest, 10)
    return down + [down[-1] + (end - down[-1]) * index / 10 for index in range(1, 11)]


def rising(start: float, end: float) -> list[float]:
    return [start + (end - start) * index / 20 for index in range(1, 21)]


def exit_of(settings: EarlyExit, points) -> tuple[ExitReason, int] | None:
    policy = policy_from(settings)
    verdicts = (policy.judge(points[:count]) for count in range(1, len(points) + 1))
    return next(((verdict.reason, verdict.step) for verdict in verdicts if verdict is not None), None)


OVERFITTING, DIVERGING = ExitReason.OVERFITTING, ExitReason.DIVERGING


@pytest.mark.parametrize(
    ("case", "train", "validation", "alto", "paper"),
    [
        ("learns", falling(LOG_2, 0.3), falling(LOG_2, 0.31), None, None),
        ("learns all there is", falling(LOG_2, 1e-9), falling(LOG_2, 1e-9), None, None),
        ("stays at log 2", [LOG_2] * 20, [LOG_2] * 20, None, None),
        ("by heart", falling(LOG_2, 1e-4), turning(LOG_2, 0.6, 0.9), (OVERFITTING, 120), (OVERFITTING, 20)),
        ("diverges", rising(LOG_2, 5.0), rising(LOG_2, 6.0), (DIVERGING, 30), (DIVERGING, 30)),
        ("near nothing, where it doubles", [1e-6] * 20, [1e-6] * 10 + [2e-6] * 10, None, None),
        ("a hinge at 0, then next to it", [0.0] * 20, [0.0] * 10 + [1e-7] * 10, None, None),
        ("a hinge at 0, then above", [0.0] * 20, [0.0] * 10 + [0.2] * 10, (OVERFITTING, 120), (OVERFITTING, 120)),
        ("ipo learns", falling(25.0, 21.0), falling(25.0, 21.5), None, None),
        ("ipo, beta 0.01, learns", falling(2500.0, 2400.0), falling(2500.0, 2410.0), None, None),
        ("ipo diverges", rising(25.0, 400.0), rising(25.0, 410.0), (DIVERGING, 30), (DIVERGING, 30)),
        ("ipo turns upward", falling(25.0, 15.0), turning(25.0, 22.0, 27.0), (OVERFITTING, 120), (OVERFITTING, 40)),
        ("orpo learns", falling(2.1, 1.6), falling(2.1, 1.65), None, None),
        ("negative, far from 0", falling(-0.5, -1.0), falling(-0.5, -0.98), None, None),
        # Where a loss crosses 0, the ratio in Algorithm 1 is unbounded.
        ("through 0", falling(LOG_2, -0.5), falling(LOG_2, -0.49), None, (OVERFITTING, 50)),
        ("negative, turns", falling(LOG_2, -2.0), turning(LOG_2, -0.4, 0.6), (OVERFITTING, 120), (OVERFITTING, 20)),
        ("breaks", [LOG_2] * 19 + [math.nan], falling(LOG_2, 0.4), (DIVERGING, 200), (DIVERGING, 200)),
    ],
)  # fmt: skip
def test_trace_in_verdict_out(history, case, train, validation, alto, paper) -> None:
    points = history(validation, train)
    assert exit_of(ALTO, points) == alto
    assert exit_of(PAPER, points) == paper


def test_what_a_negative_loss_is_apart_by_is_measured_by_its_size(history) -> None:
    """Algorithm 1 divides the gap by the size of the loss; a loss below zero is not a small one."""
    near, far = history([-0.49] * 2, [-0.5] * 2), history([-0.4] * 2, [-0.5] * 2)
    assert OverfittingGap().judge(near) is None
    verdict = OverfittingGap().judge(far)
    assert verdict is not None
    assert verdict.evidence["gap"] == pytest.approx(0.2)


def test_a_rise_is_measured_against_a_loss_that_is_never_taken_for_nothing(history) -> None:
    rule = OverfittingUpturn(overfitting_patience=1)
    assert rule.judge(history([0.0] * 5 + [0.9e-6])) is None
    assert rule.judge(history([0.0] * 5 + [1.1e-6])) is not None
