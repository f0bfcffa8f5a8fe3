"""A queue in the terminal, including narrow ones."""

from __future__ import annotations

import io
from typing import Any

import pytest
from journals import entries, entry
from rich.console import Console

from alto.runs import JournalEntry, QueueProgress, events
from alto.views import queue_summary
from alto.views.queue_view import LiveQueueView, PlainQueueView

TASKS = [{"task": "a", "num_gpus": 1, "duration_s": 20.0}]
NODES = [{"name": "local", "gpus": [0]}]


STARTED_RUN = {"event": "checkpoint", "time": 12.0, "jobs": {}}


def started(time: float) -> dict[str, Any]:
    return {"event": "executor_started", "time": time, "task": "a", "attempt": 1, "gpus": [["local", 0]]}


RESUMED = [
    {"event": "queue_started", "time": 0.0, "nodes": NODES, "tasks": TASKS},
    started(0.0),
    {"event": "queue_interrupted", "time": 10.0, "open": ["a"]},
    {"event": "queue_resumed", "time": 310.0, "done": []},
]


def test_time_so_far_is_without_interruptions():
    console = Console(width=120)
    view = LiveQueueView(console, clock=lambda: 315.0)
    for each in entries(RESUMED):
        view.observe(each)
    with console.capture() as screen:
        console.print(view._render())
    assert "\n15 s so far" in screen.get()


def test_attempts_are_numbered_by_order_though_the_journal_restarts_its_count():
    view = PlainQueueView(io.StringIO())
    for each in entries([*RESUMED, started(311.0)]):
        view.observe(each)
    lines = [line.split("  ")[-1] for line in view._stream.getvalue().splitlines()]
    assert [line for line in lines if line.startswith("a started")] == [
        "a started on local:0",
        "a started on local:0, attempt 2",
    ]


def test_a_notice_is_not_repeated_by_every_plan():
    plan = {"event": "planned", "method": "lpt", "status": "heuristic", "reason": "a submitted"}
    plan |= {"makespan_s": 20.0, "bound_s": 20.0, "placements": []}
    events = [{**plan, "time": float(time), "notice": notice} for time, notice in enumerate(["why", "why", "", "why"])]
    view = PlainQueueView(io.StringIO())
    for each in entries([RESUMED[0], *events]):
        view.observe(each)
    planned = [line for line in view._stream.getvalue().splitlines() if "planned by" in line]
    assert ["note: why" in line for line in planned] == [True, False, False, True]


def screen_of(view: LiveQueueView, *, width: int, height: int = 30) -> list[str]:
    console = Console(width=width, height=height)
    with console.capture() as screen:
        console.print(view._render())
    return screen.get().splitlines()


def test_what_a_task_takes_is_beside_what_was_planned():
    view = LiveQueueView(Console(width=120), clock=lambda: 48.0)
    for each in entries(RESUMED[:2]):
        view.observe(each)
    assert "48 s (planned 20 s)" in "\n".join(screen_of(view, width=120))
    assert "48 s" in "\n".join(screen_of(view, width=80))


def test_an_announcement_is_on_top_of_a_table_that_still_fits():
    tasks = [{"task": f"t{number}", "num_gpus": 1, "duration_s": 20.0} for number in range(40)]
    view = LiveQueueView(Console(width=60, height=20, file=io.StringIO()), clock=lambda: 5.0)
    text = "Stopping after this step; the queue can be resumed. Press Ctrl-C again to stop at once."
    view.announce(text)
    for each in entries([{**RESUMED[0], "tasks": tasks}]):
        view.observe(each)
    lines = screen_of(view, width=60, height=20)
    assert " ".join(line.strip() for line in lines[:2]) == text
    assert len(lines) < 20
    assert any(line.strip().startswith("t0 ") for line in lines)


def test_one_slot_and_one_task_are_singular():
    progress = QueueProgress()
    nodes = [{"name": "local", "gpus": [0]}]
    tasks = [{"task": "a", "num_gpus": 1, "duration_s": 5.0}]
    begun = {"event": "queue_started", "time": 0.0, "devices": "cpu slots", "nodes": nodes, "tasks": tasks}
    progress.apply(entry(begun))
    console = Console(file=io.StringIO(), width=80)
    console.print(queue_summary(progress))
    assert console.file.getvalue().startswith("0 of 1 task done on 1 CPU slot: ")


def test_a_task_of_a_queue_without_a_process_is_interrupted():
    progress = QueueProgress()
    for each in entries(RESUMED[:2]):
        progress.apply(each)
    drawn = {}
    for is_live in (True, False):
        console = Console(file=io.StringIO(), width=120)
        console.print(queue_summary(progress, is_live=is_live))
        [drawn[is_live]] = [line.split() for line in console.file.getvalue().splitlines() if line.startswith(" a ")]
    assert (drawn[True][1], drawn[False][1]) == ("running", "interrupted")


def test_a_task_that_runs_counts_until_now_while_a_process_works_on_it():
    progress = QueueProgress()
    for each in entries(RESUMED[:2]):
        progress.apply(each)
    drawn = {}
    for is_live in (True, False):
        console = Console(file=io.StringIO(), width=120)
        console.print(queue_summary(progress, is_live=is_live, now=RESUMED[1]["time"] + 65.0))
        [line] = [line for line in console.file.getvalue().splitlines() if line.startswith(" a ")]
        drawn[is_live] = line.partition("(planned")[0].split("  ")[-1].strip()
    assert drawn == {True: "1 min 05 s", False: "0 s"}


def measuring(time: float, **more: Any) -> dict[str, Any]:
    return {"event": "measuring", "time": time, "task": "a", "model": "tiny", **more}


def test_the_time_of_a_queue_counts_the_measuring_before_it():
    progress = QueueProgress()
    measured = {"event": "measured", "time": 65.0, "task": "a", "duration_s": 20.0}
    for each in entries(
        [RESUMED[0], measuring(5.0), measured, started(65.0), {"event": "queue_completed", "time": 90.0}]
    ):
        progress.apply(each)
    console = Console(file=io.StringIO(), width=80)
    console.print(queue_summary(progress))
    assert "after 1 min 30 s, including 1 min 00 s for measuring" in " ".join(console.file.getvalue().split())


def test_a_task_that_measures_is_shown_live_and_in_plain_lines_until_it_trains():
    begun = entry(measuring(11.0, remaining_s=40.0))
    view, plain = LiveQueueView(Console(width=120), clock=lambda: 12.0), PlainQueueView(io.StringIO())
    relayed = JournalEntry(seq=0, time=11.0, event=events.TaskRelayed(task="a", entry=begun))
    for each in [*entries(RESUMED[:2]), relayed]:
        view.observe(each)
        plain.observe(each)
    message = "measuring memory and time of a on tiny: about 40 s left"
    assert message in plain._stream.getvalue()
    assert message in "\n".join(screen_of(view, width=160))
    assert view.progress.queue.tasks["a"].attempts
    trains = JournalEntry(seq=0, time=12.0, event=events.TaskRelayed(task="a", entry=entry(STARTED_RUN)))
    view.observe(trains)
    assert message not in "\n".join(screen_of(view, width=160))


NAMES = ("qwen-maths-sweep", "llama-short")


def task_started(name: str, attempt: int, time: float) -> dict[str, object]:
    return {"event": "executor_started", "time": time, "task": name, "attempt": attempt, "gpus": [["n", 0]]}


def resumed() -> QueueProgress:
    progress = QueueProgress()
    journal = [
        {
            "event": "queue_started",
            "time": 0.0,
            "devices": "gpus",
            "nodes": [{"name": "n", "gpus": [0, 1]}],
            "tasks": [{"task": name, "num_gpus": 1, "duration_s": 500.0} for name in NAMES],
        },
        *(task_started(name, 1, 1.0) for name in NAMES),
        {"event": "queue_resumed", "time": 100.0},
        *(
            {"event": "executor_started", "time": 101.0, "task": name, "attempt": 2, "gpus": [["n", 0]]}
            for name in NAMES
        ),
        {
            "event": "executor_ended",
            "time": 300.0,
            "task": NAMES[1],
            "attempt": 2,
            "outcome": "failed",
            "reason": "killed " * 20,
        },
        {"event": "task_given_up", "time": 301.0, "task": NAMES[1], "reason": "killed " * 20},
    ]
    for event in journal:
        progress.apply(entry(event))
    return progress


@pytest.mark.parametrize("width", [120, 100, 99, 80, 75, 74, 60])
def test_names_and_states_are_whole(width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    console.print(queue_summary(resumed()))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    rows = [line for line in text.splitlines() if any(line.strip().startswith(name + " ") for name in NAMES)]
    assert [row.split()[:2] for row in rows] == [[NAMES[0], "running"], [NAMES[1], "failed"]]
    assert all(" 0 % " in row and "3 min" in row for row in rows)
    assert "qwen-maths-sweep: attempt 2; before: the controller" in text
    assert "llama-short: killed" in text
    assert max(map(len, text.splitlines())) <= width
