"""A run in a notebook cell: its colours and lines are explained, and its axis has round numbers."""

from __future__ import annotations

import re

import pytest
from html_pages import Page
from journals import entries

from alto.report.notebook import _round_ticks, result_html
from alto.runs import RunHistory


def test_colours_rungs_and_what_is_cut_off_are_explained(small_run):
    for event in small_run:
        if event["event"] == "eval" and event["job"] == "b":
            event["validation_loss"] = 400.0
    shown = Page(result_html(RunHistory.of(entries(small_run)), "runs/maths-1"))
    text = " ".join(shown.text.split())
    assert "Curves: ■ best: d, ■" in text
    assert "■ overfitting (1)" in text
    assert "dashed lines: rungs, where jobs are ranked and the worst end." in text
    assert "1 job leaves this view at the top (highest loss 400.0000)" in text
    assert "Double-click" not in text, "the figure has no script"


def test_the_axis_has_round_numbers(small_run):
    page = result_html(RunHistory.of(entries(small_run)), "runs/maths-1")
    labels = re.findall(r'text-anchor="end"[^>]*>([\d.]+)</text>', page)
    assert len(labels) >= 2
    assert all(len(label) <= 4 for label in labels), labels
    assert ">25 %<" in page


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.6145, 9.824, [2.0, 4.0, 6.0, 8.0]),
        (1.0, 1.5, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]),
        (-0.3, 0.9, [0.0, 0.5]),
        (1999.88, 2000.13, [1999.9, 1999.95, 2000.0, 2000.05, 2000.1]),
    ],
)
def test_round_ticks_are_inside(low: float, high: float, expected: list[float]) -> None:
    found = [value for value, _ in _round_ticks(low, high)]
    assert all(low - 1e-9 <= value <= high + 1e-9 for value in found)
    assert found == pytest.approx(expected)
    assert len({label for _, label in _round_ticks(low, high)}) == len(expected), "labels differ"
