"""Names of events and the fields of a line are spelled in the events package and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from alto.runs.events.names import RELAYED, WIRE_NAMES

PACKAGE = Path(__file__).parents[2] / "src" / "alto"

OTHER_MEANINGS: Mapping[str, set[str]] = {
    "cli/app.py": {"eval"},  # the command
    "cli/simulate.py": {"planned"},  # a key of its JSON
    "cli/tune.py": {"train"},  # a word of its help
    "data/presets.py": {"train"},  # splits of datasets
    "data/task_data.py": {"train"},
    "engine/work.py": {"train"},  # a kind of work
    "executor/cache.py": {"measured"},  # a key of the cache
    "export/gantt.py": {"planned"},  # names of figures and columns
    "export/job_grid.py": {"train"},
    "export/preview.py": {"train"},
    "export/report.py": {"train"},
}
"""Files that have such a word for something else."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("runs/events/"):
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def names_in(tree: ast.Module) -> set[str]:
    names = {*WIRE_NAMES.values(), RELAYED, "told"}
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str) and value in names}


def test_no_event_is_named_outside_of_the_events_package() -> None:
    found = {file: names_in(tree) - OTHER_MEANINGS.get(file, set()) for file, tree in sources()}
    assert {file: names for file, names in found.items() if names} == {}


def test_every_other_meaning_is_still_there() -> None:
    found = {file: names_in(tree) for file, tree in sources()}
    assert all(words <= found[file] for file, words in OTHER_MEANINGS.items())


def test_no_line_is_looked_into_by_name() -> None:
    """``line["event"]`` and ``line.get("event")``, which the codec alone has."""
    found = set()
    for file, tree in sources():
        for node in ast.walk(tree):
            looked_up = node.slice if isinstance(node, ast.Subscript) else None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
                looked_up = node.args[0] if node.args else None
            if isinstance(looked_up, ast.Constant) and looked_up.value == "event":
                found.add(file)
    assert found == set()
