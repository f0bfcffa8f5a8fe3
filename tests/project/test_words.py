"""Words that users once saw and did not understand: none is left in messages, pages or examples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

RETIRED = {
    "% settled": "% of the sweep decided",
    "settled_share": "decided_share",
    "no room for": "hidden columns",
    "no space for: ": "hidden columns",
    "next to nothing": "selection would happen after one step",
    "too little training; move": "selection would happen after one step",
    "move the rungs": "use later rungs",
    "error of the law": "memory estimate error",
    "error of the model": "memory estimate error",
    '} came"': "submitted",
    "early steps wide": "log x-axis",
    "how dearly": "strength of the KL penalty",
    "once more stops at once": "Press Ctrl-C again to stop at once",
}
"""A phrase, and what is said now."""


def texts() -> Iterator[tuple[str, str]]:
    """What users read, and the code that writes it."""
    paths = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.*")]
    for path in [*paths, *(ROOT / "src" / "alto").rglob("*.py"), *(ROOT / "src" / "alto").rglob("*.jinja")]:
        if path.is_file():
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


@pytest.mark.parametrize("phrase", RETIRED)
def test_a_retired_phrase_is_gone(phrase: str) -> None:
    assert [name for name, text in texts() if phrase in text] == [], f"say: {RETIRED[phrase]}"


def test_there_are_texts_to_be_read() -> None:
    assert {"README.md", "docs/tutorial.md", "examples/preferences.yaml"} <= {name for name, _ in texts()}
