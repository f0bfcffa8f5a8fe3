"""``alto compare``: two finished runs side by side."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from run_folders import write_run
from typer.testing import CliRunner, Result

from alto.cli import app
from alto.errors import NoResultError, RunNotFoundError

Events = list[dict[str, Any]]
START = 1_763_635_000.0


def invoke(*words: object) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, [*map(str, words)])


@pytest.fixture
def runs(tmp_path: Path, small_run: Events) -> tuple[Path, Path]:
    """Two finished runs; the best job of the second has another learning rate."""
    other = copy.deepcopy(small_run)
    other[0]["jobs"][3]["config"] |= {"learning_rate": 5e-3}  # the best job
    found = []
    for name, events in (("one", small_run), ("other", other)):
        folder = write_run(tmp_path, name, events, start=START)
        (folder / "best").mkdir(exist_ok=True)
        found.append(folder)
    return found[0], found[1]


def test_facts_and_settings_that_differ_are_shown(runs: tuple[Path, Path]) -> None:
    shown = invoke("compare", *runs)
    assert shown.exit_code == 0, shown.output
    assert "validation loss" in shown.stdout
    assert "The journal of a run does not record its validation rows" in " ".join(shown.stdout.split())


def test_the_json_has_both_values_of_every_fact(runs: tuple[Path, Path]) -> None:
    shown = invoke("compare", *runs, "--json")
    assert shown.exit_code == 0, shown.output
    facts = json.loads(shown.stdout)
    assert facts["run_dirs"] == [str(run.resolve()) for run in runs]
    assert facts["same_data"] is None
    assert facts["same_loss"] is True
    assert facts["facts"]["validation loss"] == [1.9, 1.9]
    assert facts["settings"] == {"learning_rate": [2e-4, 5e-3]}


def test_what_is_no_finished_run_is_refused(runs: tuple[Path, Path], tmp_path: Path, small_run: Events) -> None:
    unfinished = write_run(tmp_path, "unfinished", small_run[:-1], start=START)
    assert isinstance(invoke("compare", runs[0], unfinished).exception, NoResultError)
    assert isinstance(invoke("compare", unfinished, runs[0]).exception, NoResultError)
    assert isinstance(invoke("compare", runs[0], tmp_path / "none").exception, RunNotFoundError)


OF_BOTH = {"train_validation_fingerprint": "t", "validation_fingerprint": "v"}


@pytest.mark.parametrize(
    ("data", "other_data", "same", "message"),
    [
        pytest.param(
            {"fingerprint": "x", **OF_BOTH}, {"fingerprint": "y", **OF_BOTH}, (True, True), "", id="test rows"
        ),
        pytest.param(
            OF_BOTH,
            {**OF_BOTH, "train_validation_fingerprint": "u"},
            (False, True),
            "trained on different rows, but validated on the same rows.",
            id="training rows",
        ),
        pytest.param(
            OF_BOTH,
            {"train_validation_fingerprint": "u", "validation_fingerprint": "w"},
            (False, False),
            "their losses cannot be compared",
            id="validation rows",
        ),
        pytest.param({"fingerprint": "x"}, {"fingerprint": "x"}, (True, True), "", id="an earlier version"),
        pytest.param(
            {"fingerprint": "x"},
            {"fingerprint": "y"},
            (False, None),
            "it is unknown whether the losses can be compared",
            id="an earlier version, some rows",
        ),
        pytest.param(
            {"fingerprint": "x"},
            {"fingerprint": "y", "test_rows": 3},
            (None, None),
            "it is unknown whether the losses can be compared",
            id="an earlier version, test rows of one",
        ),
    ],
)
def test_losses_are_compared_where_validation_rows_are_the_same(
    tmp_path: Path,
    small_run: Events,
    data: dict[str, Any],
    other_data: dict[str, Any],
    same: tuple[Any, Any],
    message: str,
) -> None:
    runs = []
    for name, found in (("one", data), ("other", other_data)):
        small_run[0]["data"] = found
        runs.append(write_run(tmp_path, name, small_run, start=START))
        (runs[-1] / "best").mkdir(exist_ok=True)
    facts = json.loads(invoke("compare", *runs, "--json").stdout)
    assert (facts["same_data"], facts["same_validation"]) == same
    shown = " ".join(invoke("compare", *runs).stdout.split())
    assert message in shown
    assert ("compared" in shown or "different rows" in shown) == bool(message)


def test_names_of_runs_are_whole_in_80_columns(tmp_path: Path, small_run: Events) -> None:
    names = ("wordproblems-20261123-233035", "smallbatch-20261123-233132")
    runs = [write_run(tmp_path, name, small_run, start=START) for name in names]
    for run in runs:
        (run / "best").mkdir(exist_ok=True)
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["compare", *map(str, runs)])
    assert all(name in shown.stdout for name in names)
    assert "duration" in shown.stdout
