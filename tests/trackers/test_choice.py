"""``report_to``: valid values, the resulting trackers, and the ids of tools that are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alto.errors import SpecError, UnsupportedError
from alto.spec import Task, load_task
from alto.spec.task import TRACKERS
from alto.trackers import choice, chosen_trackers
from alto.trackers.base import StoredRuns


def task(**changes: Any) -> Task:
    return Task(**{"model": "alto-tiny", "dataset": "train.jsonl"} | changes)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``install(*names)`` pretends that these tools are installed and no others."""

    def install(*names: str) -> None:
        monkeypatch.setattr(choice, "_is_installed", lambda name: name in names)

    return install


@pytest.mark.parametrize(
    ("report_to", "installed", "expected"),
    [
        ("auto", ("tensorboard", "wandb"), ["tensorboard"]),
        ("auto", ("wandb",), []),
        ("all", ("trackio", "mlflow"), ["mlflow", "trackio"]),
        ("all", (), []),
        ("none", TRACKERS, []),
        ("wandb", ("wandb",), ["wandb"]),
        (["wandb", "tensorboard"], TRACKERS, ["wandb", "tensorboard"]),
    ],
)
def test_choice(install: Any, report_to: Any, installed: tuple[str, ...], expected: list[str]) -> None:
    install(*installed)
    assert list(chosen_trackers(task(report_to=report_to))) == expected


def test_default_is_tensorboard_where_it_is_installed(install: Any) -> None:
    install("tensorboard", "mlflow")
    assert list(chosen_trackers(task())) == ["tensorboard"]


def test_tool_that_is_not_installed_is_refused_with_the_remedy(install: Any) -> None:
    install("tensorboard")
    with pytest.raises(UnsupportedError, match=r"report_to: expected .* found 'wandb', .* pip install wandb"):
        chosen_trackers(task(report_to=["tensorboard", "wandb"]))


def test_folder_of_a_tool_s_name_is_no_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not choice._is_installed("some_tracker")
    (tmp_path / "some_tracker" / "__init__.py").touch()
    assert choice._is_installed("some_tracker")


def test_every_name_of_the_spec_has_its_tracker() -> None:
    assert tuple(choice._TRACKERS) == TRACKERS


@pytest.mark.parametrize("report_to", ["auto", "all", "none", "wandb", ["wandb", "tensorboard"]])
def test_key_survives_the_task_file(tmp_path: Path, report_to: Any) -> None:
    (tmp_path / "task.yaml").write_text(task(report_to=report_to).to_yaml(), encoding="utf-8")
    assert load_task(tmp_path / "task.yaml") == task(report_to=report_to)


@pytest.mark.parametrize(
    "report_to", ["tensorbord", [], None, False, 3, ["none"], ["wandb", "wandb"], [["wandb"]], {"wandb": True}]
)
def test_key_refuses(report_to: Any) -> None:
    with pytest.raises(SpecError, match=r"report_to should be .*tensorboard, mlflow, wandb, trackio, found .*For"):
        task(report_to=report_to)


def test_nothing_is_known_of_a_new_run(tmp_path: Path) -> None:
    stored = StoredRuns(tmp_path, "mlflow")
    assert stored.id_of("job-000") is None
    assert stored.ended_at("job-000") == 0


def test_what_is_kept_is_there_when_the_run_is_resumed(tmp_path: Path) -> None:
    stored = StoredRuns(tmp_path, "mlflow")
    stored.set_id("run", "f00d")
    stored.set_id("job-000", "beef")
    stored.set_ended("job-000", 30)
    again = StoredRuns(tmp_path, "mlflow")
    assert (again.id_of("run"), again.id_of("job-000"), again.ended_at("job-000")) == ("f00d", "beef", 30)
    assert StoredRuns(tmp_path, "wandb").id_of("run") is None
