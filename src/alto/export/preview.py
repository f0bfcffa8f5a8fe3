"""Shows a task's data in the terminal, before anything is trained.

The texts are not trusted: control characters are written out, and rich does not interpret markup in them.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from alto.export.wording import clean, format_count, format_count_of
from alto.records import DataPreview, PreviewExample, Segments

__all__ = ["preview_text"]

TRAINED_STYLE = "bold black on green"
TRAINED_MARKS = ("⟦", "⟧")

_READ = "read:        the first {:,} rows of each dataset; all numbers below count these rows. alto plan reads all rows"


def preview_text(preview: DataPreview, *, marked: bool) -> RenderableType:
    """Return everything in ``preview``, one fact per line, then the examples.

    Args:
        marked: Whether trained tokens are put between marks instead of coloured.
    """
    counts, (shortest, median, longest) = preview.counts, preview.row_tokens
    has_labels = preview.form == "text_classification"
    trained = counts["train_trained_tokens"] / counts["train_tokens"]
    columns = ", ".join(f"{role} from {clean(column)}" for role, column in preview.columns.items())
    facts = [
        f"dataset:     {clean(preview.dataset)}",
        f"form:        {preview.form} ({columns})",
        f"tokenizer:   {clean(preview.model)}",
        *([] if preview.num_read is None else [_READ.format(preview.num_read)]),
        f"training:    {_split_line(preview, 'train')}",
        f"validation:  {_split_line(preview, 'validation')}",
        *([f"test:        {_split_line(preview, 'test')}"] if "test_rows" in counts else []),
        f"row length:  {shortest} to {longest} tokens, median {median:g}; max_length is {preview.max_length}",
        *([] if has_labels else [f"trained:     {trained:.0%} of the training tokens"]),
        *(f"note:        {clean(note)}" for note in preview.notes),
    ]
    marks = f"between {' and '.join(TRAINED_MARKS)}" if marked else "coloured"
    shown = "each with the label that it is trained to predict" if has_labels else f"trained text is {marks}"
    examples = [_example(example, number, marked) for number, example in enumerate(preview.examples, start=1)]
    return Group(
        *(Text(fact) for fact in facts),
        Text(f"\nThe first examples as the model sees them{', ' if has_labels else '; '}{shown}."),
        *examples,
    )


def visible(text: str) -> str:
    """Write out control, escape and bidirectional-override characters in ``text``; keep line ends and tabs."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )


def _split_line(preview: DataPreview, split: str) -> str:
    counts = preview.counts
    rows, tokens = (format_count_of(counts[f"{split}_{what}s"], what) for what in ("row", "token"))
    truncated, skipped = (format_count(counts[f"{split}_{what}_rows"]) for what in ("truncated", "skipped"))
    return f"{rows}, {tokens}; {truncated} truncated, {skipped} left out"


def _example(example: PreviewExample, number: int, marked: bool) -> Text:
    text = Text(f"\n--- example {number}, {format_count_of(example.num_tokens, 'token')}\n")
    _append(text, example.segments, marked)
    if example.label:
        text.append(f"\n--- label: {visible(example.label)}\n")
    for side, segments in (("chosen", example.chosen), ("rejected", example.rejected)):
        if segments:
            text.append(f"\n--- {side}\n")
            _append(text, segments, marked)
    return text


def _append(text: Text, segments: Segments, marked: bool) -> None:
    opening, closing = TRAINED_MARKS
    for part, is_trained in segments:
        shown = visible(part)
        if is_trained and marked:
            text.append(f"{opening}{shown}{closing}")
        else:
            text.append(shown, style=TRAINED_STYLE if is_trained else "")
