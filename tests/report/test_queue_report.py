"""The page of a queue: one clock without interruptions, and correct names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from journals import entries

from alto.report import write_queue_report
from alto.report.queue_report import _context
from alto.runs import QueueHistory

FALLBACK = "scheduled by lpt: method: cp-sat needs the package ortools, found none"
ADVICE = "stopped on request; continue with: alto resume /runs/queue/tasks/a"
START = 1000.0


def started(time: float, task: str, index: int) -> dict[str, Any]:
    return {"event": "executor_started", "time": time, "task": task, "attempt": 1, "gpus": [["local", index]]}


def ended(time: float, task: str, outcome: str, reason: str = "") -> dict[str, Any]:
    return {
        "event": "executor_ended", "time": time, "task": task, "attempt": 1, "outcome": outcome, "reason": reason,
    }  # fmt: skip


def planned(time: float, reason: str, **starts: float) -> dict[str, Any]:
    places = [
        {"task": task, "gpus": [["local", 0]], "start_s": start_s, "duration_s": 20.0}
        for task, start_s in starts.items()
    ]
    return {
        "event": "planned", "time": time, "reason": reason, "method": "lpt", "status": "optimal", "makespan_s": 40.0,
        "bound_s": 40.0, "notice": FALLBACK, "placements": places,
    }  # fmt: skip


@pytest.fixture
def interrupted_queue() -> list[dict[str, Any]]:
    """Return a queue on two CPU slots: `a` on one and `b` on the other, stopped after 10 seconds each, resumed 300
    seconds later; `c` is added 100 seconds after both are done."""
    lines = [
        {
            "event": "queue_started",
            "time": 0.0,
            "method": "cp-sat",
            "devices": "cpu slots",
            "nodes": [{"name": "local", "gpus": [0, 1]}],
            "tasks": [{"task": task, "num_gpus": 1, "duration_s": 20.0} for task in "ab"],
        },
        planned(0.0, "a submitted; b submitted", a=0.0, b=20.0),
        started(0.0, "a", 0),
        started(0.0, "b", 1),
        ended(10.0, "a", "interrupted", ADVICE),
        ended(10.0, "b", "interrupted", ADVICE),
        {"event": "queue_interrupted", "time": 10.0, "open": ["a", "b"]},
        {"event": "queue_resumed", "time": 310.0, "done": []},
        planned(310.0, "a submitted; b submitted", a=0.0, b=20.0),
        started(310.0, "a", 0),
        started(310.0, "b", 1),
        ended(320.0, "a", "finished"),
        ended(320.0, "b", "finished"),
        {"event": "queue_completed", "time": 320.0},
        {"event": "queue_resumed", "time": 420.0, "done": ["a", "b"]},
        {"event": "task_submitted", "time": 420.0, "task": "c", "num_gpus": 1, "duration_s": 20.0},
        planned(420.0, "c submitted", c=0.0),
        started(420.0, "c", 0),
        ended(440.0, "c", "finished"),
        {"event": "queue_completed", "time": 440.0},
    ]
    return [{**line, "time": START + line["time"]} for line in lines]


@pytest.fixture
def page_of(tmp_path: Path):
    def page(lines: list[dict[str, Any]]) -> str:
        journal = "".join(json.dumps({"seq": seq, **line}) + "\n" for seq, line in enumerate(lines))
        (tmp_path / "journal.jsonl").write_text(journal)
        (tmp_path / "queue.yaml").write_text("tasks: []\n")
        return write_queue_report(tmp_path).read_text("utf-8")

    return page


def bars(figure: dict[str, Any], kind: str) -> set[tuple[str, float, float]]:
    return {
        (task, start, start + length)
        for trace in figure["traces"]
        if trace["meta"]["kind"] == kind
        for task, start, length in zip(trace["text"], trace["base"], trace["x"], strict=True)
    }


def test_time_in_which_no_process_ran_the_queue_is_in_no_number(interrupted_queue, tmp_path):
    queue = QueueHistory.of(entries(interrupted_queue))
    found = _context(queue, tmp_path)
    assert queue.duration_s == 40.0
    assert [(row["planned_start_s"], row["start_s"], row["spent_s"]) for row in found["rows"]] == [
        (0.0, 0.0, 20.0), (20.0, 0.0, 20.0), (20.0, 20.0, 20.0),
    ]  # fmt: skip
    assert [queue.worked_s(plan.at) for plan in queue.plans] == [0.0, 10.0, 20.0]
    assert bars(found["gantt"], "actual") == {
        ("a", 0.0, 10.0), ("a", 10.0, 20.0), ("b", 0.0, 10.0), ("b", 10.0, 20.0), ("c", 20.0, 40.0),
    }  # fmt: skip
    assert bars(found["gantt"], "planned") == {("a", 0.0, 20.0), ("b", 20.0, 40.0), ("c", 20.0, 40.0)}
    assert found["gantt"]["gaps"] == [(10.0, "interrupted for 5 min 00 s")], "it was idle until `c` was added"
    # 60 seconds of executors, in 40 seconds on two slots.
    assert found["utilisation"] == 0.75


def test_a_machine_that_joined_and_one_that_left_have_lanes(
    interrupted_queue: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Two tasks that share the new machine at the same time have a lane each."""
    last = interrupted_queue[-1]["time"]
    new = {"event": "executor_started", "time": last, "task": "c", "attempt": 2, "gpus": [["new", 0]], "executor": "e"}
    lines = [
        *interrupted_queue,
        {"event": "gpu_lost", "time": last, "node": "local", "index": 1},
        {"event": "gpu_added", "time": last, "node": "new", "index": 0},
        new,
        {**new, "task": "a"},
        ended(last + 10.0, "c", "finished"),
        ended(last + 10.0, "a", "finished"),
    ]
    figure = _context(QueueHistory.of(entries(lines)), tmp_path)["gantt"]
    assert figure["lanes"] == ["local:0", "local:0 (2)", "new:0", "new:0 (2)", "local:1"]
    assert {lane for trace in figure["traces"] for lane in trace["y"]} <= set(figure["lanes"])


def test_the_page_says_once_what_is_cut_out(interrupted_queue, page_of):
    page = page_of(interrupted_queue)
    message = (
        "No process ran the queue for 5 min 00 s (1 interruption): this time is cut out of all times on this page."
    )
    assert page.count(message) == 1
    assert '<td class="number">10 s</td>\n<td>a submitted; b submitted</td>' in page


def test_without_an_interruption_the_page_says_nothing_of_it(interrupted_queue, page_of):
    begun = interrupted_queue[:6]
    # The journal was lost: the queue is resumed at the moment it began.
    lost = {"event": "queue_resumed", "time": START, "done": []}
    page = page_of([begun[0], lost, *begun[1:]])
    assert "No process ran the queue" not in page
    assert "interrupted for" not in page


def test_attempts_are_numbered_by_order_though_the_journal_restarts_its_count(interrupted_queue, tmp_path):
    attempts = _context(QueueHistory.of(entries(interrupted_queue)), tmp_path)["rows"][1]["attempts"]
    assert [attempt.split(":")[0] for attempt in attempts] == ["1 on local", "2 on local"]


def test_the_method_is_the_one_that_made_the_schedule(interrupted_queue, page_of):
    assert "scheduled by lpt</p>" in page_of(interrupted_queue)
    interrupted_queue[-4]["method"] = "milp"
    assert "scheduled by lpt, milp</p>" in page_of(interrupted_queue)
    assert "scheduled by" not in page_of(interrupted_queue[:1])


def test_only_unfinished_tasks_have_a_command_to_continue(interrupted_queue, page_of):
    assert "continue with" not in page_of(interrupted_queue)
    stopped = page_of(interrupted_queue[:7])
    assert stopped.count(f"1 on local:0: interrupted ({ADVICE})") == 1
    assert stopped.count("continue with") == 2


def test_thin_bars_are_called_the_first_plan_of_each_task(interrupted_queue, page_of):
    page = page_of(interrupted_queue)
    assert "A thin bar shows a task in the first plan that includes it" in page


def test_each_task_has_its_winner_and_what_it_saved(interrupted_queue, page_of, small_run, tmp_path):
    for name, events in (("a", small_run), ("b", small_run[:11])):
        folder = tmp_path / "tasks" / name
        folder.mkdir(parents=True)
        (folder / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    page = page_of(interrupted_queue)
    assert '<td class="winner">d<span class="detail">lr 2e-4 · r 8</span></td>' in page
    assert '<td class="number">57.5 %</td>' in page, "task a: 2,300 of 4,000"
    rows = {row["task"].task: row for row in _context(QueueHistory.of(entries(interrupted_queue)), tmp_path)["rows"]}
    assert (rows["a"]["winner"], rows["b"]["winner"], rows["c"]["winner"]) == ("d", "b", "")
    assert (rows["c"]["saved_share"], rows["c"]["hours"]) == (None, None)


def test_savings_of_all_tasks_are_added(interrupted_queue, small_run, tmp_path, monkeypatch):
    monkeypatch.delenv("ALTO_GPU_HOUR_PRICE", raising=False)
    for name in "ab":
        folder = tmp_path / "tasks" / name
        folder.mkdir(parents=True)
        (folder / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in small_run))
    queue = QueueHistory.of(entries(interrupted_queue))
    found = _context(queue, tmp_path)["savings"]
    assert (found["samples_trained"], found["samples_budgeted"], found["share"]) == (3400, 8000, 0.575)
    # Each took 24 seconds for 1,700 samples, and saved 2,300.
    assert found["saved_h"] == pytest.approx(2 * 24 / 3600 * 2300 / 1700)
    assert found["cost"] is None
    assert _context(queue, tmp_path, 3600.0)["savings"]["cost"] == pytest.approx(2 * 24 * 2300 / 1700)


def test_a_queue_whose_tasks_have_not_begun_has_saved_nothing(interrupted_queue, page_of, tmp_path):
    assert _context(QueueHistory.of(entries(interrupted_queue)), tmp_path)["savings"] is None
    assert "nothing was trained yet" in page_of(interrupted_queue)


def test_numbers_and_their_words_agree(interrupted_queue, page_of):
    page = page_of(interrupted_queue)
    assert "3 tasks on 2 CPU slots" in page
    assert "3 plans, 5 executor starts." in page
    one = {**interrupted_queue[0], "nodes": [{"name": "local", "gpus": [0]}]}
    one["tasks"] = one["tasks"][:1]
    page = page_of([one, {**interrupted_queue[1], "placements": []}])
    assert "1 task on 1 CPU slot " in page
    assert "of 1 CPU slot, from" in page
    assert "1 plan, 0 executor starts." in page
