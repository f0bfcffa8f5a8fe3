from __future__ import annotations

import io
import re

import pytest
from journals import PROFILE, entries, entry
from rich.cells import cell_len
from rich.console import Console

from alto.report.notebook import result_html
from alto.report.report import report_page
from alto.runs import RunHistory
from alto.views.plain import PlainView
from alto.views.terminal import LiveView, final_summary, open_view
from alto.views.wording import format_duration

NOW = 1_763_635_060.0


def console(*, width=140, height=30) -> Console:
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)


def screen(events, *, width=140, height=30) -> list[str]:
    """Return the lines of the live view after ``events``, on a terminal of this size."""
    view = LiveView(console(width=width, height=height), clock=lambda: NOW)
    for event in events:
        view.observe(entry(event))
    target = console(width=width, height=height)
    target.print(view._live.get_renderable())
    return target.file.getvalue().splitlines()


def test_live_view_draws_and_leaves_nothing_behind(small_run):
    target = console()
    with LiveView(target, clock=lambda: NOW) as view:
        for event in small_run[:-1]:
            view.observe(entry(event))
        target.print("a line of another writer")
    drawn = target.file.getvalue()
    assert "maths" in drawn
    assert "★ d" in drawn
    assert "a line of another writer" in drawn
    # The cursor is hidden while drawing, and must be shown again.
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")


def test_the_metric_and_the_value_of_the_best_are_shown(preference_run):
    found = "\n".join(screen(preference_run))
    assert "best by reward accuracy: c with validation loss 0.6000, reward accuracy 75 % (95 % interval 62–85 %)," in (
        " ".join(found.split())
    )
    assert "accuracy  margin" in found
    best = next(one for one in preference_run if (one["event"], one.get("job"), one.get("step")) == ("eval", "c", 10))
    best["loss_rows"] = [0.6] * 8  # a part of the 50 rows
    assert "reward accuracy 75 % (95 % interval 41–93 %)" in " ".join("\n".join(screen(preference_run)).split())
    preference_run[0]["metric"] = "loss"
    target = console()
    target.print(final_summary(RunHistory.of(entries(preference_run[:-4]))))
    assert "best so far: a with validation loss 0.4000, reward accuracy 61 %" in target.file.getvalue()


def test_the_metrics_on_test_rows_are_beside_their_loss(preference_run, tmp_path):
    best = next(one for one in preference_run if (one["event"], one.get("job"), one.get("step")) == ("eval", "c", 10))
    best |= {"test_loss": 0.7, "test_metrics": {"reward_accuracy": 0.5, "kl": 0.1}}
    preference_run[0]["data"] = {**preference_run[0].get("data", {}), "test_rows": 10}
    message = "0.7000, reward accuracy 50 % (95 % interval 24–76 %)"
    shown = " ".join("\n".join(screen(preference_run)).split())
    assert "best by reward accuracy: c with validation loss 0.6000, reward accuracy" in shown
    assert f"(lr 3e-4); test loss {message}" in shown
    history, lines = RunHistory.of(entries(preference_run)), io.StringIO()
    with PlainView(lines) as view:
        for entry in entries(preference_run):
            view.observe(entry)
    assert f", test loss {message};" in lines.getvalue().splitlines()[-1]
    assert f"(test {message})" in result_html(history, str(tmp_path))
    assert f"; {message} on the test rows" in report_page(tmp_path, history).replace("\N{NO-BREAK SPACE}", " ")
    preference_run[0]["data"]["shared_test_rows"] = 1
    page = report_page(tmp_path, RunHistory.of(entries(preference_run))).replace("\N{NO-BREAK SPACE}", " ")
    assert f"; {message} on the test rows, of which 1 is also in the training or validation data<" in page
    del best["test_metrics"]
    assert "; test loss 0.7000 " in " ".join("\n".join(screen(preference_run)).split()), "a journal without metrics"


def test_live_screen_tells_the_state(small_run):
    text = "\n".join(screen(small_run[:11]))
    assert "500 rows to train, 50 to validate" in text
    assert "200 of 4,000 samples trained, 22.5 % saved" in text
    assert "1 min 00 s" in text
    # 200 samples in 60 seconds; b waits for the rung with 900 left, c and d have 1,000 each; two of the three continue.
    assert "about 10 min 00 s left" in text
    assert "best so far: b with validation loss 3.0000 (lr 1e-5 · r 4)" in text
    assert "smoothed training loss became infinite" in text


def test_a_winner_by_answers_is_shown_with_the_answers(judged_run):
    text = "\n".join(screen(judged_run, width=200))
    assert (
        "best: c with validation loss 2.2000 (lr 2e-4 · r 4); chosen by answers: d 1 of 8 right, c 5 of 8 right" in text
    )


def test_before_any_progress_no_time_is_promised(small_run):
    text = "\n".join(screen(small_run[:3]))
    assert "time left: after the first evaluations" in text


def test_jobs_tell_when_they_reach_what_comes_next(small_run):
    lines = screen(small_run[:16])
    # d has reached the rung, whose selection has not happened yet.
    assert next(line for line in lines if "★ d" in line).rstrip().endswith("waits for the rung")
    # After the rung, at second 16, c did 40 steps and has 50 left; it is second 60.
    after = screen(small_run[:19])
    assert next(line for line in after if line.startswith("  c ")).rstrip().endswith("end in 55 s")


def test_time_without_a_process_does_not_slow_the_pace(interrupted_run):
    resumed = interrupted_run[-1]["time"]
    view = LiveView(console(), clock=lambda: resumed)
    for event in interrupted_run:
        view.observe(entry(event))
    # 400 samples in 6 seconds; b has 500 left, the clone 1,000, and a, reopened, 900.
    target = console()
    target.print(view._live.get_renderable())
    assert "about 36 s left" in target.file.getvalue()


def test_a_run_that_is_read_has_the_same_estimate_as_one_that_is_observed(small_run):
    view = LiveView(console(), clock=lambda: small_run[12]["time"])
    view.show(RunHistory.of(entries(small_run[:8])))
    view.show(RunHistory.of(entries(small_run[:13])))
    target = console()
    target.print(view._live.get_renderable())
    # 300 samples in 12 seconds; b and c wait for the rung, d has done nothing, two of them continue: 1,900 are left.
    assert "about 1 min 16 s left" in target.file.getvalue()
    observed = LiveView(console(), clock=lambda: small_run[12]["time"])
    for event in small_run[:13]:
        observed.observe(entry(event))
    target.print(observed._live.get_renderable())
    assert target.file.getvalue().count("about 1 min 16 s left") == 2


def test_notes_on_the_data_stay_above_the_table(interrupted_run):
    target = console()
    interrupted_run[9]["notes"] = ["step 11 was lost\x1b[2J"]
    with LiveView(target, clock=lambda: NOW) as view:
        for event in interrupted_run:
            view.observe(entry(event))
    assert target.file.getvalue().count("note: 3 of 500 rows were cut") == 1
    assert "note: step 11 was lost[2J\n" in target.file.getvalue().replace("\r", "")


def test_another_size_clears_what_was_drawn_for_the_last(small_run):
    target = console()
    view = LiveView(target, clock=lambda: NOW)
    view._live.get_renderable()
    assert "\x1b[2J" not in target.file.getvalue()
    target.size = (80, 20)
    view._live.get_renderable()
    assert "\x1b[2J" in target.file.getvalue()


class Screen(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("file", "environment", "expected"),
    [
        (Screen(), {"TERM": "xterm"}, LiveView),
        (Screen(), {"TERM": "xterm", "NO_COLOR": "1"}, LiveView),
        (Screen(), {"TERM": "dumb"}, PlainView),
        (io.StringIO(), {"TERM": "xterm"}, PlainView),
        (io.StringIO(), {"TERM": "xterm", "FORCE_COLOR": "1"}, PlainView),
    ],
)
def test_the_table_is_drawn_only_where_it_can_be_redrawn(file, environment, expected):
    assert type(open_view(Console(file=file, _environ=environment))) is expected


def test_a_screen_that_cannot_show_the_signs_gets_plain_lines():
    class Narrow(Screen):
        encoding = "ascii"

    assert type(open_view(Console(file=Narrow(), _environ={"TERM": "xterm"}))) is PlainView


def test_without_colours_nothing_is_coloured(small_run):
    target = Console(file=io.StringIO(), width=120, force_terminal=True, _environ={"NO_COLOR": "1", "TERM": "xterm"})
    target.print(final_summary(RunHistory.of(entries(small_run))))
    assert "★ d" in target.file.getvalue()
    assert not re.search(r"\x1b\[[0-9;]*[349][0-7]m", target.file.getvalue())


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
    assert num_rows >= height - 11
    assert f"… and {60 - num_rows} more" in "\n".join(lines) or num_rows == 60


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_live_screen_fits_the_width(small_run, width):
    assert all(cell_len(line) <= width for line in screen(small_run, width=width))


@pytest.mark.parametrize("width", [40, 80])
def test_the_best_line_is_wrapped_not_cut(preference_run, width):
    history = RunHistory.of(entries(preference_run))
    target = Console(file=io.StringIO(), width=width, color_system=None)
    target.print(final_summary(history))
    summary = target.file.getvalue().splitlines()
    best = (
        "best by reward accuracy: c with validation loss 0.6000, reward accuracy 75 % (95 % interval 62–85 %), reward "
        "margin 0.4000 (lr 3e-4)"
    )
    assert best in " ".join(line.strip() for line in summary)
    assert all(cell_len(line) <= width for line in summary)
    lines = screen(preference_run, width=width, height=20)
    assert best in " ".join(line.strip() for line in lines)
    assert len(lines) < 20  # plus the line of the cursor


def test_a_wrapped_best_line_leaves_the_table_fewer_rows(sweep):
    for job in sweep[0]["jobs"]:
        job["config"]["warmup_ratio"] = float(f"0.{job['job'][-2:]}123456789")
    lines = screen(sweep, width=60, height=20)
    assert any(line.startswith("best") for line in lines)
    assert len(lines) < 20  # plus the line of the cursor


def test_before_the_first_event():
    assert screen([]) == ["Preparing …"]


def test_summary_of_a_run_without_an_evaluation_names_no_checkpoints(small_run):
    begun = small_run[: next(n for n, event in enumerate(small_run) if event["event"] == "eval")]
    assert len(begun) > 1
    target = console()
    target.print(final_summary(RunHistory.of(entries(begun)), "runs/maths-1"))
    assert "no job has a finite validation loss yet" in target.file.getvalue()
    assert "runs/maths-1" not in target.file.getvalue()


@pytest.mark.parametrize("finished", [True, False])
def test_summary_says_where_the_adapter_is(small_run, finished):
    target = console()
    target.print(final_summary(RunHistory.of(entries(small_run if finished else small_run[:-1])), "runs/maths-1"))
    text = target.file.getvalue()
    assert ("adapter: runs/maths-1/best" in text) is finished
    assert ("best checkpoints so far: runs/maths-1/jobs" in text) is not finished
    assert (
        "1,700 of 4,000 samples trained, 57.5 % saved by early exit (diverging 22.5 %, underperforming 22.5 %" in text
    )


def test_a_single_reason_of_early_exit_has_no_share_of_its_own(small_run):
    for event in small_run:
        if event["event"] == "job_exited":
            event["reason"] = "underperforming"
    target = console()
    target.print(final_summary(RunHistory.of(entries(small_run))))
    assert "4,000 samples trained, 57.5 % saved by early exit (underperforming)\n" in target.file.getvalue()


def test_in_a_file_the_table_of_jobs_is_as_wide_as_its_rows(small_run):
    terminal, file = console(width=200), Console(file=io.StringIO(), width=200)
    for target in (terminal, file):
        target.print(final_summary(RunHistory.of(entries(small_run))))
    (wide,), (narrow,) = (
        [line for line in target.file.getvalue().splitlines() if line.startswith("──")] for target in (terminal, file)
    )
    rows = [line.rstrip() for line in file.file.getvalue().splitlines() if " 100 %" in line or " 10 %" in line]
    assert len(wide) == 200
    assert len(narrow) == max(map(len, rows)) < 200
    assert not any("…" in row for row in rows), "explanations are not cut"


def test_the_time_of_a_run_counts_what_was_measured_for_it_and_not_what_was_known(small_run):
    target, history = console(), RunHistory.of(entries(small_run))
    for is_cached in (True, False):
        history.forecast = entry({"event": "profile", **PROFILE, "is_cached": is_cached, "profile_s": 100.0}).event
        target.print(final_summary(history))
    known, measured = (line for line in target.file.getvalue().splitlines() if "finished after" in line)
    assert known.endswith(f"finished after {format_duration(history.duration_s)}")
    total = format_duration(history.duration_s + 100.0)
    assert measured.endswith(f"finished after {total}, including 1 min 40 s for measuring")


def test_a_measurement_is_announced_before_it_begins():
    first = {"event": "measuring", "time": 5.0, "task": "maths", "model": "alto-tiny", "kept_in": "/home/a/.cache/alto"}
    update = {**first, "time": 20.0, "remaining_s": 16.0, "is_update": True}
    stream, target = io.StringIO(), console()
    plain, live = PlainView(stream), LiveView(target)
    for each in entries([{**first, "remaining_s": 125.0}, update]):
        plain.observe(each)
        live.observe(each)
    message = "measuring memory and time of maths on alto-tiny: about 2 min 05 s left, longer on a busy machine"
    for text in (stream.getvalue(), " ".join(target.file.getvalue().split())):
        assert message in text
        assert "kept in /home/a/.cache/alto for later runs" in text
    assert "[       15 s] measuring maths: about 16 s left" in stream.getvalue()
    assert "about 16 s left" not in target.file.getvalue()  # the line about the preparation replaces it
    target.print(live._render())
    assert "measuring maths: about 16 s left" in target.file.getvalue()


def test_summary_rows_can_be_limited(sweep):
    def num_rows(**options) -> int:
        target = console()
        target.print(final_summary(RunHistory.of(entries(sweep)), **options))
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


@pytest.mark.parametrize("width", [40, 140])
def test_an_announcement_is_on_top_of_a_table_that_still_fits(sweep, width):
    text = "Stopping after this step; the run can be resumed. Press Ctrl-C again to stop at once."
    target = console(width=width, height=24)
    view = LiveView(target, clock=lambda: NOW)
    view.announce(text)
    assert target.file.getvalue() == "" or text.split()[0] in target.file.getvalue()
    for event in sweep:
        view.observe(entry(event))
    target = console(width=width, height=24)
    target.print(view._live.get_renderable())
    lines = target.file.getvalue().splitlines()
    assert len(lines) < 24  # plus the line of the cursor
    assert " ".join(line.strip() for line in lines).startswith(text)
    assert any("job-" in line and "best" not in line for line in lines)


def test_a_run_that_lasts_shows_how_long_it_takes_and_how_fast_it_is(small_run):
    small_run[0]["data"] = {"train_rows": 500, "train_tokens": 10_000}
    assert "about 10 min 00 s left · 67 tokens/s · 1 min 00 s so far" in "\n".join(screen(small_run[:11]))
    target = console()
    history = RunHistory.of(entries(small_run[:11]))
    target.print(final_summary(history, now=NOW))
    assert "9.1 % done · about 10 min 00 s left · 67 tokens/s" in target.file.getvalue()
    for options in ({}, {"now": NOW, "is_live": False}):
        target = console()
        target.print(final_summary(history, **options))
        assert "left" not in target.file.getvalue()


def test_a_job_of_a_run_without_a_process_is_interrupted(small_run):
    def stages(**options):
        target = console()
        target.print(final_summary(RunHistory.of(entries(small_run[:11])), **options))
        return re.findall(r"^. [a-d] +[\d.e-]+ +\d +(\w+)", target.file.getvalue(), re.MULTILINE)

    assert stages() == ["parked", "diverging", "training", "training"]
    assert stages(is_live=False) == ["parked", "diverging", "interrupted", "interrupted"]


def test_the_name_of_a_single_configuration_is_shown_once(small_run, tmp_path):
    start, *events = small_run
    alone = [{**start, "jobs": start["jobs"][-1:]}, *(event for event in events if event.get("job", "d") == "d")]
    alone = [event for event in alone if event["event"] != "rung"]
    target = console()
    target.print(final_summary(RunHistory.of(entries(alone))))
    [line] = [line for line in target.file.getvalue().splitlines() if line.startswith("best")]
    assert "d with validation loss" in line
    assert "(d)" not in line
    page = report_page(tmp_path, RunHistory.of(entries(alone)))
    assert '<dd>d</dd>\n<dd class="detail">d</dd>' not in page
    assert "<b>d</b><br>d" not in page


def test_a_line_of_numbers_is_never_cut_in_the_middle_of_one(small_run):
    wide, narrow = (next(line for line in screen(small_run[:11], width=w) if " so far" in line) for w in (140, 80))
    assert wide.rstrip().endswith("200 of 4,000 samples trained, 22.5 % saved")
    assert narrow.rstrip().endswith("so far · 22.5 % saved")
