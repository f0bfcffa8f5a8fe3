"""The shape of the source, read without importing it: no circles, few parameters, short files.

``tests/runs/test_event_names.py`` checks that names of events are spelled in one place.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = SOURCE / "alto"

MAX_PARAMETERS = 6
"""Maximum number of a constructor's parameters, besides ``self``."""

MAX_LINES = 600
"""Maximum number of lines of a file."""


def sources() -> Iterator[tuple[str, str]]:
    """Yield the path below ``src/alto`` and the text of every file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")


def test_there_are_files_to_be_read() -> None:
    assert {"__init__.py", "errors.py", "engine/__init__.py"} <= {name for name, _ in sources()}


def large_constructors(text: str) -> set[str]:
    """Return the classes whose written ``__init__`` takes too many. Dataclasses and models have none: they are
    records."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            continue
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                taken = method.args
                catches_all = (taken.vararg is not None) + (taken.kwarg is not None)
                num_named = len(taken.posonlyargs) + len(taken.args) + len(taken.kwonlyargs) - 1
                if num_named + catches_all > MAX_PARAMETERS:
                    found.add(node.name)
    return found


def imports_of(module: str, text: str, modules: frozenset[str]) -> set[str]:
    """Return those of ``modules`` that a module imports, at its top or in a function."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: expected absolute imports"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else str(node.module) for name in names}
    return (found & modules) - {module}


def circle_in(texts: Mapping[str, str]) -> list[str]:
    """Return modules of these texts that import each other in a circle; empty if there is none."""
    modules = frozenset(texts)
    graph = {module: imports_of(module, text, modules) for module, text in texts.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    texts = {}
    for name, text in sources():
        module = "alto." + name.removesuffix(".py").replace("/", ".")
        texts[module.removesuffix(".__init__")] = text
    assert circle_in(texts) == []


@pytest.mark.parametrize(
    "line", ["import alto.b", "from alto import b", "from alto.b import x", "def f(): import alto.b"]
)
def test_a_circle_is_found(line: str) -> None:
    assert circle_in({"alto": "", "alto.a": line, "alto.b": "from alto.a import y"})
    assert not circle_in({"alto": "", "alto.a": line, "alto.b": ""})


def test_constructors_are_small() -> None:
    assert {name: found for name, text in sources() if (found := large_constructors(text))} == {}


def test_files_are_short() -> None:
    assert {name for name, text in sources() if len(text.splitlines()) > MAX_LINES} == set()


@pytest.mark.parametrize(
    ("find", "bad", "good"),
    [
        (
            large_constructors,
            "class A:\n    def __init__(self, a, b, c, d, *, e, f, g): ...",
            "class A:\n    def __init__(self, a, b, c, d, *, e, f): ...\n    def other(self, a, b, c, d, e, f, g): ...",
        ),
        (
            large_constructors,
            "class A:\n    class B:\n        def __init__(self, a, b, c, d, e, f, **g): ...",
            "@dataclass\nclass A:\n    a: int\n    b: int\n    c: int\n    d: int\n    e: int\n    f: int\n    g: int",
        ),
    ],
)
def test_each_check_bites(find: Callable[[str], set[str]], bad: str, good: str) -> None:
    assert find(bad)
    assert not find(good)
