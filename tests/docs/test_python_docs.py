"""docs/python.md is one program that runs; its tables have every name of the interface, and no other."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import alto
from alto.engine.task_queue import TaskQueue
from alto.spec.data_keys import DataKeys

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"


@pytest.mark.slow("queues")
def test_the_page_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert "['first']" in printed, "only the task that was not cancelled has a result"
    assert "UnknownKeyError" in printed
    assert "Did you mean" in printed
    names_of_runs = [folder.name for folder in (tmp_path / "runs").iterdir()]
    for prefix in ("watched-", "queue-"):
        assert any(name.startswith(prefix) for name in names_of_runs), names_of_runs


def tables() -> dict[str, list[str]]:
    """Return by heading the names in the first cells of the tables below it."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ").strip("`")
        elif cell := re.match(r"\| `(\w+)[(\w*, )]*` \|", line):
            found.setdefault(heading, []).append(cell[1])
    return found


def public_names(kind: type[Any]) -> set[str]:
    """Return a class's own fields, properties and methods whose names do not begin with an underscore."""
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    return fields | {name for name in vars(kind) if not name.startswith("_")}


def own_names_of_task() -> set[str]:
    """Return the public names of `alto.Task` except the keys of a task file and pydantic's."""
    return {name for name in public_names(alto.Task) - set(alto.Task.model_fields) if not name.startswith("model_")}


INTERFACE: dict[str, set[str]] = {
    "Every name": set(alto.__all__),
    "alto.Engine": public_names(alto.Engine),
    "alto.Task": own_names_of_task(),
    "alto.TaskResult": public_names(alto.TaskResult),
    "alto.JobResult": public_names(alto.JobResult),
    "alto.ExitReason": set(alto.ExitReason.__members__),
    "alto.Schedule": public_names(alto.Schedule),
    "alto.Placement": public_names(alto.Placement),
    "The queue": {"root", *public_names(TaskQueue)},
}


@pytest.mark.parametrize("heading", INTERFACE)
def test_the_tables_have_every_name_and_no_other(heading: str) -> None:
    named = tables()[heading]
    assert len(named) == len(set(named))
    assert set(named) == INTERFACE[heading]


def test_there_are_tables_of_these_alone() -> None:
    assert tables().keys() == INTERFACE.keys()
    assert {"tune", "queue"} <= INTERFACE["alto.Engine"]
    assert {"load_best", "best_job", "curves"} <= INTERFACE["alto.TaskResult"]
    assert {"jobs", "replace"} <= INTERFACE["alto.Task"]
    assert not own_names_of_task() & set(DataKeys.model_fields)


def test_what_results_hold_beside_it_is_named_too() -> None:
    """The text of the tables names the fields of small records inside results too."""
    text = PAGE.read_text(encoding="utf-8")
    for name in ("lora", "training", "not_carried", "runner_up", "difference", "interval", "is_within_noise"):
        assert f"`{name}`" in text, name
    for name in ("facts", "settings", "same_data", "same_validation"):
        assert f"`{name}`" in text, name
