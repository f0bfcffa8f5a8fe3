"""The timers of the kernel benchmark: variants in turn, and ops by graph replay, by events or by the clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("peft", reason="the baselines need the bench extra: pip install -e '.[bench]'")

import torch

from benchmarks.kernels import measure
from benchmarks.kernels.measure import difference_per_call, take_turns, time_op

pytestmark = pytest.mark.slow("benchmarks")

CPU = torch.device("cpu")


def test_variants_take_turns_and_those_that_fail_are_left_out():
    calls = []

    def too_large():
        raise torch.OutOfMemoryError("CUDA out of memory")

    def breaks():
        calls.append("d")
        if calls.count("d") == 4:
            raise RuntimeError("no\nmore")

    actions = {"a": lambda: calls.append("a"), "b": too_large, "c": lambda: calls.append("c"), "d": breaks}
    turns = take_turns(actions, 3, CPU)
    assert "".join(calls) == "aaccddacdacdac"
    assert turns.failed == {"b": "out of memory", "d": "RuntimeError: no"}
    assert {name: len(seconds) for name, seconds in turns.seconds.items()} == {"a": 3, "c": 3}
    ratio = replace(turns, seconds={"a": [1.0, 4.0, 9.0], "c": [1.0, 2.0, 3.0]}).ratio("a", "c")
    assert (ratio.minimum, ratio.median, ratio.maximum) == (1.0, 2.0, 3.0)


class TestAnOpIsTimed:
    """An op is timed by replaying a graph where it can be captured; the result names the method."""

    def test_by_the_clock_on_a_cpu(self):
        timed = time_op(lambda: None, CPU)
        assert timed.by == "clock"
        assert timed.seconds.count == 5

    def test_by_a_graph_on_a_gpu(self, monkeypatch):
        monkeypatch.setattr(measure, "_graph_seconds", lambda action, device: [1e-6, 3e-6])
        timed = time_op(lambda: None, torch.device("cuda"))
        assert (timed.by, timed.seconds.median) == ("graph", 2e-6)

    def test_by_events_where_it_cannot_be_captured(self, monkeypatch, capsys):
        def refuse(action, device):
            raise RuntimeError("operation not permitted when stream is capturing")

        monkeypatch.setattr(measure, "_graph_seconds", refuse)
        monkeypatch.setattr(measure, "_event_seconds", lambda action: [5e-6])
        assert time_op(lambda: None, torch.device("cuda")).by == "events"
        assert "operation not permitted when stream is capturing" in capsys.readouterr().out

    def test_by_the_difference_of_rounds_with_it_and_without(self):
        assert difference_per_call([5.0, 7.0], [1.0, 2.0], 2) == [2.0, 2.5]
        with pytest.raises(ValueError, match="to take longer than those without"):
            difference_per_call([5.0, 1.0], [1.0, 2.0], 2)
