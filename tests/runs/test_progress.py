"""The progress of runs and queues, including resumed ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from journals import PROFILE, entries, event
from tiny import make_task

from alto.records import Rung
from alto.runs import JournalEntry, QueueDir, QueueEntry, QueueProgress, RunHistory, events
from alto.runs.history import Pace
from alto.runs.progress import expected_samples_left, fraction_done, next_stop, outlook


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
        # The silence since the last point counts, because nobody knows whether work went on.
        ([(0.0, 0), (10.0, 20)], 20.0, 1.0),
        # A slow beginning is forgotten once it lies before the window.
        ([(0.0, 0), (1000.0, 10), (1100.0, 210)], 1100.0, 2.0),
        # A clock set back, or a count that restarts, restarts the measurement.
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


def planned(events) -> list:
    """Return the same run with a profile: 100 seconds with the rungs of its early exit."""
    return [events[0], {"event": "profile", "time": events[0]["time"], **PROFILE}, *events[1:]]


def test_before_anything_is_trained_the_estimate_is_the_plan(small_run):
    start = small_run[0]["time"]
    history = RunHistory.of(entries(planned(small_run)[:4]))
    assert outlook(history, start).remaining_s == 100.0
    assert outlook(history, start + 30.0).remaining_s == 70.0
    assert outlook(history, start + 500.0).remaining_s == 0.0
    assert (outlook(history, start).fraction_done, outlook(history, start).tokens_per_s) == (0.0, None)
    unplanned = RunHistory.of(entries(small_run[:3]))
    assert outlook(unplanned, start + 30.0).remaining_s is None


def test_the_more_is_trained_the_less_the_plan_counts(small_run):
    now = small_run[12]["time"]  # 300 samples in 12 seconds, 1,900 left: 76 s at this pace
    unplanned = RunHistory.of(entries(small_run[:13]))
    assert outlook(unplanned, now).remaining_s == pytest.approx(76.0)
    found = outlook(RunHistory.of(entries(planned(small_run)[:14])), now)
    share = 300 / 2200
    assert found.fraction_done == pytest.approx(share)
    trust = share / (share + 0.05)
    assert found.remaining_s == pytest.approx(((1 - share) * 100.0) ** (1 - trust) * 76.0**trust)


def test_a_resumed_run_is_estimated_without_the_time_without_a_process(interrupted_run):
    events = planned(interrupted_run)
    resumed = next(index for index, event in enumerate(events) if event["event"] == "task_resumed")
    # Nothing has trained since: 200 samples in the 8 seconds before, and a has ended with 900 left.
    history = RunHistory.of(entries(events[: resumed + 1]))
    share = 200 / (200 + 900)
    by_pace_s = 8.0 * (1 - share) / share
    trust = share / (share + 0.05)
    assert outlook(history, history.last_seen_at).remaining_s == pytest.approx(
        ((1 - share) * 100.0) ** (1 - trust) * by_pace_s**trust
    )
    # Then b has trained 400 samples in 6 seconds: 36 s at this pace for the 2,400 left, including the clone's.
    later = RunHistory.of(entries(events))
    share = 600 / 3000
    trust = share / (share + 0.05)
    assert outlook(later, later.last_seen_at).remaining_s == pytest.approx(
        ((1 - share) * 100.0) ** (1 - trust) * 36.0**trust
    )


def test_tokens_per_second_are_those_of_the_rows_trained(small_run):
    small_run[0]["data"] = {"train_rows": 500, "train_tokens": 10_000}
    now = small_run[12]["time"]
    assert outlook(RunHistory.of(entries(small_run[:13])), now).tokens_per_s == pytest.approx(20 * 300 / 12)
    small_run[0]["data"] = {"train_rows": "many"}
    assert outlook(RunHistory.of(entries(small_run[:13])), now).tokens_per_s is None


def test_a_finished_run_is_done_and_one_without_jobs_is_not(small_run):
    finished = outlook(RunHistory.of(entries(small_run)), small_run[-1]["time"])
    assert (finished.fraction_done, finished.remaining_s) == (1.0, 0.0)
    assert fraction_done(RunHistory()) == 0.0


def test_early_exit_settings_that_are_not_valid_change_no_estimate(small_run):
    small_run[0]["early_exit"] = {"policy": "alto", "rungs": [["x", {}]]}
    history = RunHistory.of(entries(small_run[:13]))
    assert history.rung_settings == ()
    assert outlook(history, small_run[12]["time"]).remaining_s is not None


NAMES = ("done", "cut")
SETTINGS = {"method": "lpt", "strategy": "single", "cluster": "local", "total_gpus": None, "quotas": {}}


@pytest.fixture
def queue(tmp_path: Path, small_run: list[dict[str, Any]], interrupted_run: list[dict[str, Any]]) -> QueueDir:
    """A queue with a finished task and a task interrupted after three evaluations."""
    added = [QueueEntry(task=name, num_gpus=1, duration_s=5.0) for name in NAMES]
    queue = QueueDir.create(tmp_path / "runs", added, [make_task(tmp_path, name=name) for name in NAMES], SETTINGS)
    for name, journal in zip(NAMES, (small_run, interrupted_run), strict=True):
        lines = (json.dumps({**line, "seq": seq}) + "\n" for seq, line in enumerate(journal))
        queue.run_of(name).journal_file.write_text("".join(lines), encoding="utf-8")
    queue.run.journal_file.write_text("".join(json.dumps(line) + "\n" for line in past()), encoding="utf-8")
    return queue


def past() -> list[dict[str, Any]]:
    """Return the queue's own journal."""
    tasks = [{"task": name, "num_gpus": 1, "duration_s": 5.0} for name in NAMES]
    starts = [
        {"event": "executor_started", "task": name, "attempt": 1, "gpus": [["n", 0]]} for name in NAMES
    ]  # fmt: skip
    return [
        {"seq": seq, "time": float(seq), **line}
        for seq, line in enumerate(
            [
                {"event": "queue_started", "devices": "gpus", "nodes": [{"name": "n", "gpus": [0]}], "tasks": tasks},
                *starts,
                {"event": "executor_ended", "task": "done", "attempt": 1, "outcome": "finished", "reason": ""},
            ]
        )
    ]


def facts(progress: QueueProgress) -> list[tuple[str, float, float | None]]:
    return [
        (task.task, progress.fraction_done(task), progress.best_loss(task)) for task in progress.queue.tasks.values()
    ]


def relayed(task: str, entry: JournalEntry) -> JournalEntry:
    return JournalEntry(seq=0, time=entry.time, event=events.TaskRelayed(task=task, entry=entry))


def test_a_resumed_queue_begins_with_what_its_journals_hold(queue: QueueDir) -> None:
    resumed = QueueProgress.before_resume(queue.root)
    for entry in entries(past()):  # the engine shows them again
        resumed.apply(entry)
    assert facts(resumed) == facts(QueueProgress.read(queue.root))
    assert facts(resumed)[0] == ("done", 1.0, 1.9)
    assert len(resumed.queue.tasks["done"].attempts) == 1


@pytest.mark.parametrize("begin", [QueueProgress.before_resume, QueueProgress.read])
def test_what_was_trained_after_the_checkpoint_is_not_counted_twice(
    queue: QueueDir, begin: Callable[[Path], QueueProgress]
) -> None:
    progress = begin(queue.root)
    run = queue.run_of("cut").journal_file
    lines = run.read_text(encoding="utf-8").splitlines(keepends=True)
    run.write_text("".join(lines[:-2]), encoding="utf-8")  # as the executor cuts it back to its checkpoint
    trained_before = progress.runs["cut"].samples_trained
    checkpoint = len(lines) - 2
    for seq, line in enumerate([{"event": "task_resumed"}, *map(json.loads, lines[-2:])], start=checkpoint):
        (entry,) = entries([{**line, "seq": seq, "time": 0.0}])
        progress.apply(relayed("cut", entry))
    assert progress.runs["cut"].samples_trained == trained_before


def test_a_damaged_journal_is_reported_until_its_run_is_resumed(queue: QueueDir) -> None:
    run = queue.run_of("cut").journal_file
    first, *_ = run.read_text(encoding="utf-8").splitlines(keepends=True)
    run.write_text(first + "{}\n" + first, encoding="utf-8")
    progress = QueueProgress.before_resume(queue.root)
    assert "Expected" in progress.unreadable["cut"]
    progress.apply(relayed("cut", JournalEntry(seq=1, time=2.0, event=event("task_resumed"))))
    assert progress.unreadable == {}
    assert progress.runs["cut"].started is not None
