"""Data of a figure that shows tasks on GPUs over time, planned and actual; ``templates/gantt.js`` draws it."""

from __future__ import annotations

import html
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from alto.errors import RunWriteError
from alto.records import Gpu, Node, Placement
from alto.report.pages import render_page, write_page
from alto.views.wording import clean, format_duration

MAX_LANES = 64
"""Largest number of GPUs with a lane each; with more GPUs, there is one lane per node."""
MAX_BARS = 4000
"""Largest number of tasks drawn, the longest first."""

NUM_HUES = 6
"""Number of colours; consecutive tasks take different ones, in turn."""

_UNITS = ((2 * 86400.0, 86400.0, "days"), (2 * 3600.0, 3600.0, "hours"), (120.0, 60.0, "minutes"))


def gantt_figure(
    planned: Sequence[Placement],
    actual: Sequence[Placement],
    nodes: Sequence[Node],
    *,
    gaps: Sequence[tuple[float, float]] = (),
) -> dict[str, Any]:
    """Return a figure with a lane for every GPU, or for every node if there are many GPUs, and a bar for every task.
    Tasks that share a GPU at the same time get separate lanes of it, below each other.

    Args:
        planned: Planned placements, drawn as thin bars above the actual ones; may be empty.
        actual: Placements that ran, one per attempt. Both count seconds from the same moment.
        nodes: Machines whose GPUs have lanes even if nothing ran on them.
        gaps: Interruptions, which are cut out of the placements: the time of each and its duration, in seconds.

    Returns:
        ``lanes``, ``unit``, ``traces`` (one for each hue and kind), ``gaps`` (places on the axis, and labels), and
        ``note``, sentences about what was left out.
    """
    placed = [gpu for place in (*planned, *actual) for gpu in place.gpus]  # GPUs that have left are among them
    gpus = list(dict.fromkeys([*(Gpu(node.name, index) for node in nodes for index in node.gpus), *placed]))
    is_fine = len(gpus) <= MAX_LANES
    depths = {id(place): depth for kind in (planned, actual) for place, depth in _depths(kind) if is_fine}
    most: Counter[Gpu] = Counter()
    for place in (*planned, *actual):
        for gpu in place.gpus:
            most[gpu] = max(most[gpu], depths.get(id(place), 0))
    lanes = [_lane(gpu, depth, is_fine=is_fine) for gpu in gpus for depth in range(most[gpu] + 1)]
    seconds, unit = _unit(max((place.end_s for place in (*planned, *actual)), default=0.0))
    hues = {task: index % NUM_HUES for index, task in enumerate(dict.fromkeys(p.task for p in (*planned, *actual)))}
    notes = [] if is_fine else ["Each row is a node; tasks in one row may run at the same time."]
    if any(most.values()):
        gpu = next(gpu for gpu in gpus if most[gpu])
        first, second = _lane(gpu, 0, is_fine=True), _lane(gpu, 1, is_fine=True)
        notes.append(f"Tasks that run in the same place at the same time have separate rows: {first}, {second}.")
    traces = []
    for kind, placements in (("planned", planned), ("actual", actual)):
        drawn = placements
        if len(placements) > MAX_BARS:
            drawn = sorted(placements, key=lambda place: -place.duration_s)[:MAX_BARS]
            notes.append(f"Only the {MAX_BARS:,} longest of {len(placements):,} {kind} tasks are drawn.")
        traces += _traces(
            kind,
            drawn,
            hues,
            seconds,
            lambda place, gpu: _lane(gpu, depths.get(id(place), 0), is_fine=is_fine),
        )
    return {
        "lanes": list(dict.fromkeys(lanes)),
        "unit": unit,
        "traces": traces,
        "isCompared": bool(planned and actual),
        "gaps": [(round(at_s / seconds, 5), f"interrupted for {format_duration(idle_s)}") for at_s, idle_s in gaps],
        "note": " ".join(notes),
    }


def write_gantt(
    path: Path, planned: Sequence[Placement], actual: Sequence[Placement], nodes: Sequence[Node], *, title: str
) -> None:
    """Write the figure as one self-contained page.

    Args:
        planned: Placements of the first plan.
        actual: Placements that ran.

    Raises:
        RunWriteError: The file cannot be written.
    """
    page = render_page("gantt.html.jinja", gantt=gantt_figure(planned, actual, nodes), title=title)
    try:
        write_page(path, page)
    except OSError as error:
        raise RunWriteError(f"expected to write the picture to {path}, found: {error}; choose another path") from None


def _traces(
    kind: str,
    placements: Sequence[Placement],
    hues: dict[str, int],
    seconds: float,
    lane_of: Callable[[Placement, Gpu], str],
) -> list[dict[str, Any]]:
    by_hue: dict[int, dict[str, Any]] = {}
    for placement in placements:
        hue = hues[placement.task]
        trace = by_hue.setdefault(
            hue, {"meta": {"kind": kind, "hue": hue}, "base": [], "x": [], "y": [], "text": [], "customdata": []}
        )
        hover = (
            f"{html.escape(clean(placement.task))}<br>{kind}: {format_duration(placement.start_s)} to "
            f"{format_duration(placement.end_s)} on {len(placement.gpus)} "
            f"GPU{'s' if len(placement.gpus) > 1 else ''}"
        )
        for lane in dict.fromkeys(lane_of(placement, gpu) for gpu in placement.gpus):
            trace["base"].append(round(placement.start_s / seconds, 5))
            trace["x"].append(round(placement.duration_s / seconds, 5))
            trace["y"].append(lane)
            trace["text"].append(html.escape(clean(placement.task)))
            trace["customdata"].append(hover)
    return [by_hue[hue] for hue in sorted(by_hue)]


def _depths(placements: Sequence[Placement]) -> Iterator[tuple[Placement, int]]:
    """Yield each placement with the index of its lane on its GPUs: the first lane that is free at its start."""
    ends: dict[Gpu, list[float]] = {}
    for placement in sorted(placements, key=lambda place: place.start_s):
        lanes = [ends.setdefault(gpu, []) for gpu in placement.gpus]
        # A task may start when another ends; the times of attempts are rounded.
        start_s = placement.start_s + 1e-3
        depth = next(
            number
            for number in itertools.count()
            if all(number >= len(found) or found[number] <= start_s for found in lanes)
        )
        for found in lanes:
            found.extend([0.0] * (depth + 1 - len(found)))
            found[depth] = placement.end_s
        yield placement, depth


def _lane(gpu: Gpu, depth: int, *, is_fine: bool) -> str:
    if not is_fine:
        return clean(gpu.node)
    return f"{clean(gpu.node)}:{gpu.index}" + (f" ({depth + 1})" if depth else "")


def _unit(span_s: float) -> tuple[float, str]:
    """Return the seconds of the unit that suits a span, and the unit's name."""
    return next(((seconds, name) for least, seconds, name in _UNITS if span_s >= least), (1.0, "seconds"))
