"""Waiting for work that may hang."""

from __future__ import annotations

import time

import pytest

from alto.evaluation.scorers import pause, within


def stop() -> None:
    raise KeyboardInterrupt


def test_a_user_who_wants_to_stop_does_not_wait_for_a_pause() -> None:
    with pytest.raises(KeyboardInterrupt):
        pause(0.2, stop)


def test_a_pause_lasts_as_long_as_it_says() -> None:
    began = time.monotonic()
    pause(0.12, lambda: None)
    assert time.monotonic() - began >= 0.12


def test_what_work_returns_or_raises_is_passed_on() -> None:
    assert within(10.0, lambda: 3, lambda: None) == 3
    with pytest.raises(ZeroDivisionError):
        within(10.0, lambda: 1 // 0, lambda: None)
