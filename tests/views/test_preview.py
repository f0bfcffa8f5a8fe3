"""The preview shows every fact and the trained tokens, and no text in the data controls the terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from alto.records import DataPreview, PreviewExample
from alto.views import preview_text
from alto.views.plan import visible


def make(*segments: tuple[str, bool], **changes: Any) -> DataPreview:
    numbers = {"rows": 1200, "tokens": 50, "trained_tokens": 20, "truncated_rows": 3, "skipped_rows": 1}
    counts = {f"{split}_{what}": count for split in ("train", "validation") for what, count in numbers.items()}
    facts: dict[str, Any] = {
        "dataset": "rows.csv",
        "model": "alto-tiny",
        "form": "prompt_completion",
        "columns": {"prompt": "question", "completion": "answer"},
        "max_length": 128,
        "counts": counts,
        "row_tokens": (4, 21.5, 128),
        "notes": ("3 rows are cut.",),
        "examples": (PreviewExample(num_tokens=7, segments=segments),),
    }
    return DataPreview(**(facts | changes))


def draw(preview: DataPreview, *, marked: bool) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=not marked, color_system=None if marked else "standard", width=200)
    console.print(preview_text(preview, marked=marked))
    return stream.getvalue()


def test_every_fact_is_a_line() -> None:
    drawn = draw(make(("q", False), ("a", True)), marked=True)
    for line in (
        "form:        prompt_completion (prompt from question, completion from answer)",
        "training:    1,200 rows, 50 tokens; 3 truncated, 1 left out",
        "row length:  4 to 128 tokens, median 21.5; max_length is 128",
        "trained:     40% of the training tokens",
        "note:        3 rows are cut.",
        "--- example 1, 7 tokens",
    ):
        assert line in drawn.splitlines()


def test_one_row_and_one_token_are_singular() -> None:
    counts = {**make(("a", True)).counts, "validation_rows": 1, "validation_tokens": 1}
    example = PreviewExample(num_tokens=1, segments=(("a", True),))
    drawn = draw(make(("a", True), counts=counts, examples=(example,)), marked=True)
    assert "validation:  1 row, 1 token; " in drawn
    assert "--- example 1, 1 token\n" in drawn


def test_trained_parts_are_between_marks_or_in_colour() -> None:
    preview = make(("<|user|>q<|assistant|>", False), ("a<|end|>", True))
    assert "<|user|>q<|assistant|>⟦a<|end|>⟧" in draw(preview, marked=True)
    coloured = draw(preview, marked=False)
    assert "<|user|>q<|assistant|>\x1b[1;30;42ma<|end|>\x1b[0m" in coloured
    assert "⟦" not in coloured.partition("--- example")[2]


def test_escapes_are_shown_and_never_sent() -> None:
    text = "a\x1b[2Jb\x07\u202ec\x00\r\n\td"
    assert visible(text) == "a\\x1b[2Jb\\x07\\u202ec\\x00\\r\n\td"
    drawn = draw(
        make((text, False), ("[red]x[/red]\x1b]0;t\x07", True), dataset="\x1b[31mrows", notes=("\x1b[1m",)), marked=True
    )
    assert not {char for char in drawn if not char.isprintable()} - {"\n", "\t"}
    assert "⟦[red]x[/red]\\x1b]0;t\\x07⟧" in drawn


def test_a_text_with_a_label_has_no_trained_tokens() -> None:
    example = PreviewExample(num_tokens=3, segments=(("warm", False),), label="good")
    drawn = draw(
        make(form="text_classification", columns={"text": "text", "label": "label"}, examples=(example,)), marked=True
    )
    assert "The first examples as the model sees them, each with the label that it is trained to predict." in drawn
    assert "trained:" not in drawn
    assert "⟦" not in drawn
    assert "--- example 1, 3 tokens\nwarm\n--- label: good\n" in drawn


def test_a_pair_is_drawn_as_its_prompt_and_two_replies() -> None:
    example = PreviewExample(
        num_tokens=9,
        segments=(("<|user|>q", False),),
        chosen=(("a", True), ("<b>", False)),
        rejected=(("\x1b[2J", True),),
    )
    drawn = draw(make(examples=(example,)), marked=True)
    assert drawn.endswith("--- example 1, 9 tokens\n<|user|>q\n--- chosen\n⟦a⟧<b>\n--- rejected\n⟦\\x1b[2J⟧\n")
    assert "--- chosen" not in draw(make(("q", False)), marked=True)
