"""Tables and words of the page."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

import yaml

__all__ = ["as_yaml", "capitalised", "code", "codes", "markdown", "sentence", "table"]


def capitalised(meaning: str) -> str:
    """Return the meaning as a sentence; a key at its beginning is not capitalised."""
    first, space, rest = meaning.partition(" ")
    return f"{code(first) if '_' in first else first[:1].upper() + first[1:]}{space}{rest}."


def markdown(text: str) -> str:
    """Return the text of a docstring in the words of a task file, where None is null."""
    text = re.sub(r":\w+:`([^`]*)`", r"`\1`", text).replace("``", "`")
    return re.sub(r"\bNone\b", "null", text)


def sentence(meaning: str, aliases: Sequence[str]) -> str:
    return f"{meaning} Also {codes(aliases)}." if aliases else meaning


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def as_yaml(value: object) -> str:
    if dataclasses.is_dataclass(value):
        raise TypeError(f"no YAML for {value!r}")
    if isinstance(value, float):
        return f"{value:g}"
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()


def code(text: object) -> str:
    return f"`{text}`"


def codes(texts: Iterable[object]) -> str:
    return ", ".join(map(code, texts))
