"""Checks how docstrings begin: a function's docstring with a verb, and no sentence or entry with a word that makes it a
riddle. The docstring of a test states the fact that it proves, and that of a fixture may begin with a noun.

    python -m tools.check_docstrings

ruff's rule D401 finds verbs that are not imperatives; this tool finds first words that are not verbs, but that ruff
takes for verbs.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["complaints", "main"]

ROOT = Path(__file__).parents[1]
FOLDERS = ("src/alto", "benchmarks", "tools", "tests")

NOWHERE = frozenset({"As", "Of", "That", "Those", "What", "Which", "Whose"})
"""Words that must not begin a docstring or an entry of one."""

NO_VERBS = frozenset(
    re.findall(
        r"\w+",
        """A All An And Any At Both But By Each Either Every Everything For From How If In It Its Many Most Neither No
        Not Nothing On One Only Other Others Several So Some The Their Them These They This To Two Under When Where
        Whether Who Why With Without""",
    )
)
"""Words that must not begin a docstring of a function, which begins with a verb in the imperative."""

ENTRY = re.compile(r"^(?P<indent>\s+)(?P<name>[*\w`., ]+): (?P<word>\w+)")
SECTION = re.compile(r"^\s*(Args|Attributes|Returns|Raises|Yields):$")


def main() -> int:
    found = [
        f"{path.relative_to(ROOT)}:{complaint}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for complaint in complaints(path.read_text(encoding="utf-8"))
    ]
    print(*found, sep="\n")
    return 1 if found else 0


def complaints(text: str) -> Iterator[str]:
    """Yield the faults of a module's docstrings, each with its line."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.body and (string := _string(node.body[0])):
                yield from _complaints_of(string, is_function=_is_function(node))
            for _, attribute in _attributes(node.body if not _is_function(node) else ()):
                yield from _complaints_of(attribute, is_function=False)


def _complaints_of(string: ast.Constant, *, is_function: bool) -> Iterator[str]:
    lines = str(string.value).splitlines()
    word = re.match(r"\W*(\w*)", lines[0] if lines else "")
    first = word.group(1) if word else ""
    if first in NOWHERE:
        yield f'{string.lineno}: expected a docstring that does not begin with "{first}"'
    elif is_function and first in NO_VERBS:
        yield f'{string.lineno}: expected a docstring that begins with a verb, found "{first}"'
    is_entry = False
    for number, line in enumerate(lines):
        if SECTION.match(line):
            is_entry = True
        elif is_entry and (entry := ENTRY.match(line)) and entry["word"] in NOWHERE:
            yield f'{string.lineno + number}: expected an entry that does not begin with "{entry["word"]}"'


def _is_function(node: ast.AST) -> bool:
    """Return whether ``node`` is a function that is called by name. Tests, fixtures and properties are not."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("test_"):
        return False
    return not re.search("property|fixture", " ".join(map(ast.unparse, node.decorator_list)))


def _attributes(body: Iterable[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.Constant]]:
    """Yield assignments with the strings below them, which describe them."""
    for statement, after in itertools.pairwise(body):
        if isinstance(statement, ast.Assign | ast.AnnAssign) and (string := _string(after)):
            yield statement, string


def _string(statement: ast.stmt) -> ast.Constant | None:
    is_string = (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
    return statement.value if is_string else None  # type: ignore[union-attr,return-value]


if __name__ == "__main__":
    sys.exit(main())
