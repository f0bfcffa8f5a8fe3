"""Times in a journal that are none: the line is damaged, and every reader says or skips it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alto.errors import RunError
from alto.runs import JournalTail, read_events, read_intact_events


@pytest.mark.parametrize("time", ["NaN", "1e18", "-1", "1e999", '"x"', "true", "null", "[]", "1" + "0" * 400])
def test_a_time_that_is_none_damages_its_line(tmp_path: Path, time: str) -> None:
    path = tmp_path / "journal.jsonl"
    lines = [json.dumps({"seq": seq, "time": 10.0 + seq, "event": "x"}) for seq in range(3)]
    lines[1] = f'{{"seq": 1, "time": {time}, "event": "x"}}'
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(RunError, match="line 2 of 3 is not one"):
        read_events(path)
    assert [event["seq"] for event in read_intact_events(path)] == [0]
    assert [entry.seq for entry in JournalTail(path).read()] == [0, 2]
