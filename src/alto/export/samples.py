"""Shows sample generations in the terminal."""

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
"""Largest number of characters shown of a text; the report has the whole text."""


def describe_samples(history: RunHistory) -> str:
    """Return text such as ``5 validation prompts continued by the base, job-003 and job-001``, or why there are no
    samples; empty if the task requests none."""
    if history.sampling_failure:
        return f"no samples were generated: {clean(history.sampling_failure)}"
    if not history.samples:
        return ""
    *others, last = ["the base", *map(clean, history.samples[0].adapters)]
    by = f"{', '.join(others)} and {last}" if others else last
    if history.refit is not None:  # a refit also trains on these rows
        prompts = f"{format_count_of(len(history.samples), 'prompt')} of rows that are also trained on,"
    else:
        prompts = format_count_of(len(history.samples), "validation prompt")
    return f"{prompts} continued by {by}"


def samples_text(history: RunHistory) -> list[RenderableType]:
    """Return the first samples of a run, shortened, with each text on its own line; empty without samples."""
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
    """Return for each text of a sample its author, the text, and its style."""
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
    """Return ``text`` on one line, shortened, with a sign at line ends; a note replaces blank text."""
    line = " ⏎ ".join(cleaned for part in text.splitlines() if (cleaned := clean(part)))
    if not line:
        return "(nothing)"
    return line if len(line) <= MAX_CHARS else line[: MAX_CHARS - 1] + "…"
