"""Journals: one JSON object per line, in order; reading and continuing them after an interruption."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from journals import entry

from alto.errors import RunError, RunWriteError
from alto.runs import Journal, JournalEntry, cut_journal, read_entries, read_events, read_intact_events
from alto.runs.events import (
    AttemptStarted,
    CommandRefused,
    QueueCompleted,
    QueueInterrupted,
    QueueResumed,
    TrainSteps,
    UnknownEvent,
)


def strict(line: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_lines_are_numbered_and_hold_the_events(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append(TrainSteps(job="job-000", first_step=1, losses=(0.1, 1 / 3)))
        journal.append(CommandRefused(command="c-0", job="job-000", why="ü\n"))
    lines = (tmp_path / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    events = [strict(line) for line in lines]
    assert [(event["seq"], event["event"]) for event in events] == [(0, "train"), (1, "command_refused")]
    assert events[0]["losses"] == [0.1, 1 / 3]
    assert events[1]["why"] == "ü\n"
    assert events[0]["time"] <= events[1]["time"]


def test_an_event_is_on_disk_before_observers_see_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    seen: list[tuple[int, dict[str, Any]]] = []
    with Journal(path, [lambda entry: seen.append((path.read_text().count("\n"), entry.to_dict()))]) as journal:
        journal.append(UnknownEvent(name="a", fields={"value": 1}))
        journal.append(UnknownEvent(name="b", fields={}))
    assert [count for count, _ in seen] == [1, 2]
    assert [event for _, event in seen] == [json.loads(line) for line in path.read_text().splitlines()]


def test_numbers_that_json_has_not_become_strings(tmp_path: Path) -> None:
    seen: list[JournalEntry] = []
    evidence = {"train_loss": math.inf, "step": 3.0}
    with Journal(tmp_path / "journal.jsonl", [seen.append]) as journal:
        journal.append(TrainSteps(job="a", first_step=1, losses=(1.0, math.nan, -math.inf)))
        journal.append(UnknownEvent(name="x", fields={"evidence": evidence}))
    train, other = (strict(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines())
    assert train["losses"] == [1.0, "nan", "-inf"]
    assert other["evidence"] == {"train_loss": "inf", "step": 3}
    assert isinstance(seen[0].event, TrainSteps)
    assert math.isnan(seen[0].event.losses[1])


def test_an_existing_journal_is_appended_to(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with Journal(tmp_path / "journal.jsonl") as journal:
            journal.append(UnknownEvent(name=name, fields={}))
    assert [strict(line)["event"] for line in (tmp_path / "journal.jsonl").read_text().splitlines()] == ["a", "b"]


# The journal of a queue of two tasks until its disk was full.
EVENTS: list[dict[str, Any]] = [
    {
        "event": "queue_started",
        "method": "lpt",
        "devices": "cpu slots",
        "nodes": [{"name": "local", "gpus": [0]}],
        "tasks": [{"task": "one", "num_gpus": 1, "duration_s": 10.0, "priority": 0, "tenant": ""}],
    },
    {
        "event": "planned",
        "reason": "one came",
        "method": "lpt",
        "status": "heuristic",
        "makespan_s": 10.0,
        "bound_s": 10.0,
        "notice": "",
        "placements": [{"task": "one", "gpus": [["local", 0]], "start_s": 0.0, "duration_s": 10.0}],
    },
    {"event": "executor_started", "task": "one", "attempt": 1, "gpus": [["local", 0]]},
    {"event": "executor_ended", "task": "one", "attempt": 1, "outcome": "lost", "reason": 'a "quoted" {"seq": 7} – ü'},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Journal(tmp_path / "journal.jsonl") as journal:
        for event in EVENTS:
            journal.append(entry(event).event)
    return tmp_path / "journal.jsonl"


def kinds(path: Path) -> list[str]:
    return [event["event"] for event in read_events(path)]


def every_tear(path: Path) -> list[bytes]:
    """Return the journal with its last line cut after each of its bytes, and with only its line end missing."""
    data = path.read_bytes()
    begins_at = data.rstrip(b"\n").rfind(b"\n") + 1
    return [data[:end] for end in range(begins_at, len(data) + 1)]


def test_a_journal_torn_at_any_byte_is_appended_to(path: Path) -> None:
    tears = every_tear(path)
    assert len(tears) > 100
    for torn in tears:
        path.write_bytes(torn)
        is_whole = len(torn) >= len(tears[-1]) - 1  # only the line end may be missing
        with Journal(path) as journal:
            assert len(journal.past) == (4 if is_whole else 3)
            journal.append(QueueResumed(done=(), notes=()))
            journal.append(QueueCompleted())
        events = read_events(path)
        assert [event["event"] for event in events[-2:]] == ["queue_resumed", "queue_completed"]
        assert [event["seq"] for event in events] == list(range(len(journal.past) + 2))
        assert [json.loads(line) for line in path.read_bytes().splitlines()] == events
        assert read_intact_events(path) == events


def test_a_journal_that_was_appended_to_where_it_was_torn_is_read_whole(path: Path) -> None:
    """Version 0.1 did this to journals of queues: the next session begins in the middle of a line."""
    tears = every_tear(path)
    for torn in tears[1:-1]:
        path.write_bytes(torn)
        first = 4 if torn == tears[-2] else 3
        after = [{"seq": first, "time": 3e9, "event": "queue_resumed", "done": []}]
        after += [{"seq": first + 1, "time": 3e9, "event": "queue_interrupted", "open": ["one"]}]
        with path.open("ab") as file:
            file.write("".join(json.dumps(event) + "\n" for event in after).encode())
        assert read_events(path)[first:] == after
        assert read_intact_events(path) == read_events(path)
        with Journal(path) as journal:
            journal.append(QueueResumed(done=(), notes=()))
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        assert [line["seq"] for line in lines] == list(range(first + 3))


def test_a_damaged_line_in_the_middle_is_an_error_with_a_remedy(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b'{"seq": 2, \n', *lines[3:]]))
    with pytest.raises(RunError, match=r"line 3 of 4 is not one.*Delete this line.*alto resume"):
        read_events(path)
    with Journal(path) as journal:  # as resuming does
        assert journal.num_lines_cut == 2
        journal.append(QueueResumed(done=(), notes=()))
    assert kinds(path) == ["queue_started", "planned", "queue_resumed"]


def test_opening_a_whole_journal_changes_nothing(path: Path) -> None:
    before, inode = path.read_bytes(), path.stat().st_ino
    with Journal(path) as journal:
        assert [past.name for past in journal.past] == kinds(path)
    assert (path.read_bytes(), path.stat().st_ino) == (before, inode)


def test_a_run_goes_back_behind_what_it_wrote(path: Path) -> None:
    with Journal(path, past=read_entries(path)[:2]) as journal:
        journal.append(QueueCompleted())
    assert kinds(path) == ["queue_started", "planned", "queue_completed"]


class FullFile:
    """A file that takes ``room`` more bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file = file
        self.room = room

    def write(self, data: bytes) -> int:
        written = self.file.write(data[: self.room]) if self.room else 0
        self.room -= written
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(written)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("can_truncate", [True, False])
def test_an_event_that_could_not_be_written_leaves_nothing_behind(
    can_truncate: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()
    journal = Journal(path)
    disk = FullFile(journal._file, room=20)
    if not can_truncate:
        disk.truncate = lambda size: (_ for _ in ()).throw(OSError(errno.EIO, "broken"))  # type: ignore[attr-defined]
    monkeypatch.setattr(journal, "_file", disk)
    with pytest.raises(RunWriteError, match="No space left"):
        journal.append(AttemptStarted(task="one", attempt=2, gpus=()))
    assert (path.read_bytes() == before) is can_truncate
    disk.room = 10_000
    if not can_truncate:
        del disk.truncate  # type: ignore[attr-defined]
    journal.append(QueueInterrupted(open=("one",)))
    journal.__exit__()
    assert kinds(path) == [*(event["event"] for event in EVENTS), "queue_interrupted"]
    assert [event["seq"] for event in read_events(path)] == list(range(5))
    (line,) = path.read_bytes()[len(before) :].splitlines()
    assert json.loads(line)["event"] == "queue_interrupted", "the torn line is gone"


def test_a_cut_that_fails_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunWriteError, match="No space left"):
        cut_journal(path, 1)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]
