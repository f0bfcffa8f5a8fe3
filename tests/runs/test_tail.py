from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from journals import entry

from alto.runs import Journal, JournalTail, cut_journal
from alto.runs.events import UnknownEvent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def write(path: Path, *steps: int, past: int = 0) -> None:
    with Journal(path, past=[entry({"event": "step"})] * past) as journal:
        for step in steps:
            journal.append(UnknownEvent(name="step", fields={"step": step}))


def line(step: int) -> bytes:
    return json.dumps({"seq": step, "time": 0.0, "event": "step", "step": step}).encode() + b"\n"


def steps(tail: JournalTail) -> list[int]:
    return [entry.event.fields["step"] for entry in tail.read() if isinstance(entry.event, UnknownEvent)]


def test_every_line_is_given_once(path: Path) -> None:
    tail = JournalTail(path)
    assert steps(tail) == []
    write(path, 1, 2)
    assert steps(tail) == [1, 2]
    assert steps(tail) == []
    write(path, 3, past=2)
    assert steps(tail) == [3]


def test_a_torn_line_is_given_when_it_is_whole(path: Path) -> None:
    write(path, 1)
    tail = JournalTail(path)
    with path.open("ab") as file:
        file.write(line(2)[:30])
        file.flush()
        assert steps(tail) == [1]
        file.write(line(2)[30:])
    assert steps(tail) == [2]


def test_a_damaged_line_is_left_out(path: Path) -> None:
    path.write_bytes(line(1) + b"\x00\xff not json\n[2]\n\n" + line(3))
    assert steps(JournalTail(path)) == [1, 3]


@pytest.mark.parametrize("kept", range(6))
def test_only_the_new_lines_of_a_journal_that_was_cut_back_are_given(path: Path, kept: int) -> None:
    write(path, 0, 1, 2, 3, 4)
    tail = JournalTail(path)
    tail.read()
    cut_journal(path, kept)
    write(path, *range(10 + kept, 17), past=kept)
    assert steps(tail) == list(range(10 + kept, 17))


def test_a_cut_that_is_seen_before_anything_was_written_counts_too(path: Path) -> None:
    write(path, 0, 1, 2)
    tail = JournalTail(path)
    tail.read()
    cut_journal(path, 1)
    assert steps(tail) == []
    write(path, 10, 20, past=1)
    assert steps(tail) == [10, 20]


def test_a_file_that_became_shorter_in_place_was_cut_too(path: Path) -> None:
    write(path, 0, 1, 2)
    tail = JournalTail(path)
    tail.read()
    os.truncate(path, len(path.read_bytes().splitlines(keepends=True)[0]) + 5)
    assert steps(tail) == []
    with path.open("ab") as file:
        file.write(b"\n" + line(7))
    assert steps(tail) == [7]
