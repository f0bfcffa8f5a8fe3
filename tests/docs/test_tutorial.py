"""The tutorial's files and commands work in this version, and its cheap steps print what it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from alto.cli import app
from alto.errors import DataFormatError
from alto.spec import load_task

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page: str, language: str = "") -> list[str]:
    """Return the page's fenced blocks of a language, in order."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


def commands(page: str) -> list[str]:
    """Return all ``alto`` commands in the page's shell blocks."""
    return [line for block in blocks(page, "bash") for line in block.splitlines() if line.startswith("alto ")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's folder after steps 1 and 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "make_shipments.py").write_text(blocks("tutorial.md", "python")[0], encoding="utf-8")
    (tmp_path / "task.yaml").write_text(blocks("tutorial.md", "yaml")[0], encoding="utf-8")
    subprocess.run([sys.executable, "make_shipments.py"], check=True)
    return tmp_path


def test_the_first_preview_fails_as_shown(folder: Path) -> None:
    result = CliRunner().invoke(app, ["preview", "shipments.csv"])
    assert isinstance(result.exception, DataFormatError)
    shown = next(block for block in blocks("tutorial.md") if block.startswith("DataFormatError: "))
    for part in " ".join(shown.split()).removeprefix("DataFormatError: ").split("…"):
        assert part.strip() in str(result.exception)


def test_the_second_preview_shows_what_is_shown(folder: Path) -> None:
    line = next(line for line in commands("tutorial.md") if "columns=" in line)
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    shown = next(block for block in blocks("tutorial.md") if block.startswith("dataset: "))
    for part in shown.split("…\n"):
        assert part in result.output


def test_the_task_is_the_one_that_is_described(folder: Path) -> None:
    task = load_task("task.yaml")
    assert len(task.jobs) == 16
    winner = task.jobs[4].config
    assert (winner.learning_rate, winner.per_device_train_batch_size, winner.r) == (5e-3, 4, 8)


def test_the_task_trains(folder: Path) -> None:
    """It trains on few rows for few steps; the whole run takes minutes."""
    smaller = ["--set", "max_samples=20", "--set", "max_steps=2", "--set", "search_space={lr: [1e-3]}"]
    result = CliRunner().invoke(app, ["tune", "task.yaml", "--quiet", *smaller])
    assert result.exit_code == 0, result.output
    assert (Path(result.output.strip()) / "adapter_model.safetensors").is_file()
