"""The journal: one JSON object a line, in order, with the operating system before anybody is told."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from alto.runs import Journal, JournalEntry
from alto.runs.events import CommandRefused, TrainSteps, UnknownEvent


def strict(line: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_lines_are_numbered_and_hold_what_was_said(tmp_path: Path) -> None:
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
