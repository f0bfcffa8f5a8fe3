"""The shape of the source, read without importing it: no circles, few parameters, short files, events in one place."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = SOURCE / "alto"

MAX_PARAMETERS = 6
"""Of a constructor, besides ``self``."""

MAX_LINES = 450
"""Of a file."""

EVENTS = "runs/events"
"""The package that alone spells the names of events."""

EVENT_NAMES = frozenset(
    {
        *("task_started", "task_resumed", "task_interrupted", "task_completed", "task_given_up"),
        *("job_added", "job_admitted", "job_parked", "job_resumed", "job_exited", "job_completed", "warmup_ended"),
        *("queue_started", "queue_resumed", "queue_interrupted", "queue_completed", "executor_started"),
        *("executor_ended", "gpu_lost", "gpu_added"),
    }
)
"""Those that mean nothing else; for ``train``, ``eval`` and other plain words, see ``looked_up_events``."""

Offenders = Mapping[str, frozenset[str]]
"""Files, by their path below ``src/alto``, and what in each of them does not comply."""

# What does not comply yet. A file or name that complies has to be taken off its list; the lists are to become empty.
LARGE_CONSTRUCTORS: Offenders = {
    "cluster/controller.py": frozenset({"Controller"}),
    "cluster/ray.py": frozenset({"RayCluster"}),
    "engine/engine.py": frozenset({"Engine"}),
    "executor/executor.py": frozenset({"Executor"}),
    "executor/slot_manager.py": frozenset({"SlotManager"}),
    "executor/task_run.py": frozenset({"TaskRun"}),
    "executor/trainer.py": frozenset({"Trainer"}),
    "kernels/operands.py": frozenset({"LoraOperands"}),
}
LONG_FILES = frozenset({"executor/task_run.py", "records.py", "scheduler/queue/queue.py"})
SPELLS_EVENTS: frozenset[str] = frozenset()
LOOKS_EVENTS_UP: frozenset[str] = frozenset()


def sources() -> Iterator[tuple[str, str]]:
    """Path below ``src/alto`` and text of every file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")


def test_there_are_files_to_be_read() -> None:
    assert {"__init__.py", "errors.py", "engine/__init__.py"} <= {name for name, _ in sources()}


def large_constructors(text: str) -> set[str]:
    """Classes whose written ``__init__`` takes too much. Dataclasses and models have none: they are records."""
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


def spelled_events(text: str) -> set[str]:
    """Names of events among the strings of a file."""
    constants = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str) and value in EVENT_NAMES}


def looked_up_events(text: str) -> set[str]:
    """Expressions that ask a dictionary which event it is, such as ``line["event"]`` and ``line.get("event")``."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Subscript(slice=ast.Constant(value="event")):
                found.add(ast.unparse(node))
            case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value="event"), *_]):
                found.add(ast.unparse(node))
            case ast.MatchMapping(keys=keys) if any(ast.unparse(key) == "'event'" for key in keys):
                found.add(ast.unparse(node))
    return found


def imports_of(module: str, text: str, modules: frozenset[str]) -> set[str]:
    """Which of ``modules`` a module imports, at its top or in a function."""
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
    """Modules that import each other in a circle, of the modules with these texts; empty if there is none."""
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
    found = {name: frozenset(large_constructors(text)) for name, text in sources()}
    assert {name: classes for name, classes in found.items() if classes} == LARGE_CONSTRUCTORS


def test_files_are_short() -> None:
    found = {name for name, text in sources() if len(text.splitlines()) > MAX_LINES}
    assert found == LONG_FILES


@pytest.mark.parametrize(
    ("find", "allowed"),
    [(spelled_events, SPELLS_EVENTS), (looked_up_events, LOOKS_EVENTS_UP)],
    ids=["spelled", "asked"],
)
def test_the_names_of_events_are_known_in_one_place(find: Callable[[str], set[str]], allowed: frozenset[str]) -> None:
    found = {name: find(text) for name, text in sources() if not name.startswith(EVENTS)}
    assert {name for name, events in found.items() if events} == allowed


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
        (spelled_events, "journal.append('job_exited')", "journal.append('job')"),
        (spelled_events, "match kind:\n    case 'gpu_lost' | 'gpu_added': ...", "'a job_exited b'"),
        (looked_up_events, "event['event'] == 'train'", "event['job'] == 'train'"),
        (looked_up_events, "event.get('event', '')", "event.get('events')"),
        (
            looked_up_events,
            "match line:\n    case {'event': 'eval'}: ...",
            "match line:\n    case {'job': 'eval'}: ...",
        ),
    ],
)
def test_each_check_bites(find: Callable[[str], set[str]], bad: str, good: str) -> None:
    assert find(bad)
    assert not find(good)
