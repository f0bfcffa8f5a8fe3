from __future__ import annotations

import io

import pytest
from rich.console import Console

from alto.export.terminal import LiveView, final_summary
from alto.runs import RunHistory

NOW = 1_763_635_060.0


def console(*, width=140, height=30) -> Console:
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)


def screen(events, *, width=140, height=30) -> list[str]:
    """The lines of the live view after ``events``, as a terminal of that size would show them."""
    view = LiveView(console(width=width, height=height), clock=lambda: NOW)
    for event in events:
        view.observe(event)
    target = console(width=width, height=height)
    target.print(view._live.get_renderable())
    return target.file.getvalue().splitlines()


def test_live_view_draws_and_leaves_nothing_behind(small_run):
    target = console()
    with LiveView(target, clock=lambda: NOW) as view:
        for event in small_run[:-1]:
            view.observe(event)
        target.print("a line of another writer")
    drawn = target.file.getvalue()
    assert "maths" in drawn
    assert "★ d" in drawn
    assert "a line of another writer" in drawn
    # The cursor is hidden while drawing and must be shown again.
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")


def test_live_screen_tells_the_state(small_run):
    text = "\n".join(screen(small_run[:11]))
    assert "500 rows to train, 50 to validate" in text
    assert "200 of 4,000 samples trained, 22.5 % saved" in text
    assert "1 min 00 s" in text
    assert "at most" in text
    assert "best so far: b with validation loss 3.0000 (lr 1e-5 · r 4)" in text
    assert "smoothed training loss became infinite" in text


def test_best_and_running_come_first(small_run):
    lines = screen(small_run[:14])
    order = [next(index for index, line in enumerate(lines) if line.split()[:1] == [job]) for job in "dba"]
    best = next(index for index, line in enumerate(lines) if "★ c" in line)
    assert [best, *order] == sorted([best, *order])


@pytest.mark.parametrize("height", [14, 24, 40])
def test_live_screen_fits_the_height(sweep, height):
    lines = screen(sweep, height=height)
    assert len(lines) <= height
    num_rows = sum("job-" in line and "best" not in line for line in lines)
    assert f"… and {60 - num_rows} more" in lines[-1]


def test_narrow_terminal_leaves_the_reasons_out(small_run):
    narrow = screen(small_run, width=80)
    assert all(len(line) <= 80 for line in narrow)
    assert not any("kept" in line for line in narrow)
    assert any("1.9000" in line for line in narrow)


def test_before_the_first_event():
    assert screen([]) == ["Preparing …"]


@pytest.mark.parametrize("finished", [True, False])
def test_summary_says_where_the_adapter_lies(small_run, finished):
    target = console()
    target.print(final_summary(RunHistory.of(small_run if finished else small_run[:-1]), "runs/maths-1"))
    text = target.file.getvalue()
    assert ("adapter: runs/maths-1/best" in text) is finished
    assert ("best checkpoints so far: runs/maths-1/jobs" in text) is not finished
    assert "1,700 of 4,000 samples trained, 57.5 % saved (diverging 22.5 %, underperforming 22.5 %" in text


def test_summary_rows_can_be_limited(sweep):
    def num_rows(**options) -> int:
        target = console()
        target.print(final_summary(RunHistory.of(sweep), **options))
        return sum("job-" in line and "best:" not in line for line in target.file.getvalue().splitlines())

    assert (num_rows(), num_rows(max_rows=5), num_rows(max_rows=None)) == (20, 5, 60)


def test_user_text_reaches_the_terminal_without_escapes_or_markup(small_run):
    hostile = "\x1b[2J\x07[bold red]x[/] :skull: \x9b31m"
    start = small_run[0]
    start["task"] = start["model"] = start["dataset"] = hostile
    for job in start["jobs"]:
        job["config"][hostile] = hostile + job["job"]
    rendered = "\n".join(screen(small_run, width=200))
    assert "\x1b" not in rendered
    assert "\x07" not in rendered
    assert "\x9b" not in rendered
    assert "[bold red]x[/] :skull:" in rendered
