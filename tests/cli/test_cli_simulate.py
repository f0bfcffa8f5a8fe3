"""``alto simulate``: a table, JSON, a picture, a capacity."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from alto.cli.simulate import simulate
from alto.errors import SpecError, UnknownKeyError, UnsupportedError
from alto.version import install_command

app = typer.Typer()
app.command()(simulate)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "tasks.csv").write_text("arrival_s,gpus,duration_s,tenant\n0,1,10,a\n0,2,20,b\n5,1,10,\n", "utf-8")
    path = tmp_path / "simulation.yaml"
    path.write_text("trace: tasks.csv\ngpus_per_node: 2\nmethods: [fifo, lpt]\n", encoding="utf-8")
    return path


def test_every_method_with_and_without_early_exit_is_json_and_a_picture(file: Path):
    page = file.parent / "gantt.html"
    found = CliRunner().invoke(app, [str(file), "--json", "--html", str(page)])
    outcomes = json.loads(found.output)["outcomes"]
    assert [outcome["label"] for outcome in outcomes] == ["B", "B+S", "B+EE", "B+S+EE"]
    assert all(outcome["num_finished"] == 3 for outcome in outcomes)
    assert "node-0000:1" in page.read_text(encoding="utf-8")


def test_the_labels_are_explained_under_the_table(file: Path):
    found = CliRunner().invoke(app, [str(file)])
    table, legend = found.stdout.split("B: first come first served")
    assert "B+S+EE" in table
    assert "mean, p99: hours from a task's\narrival to its end; starts: executors started" in table
    assert legend == "; S: with a scheduler; EE: with early exit\n"


def test_a_capacity_is_one_command(file: Path):
    found = CliRunner().invoke(app, [str(file), "--finish-within", "25s", "--set", "early_exit_shares=[]"])
    assert found.output.startswith("4 GPUs (2 nodes of 2)")


@pytest.fixture
def without_ortools(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ortools", "ortools.sat", "ortools.sat.python"):
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.usefixtures("without_ortools")
def test_by_default_cp_sat_is_left_out_with_a_notice_where_ortools_is_missing(file: Path):
    found = CliRunner().invoke(app, [str(file), "--json", "--set", "methods=[]", "--set", "early_exit_shares=[]"])
    assert [outcome["method"] for outcome in json.loads(found.stdout)["outcomes"]] == ["fifo", "sjf", "lpt"]
    assert found.stderr.count(install_command("scheduler")) == 1
    capacity = CliRunner().invoke(app, [str(file), "--finish-within", "1h", "--set", "methods=[]"])
    assert "; lpt, with early exit" in capacity.stdout


@pytest.mark.usefixtures("without_ortools")
@pytest.mark.parametrize("arguments", [["--method", "cp-sat"], ["--set", "methods=[cp-sat]"]])
def test_cp_sat_is_an_error_where_it_is_named_and_ortools_is_missing(file: Path, arguments: list[str]):
    found = CliRunner().invoke(app, [str(file), *arguments])
    assert isinstance(found.exception, UnsupportedError)


def test_by_default_cp_sat_is_the_last_method(file: Path):
    pytest.importorskip("ortools")
    found = CliRunner().invoke(app, [str(file), "--json", "--set", "methods=[]", "--set", "early_exit_shares=[]"])
    methods = [outcome["method"] for outcome in json.loads(found.stdout)["outcomes"]]
    assert (methods, found.stderr) == (["fifo", "sjf", "lpt", "cp-sat"], "")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--set", "nods=2"], UnknownKeyError, "Did you mean 'nodes'"),
        (["--set", "trace=none.csv"], SpecError, "trace should be a readable file"),
        (["--finish-within", "soon"], SpecError, "expected a time such as"),
    ],
)
def test_mistakes_are_named(file: Path, arguments: list[str], error: type[Exception], message: str):
    found = CliRunner().invoke(app, [str(file), *arguments])
    assert isinstance(found.exception, error)
    assert message in str(found.exception)


@pytest.mark.parametrize(
    ("is_terminal", "arguments", "is_shown"), [(1, [], True), (1, ["--json"], False), (0, [], False)]
)
@pytest.mark.parametrize("search", [[], ["--finish-within", "1h"]], ids=["outcomes", "capacity"])
def test_progress_is_on_stderr_where_that_is_a_terminal(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: int,
    arguments: list[str],
    is_shown: bool,
    search: list[str],
):
    monkeypatch.setenv("TTY_COMPATIBLE", str(is_terminal))
    found = CliRunner().invoke(app, [str(file), *search, *arguments])
    assert found.exit_code == 0
    assert ("early exit: tasks" in found.stderr or ": simulations" in found.stderr) == is_shown
    assert "1 nodes" not in found.stderr
    assert "early exit: tasks" not in found.stdout
