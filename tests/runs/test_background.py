"""Observers on their own threads: one that hangs costs the memory of a bounded number of entries."""

from __future__ import annotations

import threading

import pytest
from journals import entry

from alto.runs import JournalEntry, background, in_background


def test_an_observer_that_hangs_keeps_so_many_entries_and_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "MAX_WAITING", 5)
    gate, has_begun, seen = threading.Event(), threading.Event(), list[JournalEntry]()

    def hangs(shown: JournalEntry) -> None:
        has_begun.set()
        gate.wait()
        seen.append(shown)

    entries = [entry({"seq": seq, "time": 0.0, "event": "task_resumed"}) for seq in range(20)]
    with in_background([hangs]) as (observe,):
        observe(entries[0])
        has_begun.wait()
        for later in entries[1:]:
            observe(later)
        gate.set()
    assert seen == entries[:6]
    assert "missed 14 events" in caplog.text
