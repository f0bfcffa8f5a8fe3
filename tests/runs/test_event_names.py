"""Names of events and fields of a line are spelled in the events package and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from alto.runs.events.codec import RELAYED, WIRE_NAMES

PACKAGE = Path(__file__).parents[2] / "src" / "alto"

OTHER_MEANINGS: Mapping[str, set[str]] = {
    "cli/app.py": {"eval"},  # the command
    "cli/init.py": {"train"},  # a split of the data
    "cli/word_problems.py": {"train", "eval"},  # a split of the data, and a mode of parsing
    "cli/export.py": {"train"},  # commands of other tools
    "cli/simulate.py": {"planned"},  # a key of its JSON
    "data/source.py": {"train"},  # splits of datasets
    "data/task_data.py": {"train"},
    "executor/recovery.py": {"train"},  # a split of the data
    "data/tokenize.py": {"train"},
    "executor/cache.py": {"measured"},  # a key of the cache
    "cli/show.py": {"measuring"},  # activities that take a run's time
    "views/wording.py": {"measuring"},
    "runs/result.py": {"measuring"},
    "report/gantt.py": {"planned"},  # names of figures and columns
    "views/terminal.py": {"train"},
    "views/plan.py": {"train"},
    "report/run_drawings.py": {"train"},
    "importing/axolotl.py": {"train"},
    "importing/axolotl_data.py": {"train"},
    "importing/llamafactory.py": {"train"},
    "importing/trl.py": {"train"},
    "importing/sources.py": {"train"},
    "service/api/cluster.py": {"planned"},  # keys of answers, and words of OpenAI's API
    "service/api/tasks.py": {"command_refused"},
    "service/openai/graders.py": {"eval"},
    "service/openai/jobs.py": {"checkpoint"},
    "service/openai/unsupported.py": {"checkpoint"},
    "spec/row_objects.py": {"eval", "train"},
}
"""Files that use such a word for something else."""


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


def looked_up_in(tree: ast.Module) -> set[str]:
    """Return the expressions that ask a dictionary which event it is."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(slice=ast.Constant(value="event")):
                found.add(ast.unparse(node))
            case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value="event"), *_]):
                found.add(ast.unparse(node))
            case ast.MatchMapping(keys=keys) if any(ast.unparse(key) == "'event'" for key in keys):
                found.add(ast.unparse(node))
    return found


def test_no_line_is_looked_into_by_name() -> None:
    """Only the codec has ``line["event"]`` and ``line.get("event")``."""
    assert {file for file, tree in sources() if looked_up_in(tree)} == set()


@pytest.mark.parametrize(
    ("find", "bad", "good"),
    [
        (names_in, "journal.append('job_exited')", "journal.append('job')"),
        (names_in, "match kind:\n    case 'gpu_lost' | 'gpu_added': ...", "'a job_exited b'"),
        (looked_up_in, "event['event'] == 'train'", "event['job'] == 'train'"),
        (looked_up_in, "event.get('event', '')", "event.get('events')"),
        (looked_up_in, "match line:\n    case {'event': 'eval'}: ...", "match line:\n    case {'job': 'eval'}: ..."),
    ],
)
def test_each_check_bites(find: Callable[[ast.Module], set[str]], bad: str, good: str) -> None:
    assert find(ast.parse(bad))
    assert not find(ast.parse(good))
