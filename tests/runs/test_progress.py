from __future__ import annotations

import pytest
from journals import entries

from alto.records import Rung
from alto.runs import RunHistory
from alto.runs.progress import Pace, expected_samples_left, next_stop


def pace_of(*points) -> Pace:
    pace = Pace(window_s=100.0)
    for time, count in points:
        pace.note(time, count)
    return pace


@pytest.mark.parametrize(
    ("points", "now", "expected"),
    [
        ([], 10.0, None),
        ([(0.0, 5)], 10.0, None),
        ([(0.0, 0), (10.0, 0)], 10.0, None),
        ([(0.0, 0), (10.0, 20)], 10.0, 2.0),
        # Silence since the last point counts: nobody knows that work went on.
        ([(0.0, 0), (10.0, 20)], 20.0, 1.0),
        # A slow beginning is forgotten once it lies before the window.
        ([(0.0, 0), (1000.0, 10), (1100.0, 210)], 1100.0, 2.0),
        # A clock set back, or a count that begins anew, starts the measurement anew.
        ([(100.0, 0), (200.0, 50), (50.0, 60), (60.0, 90)], 60.0, 3.0),
        ([(0.0, 500), (10.0, 0), (20.0, 40)], 20.0, 4.0),
    ],
)
def test_pace(points, now, expected):
    assert pace_of(*points).per_second(now) == expected


def test_rungs_ahead_shorten_what_is_left(small_run):
    before = RunHistory.of(entries(small_run[:1]))
    assert before.rung_settings == (Rung(progress=0.1, keep=0.5),)
    # Every job trains a tenth, then half of them the rest.
    assert expected_samples_left(before) == pytest.approx(4 * 1000 * (0.1 + 0.5 * 0.9))
    assert next_stop(before, before.jobs["d"]) == ("rung", 10.0)


def test_after_the_last_rung_every_job_goes_to_its_end(small_run):
    held = next(index for index, event in enumerate(small_run) if event["event"] == "warmup_ended") + 1
    after = RunHistory.of(entries(small_run[:held]))
    assert expected_samples_left(after) == pytest.approx(2 * 900)
    assert next_stop(after, after.jobs["d"]) == ("end", 90)


def test_nothing_is_left_when_all_have_ended(small_run):
    assert expected_samples_left(RunHistory.of(entries(small_run))) == 0
