"""Pictures of the experiments, as SVG text that is the same for the same figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["COLOURS", "write_picture"]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#8c564b", "#000000")
"""Okabe and Ito's colours, which people with any kind of colour vision can distinguish, and two shades of grey."""

_STYLE = {
    "svg.hashsalt": "alto",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.prop_cycle": mpl.cycler(color=COLOURS),
}


def write_picture(path: Path, draw: Callable[[list[Axes]], None], *, panels: int = 1) -> None:
    """Let ``draw`` fill ``panels`` axes side by side, and write them as an SVG file."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(3.4 * panels + 1.4, 3.4), layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False)[0]
        draw(list(axes))
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a date and the version of matplotlib, equal figures give equal files. White also suits dark pages.
        figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")
