"""The command line on bad input: what every refusal has in common is checked once, here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import write_rows

from alto.cli import main

Refusal = Callable[..., str]

TASK = "model: alto-tiny\ndataset: train.jsonl\nmax_steps: 1\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a task that would run."""
    write_rows(tmp_path / "train.jsonl")
    (tmp_path / "task.yaml").write_text(TASK, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refusal(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refusal:
    """``refusal("tune", "task.yaml")``: what ``alto`` says on stderr when it refuses, as it has to refuse anything."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["alto", *map(str, arguments)])
        before = sorted(folder.rglob("*"))
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert ended.value.code == 1, err
        assert out == ""
        assert err.partition(":")[0].endswith("Error"), err
        assert err.replace("\n", "").isprintable()
        assert len(err) < 1200
        assert sorted(folder.rglob("*")) == before, "something half-written was left"
        return err

    return run
