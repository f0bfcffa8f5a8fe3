"""The example of docs/coming-from-axolotl.md becomes the task and the report that the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from alto.cli import app
from alto.importing.axolotl_data import _LABELLED_TYPES, _PAIR_TYPES, _SFT_TYPES
from alto.spec import load_task

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming-from-axolotl.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lora.yml").write_text(blocks("yaml")[0], encoding="utf-8")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "support.jsonl").write_text("{}\n", encoding="utf-8")
    return tmp_path


def test_the_example_becomes_what_is_shown(folder: Path) -> None:
    done = CliRunner().invoke(app, ["import", "lora.yml", "--to", "task.yaml"])
    assert done.exit_code == 0, done.output
    assert (folder / "task.yaml").read_text(encoding="utf-8") == blocks("yaml")[1]
    assert done.stderr == blocks("")[0]


def test_the_search_space_that_is_shown_replaces_what_is_fixed(folder: Path) -> None:
    (line,) = (line for block in blocks("bash") for line in block.splitlines() if "search_space={" in line)
    done = CliRunner().invoke(app, shlex.split(line)[1:])
    assert done.exit_code == 0, done.output
    jobs = [(job.config.learning_rate, job.config.r) for job in load_task("sweep.yaml").jobs]
    assert jobs == [(rate, rank) for rate in (1e-4, 2e-4, 5e-4) for rank in (8, 32)]


def test_every_type_of_rows_is_listed() -> None:
    for kind in (*_SFT_TYPES, *_PAIR_TYPES, *_LABELLED_TYPES):
        assert f"`{kind}`" in PAGE, kind
