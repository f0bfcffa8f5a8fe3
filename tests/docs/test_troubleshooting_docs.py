"""The troubleshooting page covers every error, and quotes messages that exist in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from alto import errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ANYTHING = "…"


@cache
def source_texts() -> tuple[str, ...]:
    """Return all texts in the source, with ``…`` for what is filled in."""
    texts = []
    for path in sorted((ROOT / "src" / "alto").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else ANYTHING for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return tuple(texts)


def quoted_messages() -> list[str]:
    """Return the first cells of all tables, without their backticks."""
    return re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


def test_every_error_has_a_section() -> None:
    sections = re.findall(r"^### `(\w+)`$", PAGE, re.MULTILINE)
    assert sorted(sections) == sorted(errors.__all__)


@pytest.mark.parametrize("message", quoted_messages())
def test_a_quoted_message_is_in_the_source(message: str) -> None:
    pattern = ".*".join(map(re.escape, message.split(ANYTHING)))
    assert any(re.search(pattern, text, re.DOTALL) for text in source_texts())


def test_every_table_quotes_messages() -> None:
    num_rows = sum(line.startswith("| ") and not line.startswith(("| message", "| note")) for line in PAGE.splitlines())
    assert len(quoted_messages()) == num_rows


def pages() -> Iterator[Path]:
    """Yield all pages that link to each other."""
    yield from (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md")
    yield from (ROOT / "docs").glob("*.md")
    yield from (ROOT / "examples" / "recipes").glob("*/README.md")


def test_every_link_leads_somewhere() -> None:
    for page in pages():
        for target in re.findall(r"\]\(([^)#\s]*)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if target and "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_anchor_is_a_heading() -> None:
    for page in pages():
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
            if "://" in target:
                continue
            text = (page.parent / target if target else page).read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{page.name}: {target}#{anchor}"


def slug(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
