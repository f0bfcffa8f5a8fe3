"""Samples of generations in the terminal."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from alto.export.wording import clean, format_count_of
from alto.records import Sample
from alto.runs import RunHistory

__all__ = ["describe_samples", "samples_text"]

MAX_SHOWN = 5
MAX_CHARS = 240
"""Longest text that is shown; the report has all of it."""


def describe_samples(history: RunHistory) -> str:
    """``5 validation prompts continued by the base, job-003 and job-001``, or why there are none; empty where the task
    asks for none."""
    if history.sampling_failure:
        return f"no samples were generated: {clean(history.sampling_failure)}"
    if not history.samples:
        return ""
    *others, last = ["the base", *map(clean, history.samples[0].adapters)]
    by = f"{', '.join(others)} and {last}" if others else last
    if history.refit is not None:  # their rows are trained here
        prompts = f"{format_count_of(len(history.samples), 'prompt')} of rows that are trained too,"
    else:
        prompts = format_count_of(len(history.samples), "validation prompt")
    return f"{prompts} continued by {by}"


def samples_text(history: RunHistory) -> list[RenderableType]:
    """The first samples of a run, shortened, each text on a line of its own; nothing where there are none."""
    if history.sampling_failure:
        return [Text(f"note: {describe_samples(history)}", style="yellow")]
    if not history.samples:
        return []
    shown = history.samples[:MAX_SHOWN]
    more = f"; {len(history.samples) - len(shown)} more in the report" if len(history.samples) > len(shown) else ""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for number, sample in enumerate(shown, start=1):
        for index, (who, text, style) in enumerate(_lines(sample)):
            table.add_row("" if index else str(number), Text(who), Text(_shortened(text), style=style))
    return ["", Text(f"samples: {describe_samples(history)}{more}"), table, ""]


def _lines(sample: Sample) -> list[tuple[str, str, str]]:
    """Who, the text, and its style."""
    adapters = [
        (clean(job) if index else f"★ {clean(job)}", text, "" if index else "green")
        for index, (job, text) in enumerate(sample.adapters.items())
    ]
    return [
        ("prompt", sample.prompt, "bold"),
        ("reference", sample.reference, ""),
        ("base", sample.base, ""),
        *adapters,
    ]


def _shortened(text: str) -> str:
    """``text`` on one line, with a sign where its lines end; a text of nothing but blanks is said to be empty."""
    line = " ⏎ ".join(cleaned for part in text.splitlines() if (cleaned := clean(part)))
    if not line:
        return "(nothing)"
    return line if len(line) <= MAX_CHARS else line[: MAX_CHARS - 1] + "…"
