"""Lanes of the picture of a schedule: tasks that share a GPU at a time are below each other."""

from __future__ import annotations

from alto.records import Gpu, Node, Placement
from alto.report.gantt import gantt_figure

NODES = (Node(name="n", gpus=(0, 1)),)


def placed(task: str, start_s: float, duration_s: float, *gpus: int) -> Placement:
    own = tuple(Gpu("n", index) for index in gpus)
    return Placement(task=task, gpus=own, start_s=start_s, duration_s=duration_s)


def lane_of(figure: dict[str, object], task: str) -> list[str]:
    return [
        lane
        for trace in figure["traces"]  # type: ignore[attr-defined]
        for lane, text in zip(trace["y"], trace["text"], strict=True)
        if text == task
    ]


def test_one_after_the_other_is_one_lane() -> None:
    figure = gantt_figure([], [placed("a", 0, 5, 0), placed("b", 5, 5, 0), placed("c", 9.9996, 1, 0)], NODES)
    assert figure["lanes"] == ["n:0", "n:1"]


def test_tasks_that_share_a_gpu_have_lanes_of_it() -> None:
    shared = [placed("a", 0, 5, 0), placed("b", 1, 9, 0), placed("c", 2, 1, 0), placed("d", 6, 2, 0, 1)]
    figure = gantt_figure([], shared, NODES)
    assert figure["lanes"] == ["n:0", "n:0 (2)", "n:0 (3)", "n:1"]
    assert [lane_of(figure, task) for task in "abcd"] == [["n:0"], ["n:0 (2)"], ["n:0 (3)"], ["n:0", "n:1"]]


def test_where_a_lane_is_a_node_all_are_in_it() -> None:
    many = (Node(name="n", gpus=tuple(range(100))),)
    assert gantt_figure([], [placed("a", 0, 5, 0), placed("b", 1, 9, 0)], many)["lanes"] == ["n"]


def test_why_a_gpu_has_several_lanes_is_said_where_it_has() -> None:
    shared = gantt_figure([], [placed("a", 0, 5, 0), placed("b", 1, 9, 0)], NODES)
    assert shared["note"] == "Tasks that run in the same place at the same time have separate rows: n:0, n:0 (2)."
    assert gantt_figure([], [placed("a", 0, 5, 0), placed("b", 5, 9, 0)], NODES)["note"] == ""
