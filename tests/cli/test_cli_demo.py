"""``alto demo``: the quickstart without a clone and without a network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from alto.cli import app
from alto.errors import RunExistsError, RunWriteError

ROOT = Path(__file__).parents[2]
BRIEF = ("--set", "search_space={r: [2, 4]}", "--set", "max_steps=2", "--set", "max_slots=2")


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, ["demo", *map(str, words)])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("empty_cache")
def test_the_demo_runs_twice_and_says_what_to_look_at(folder: Path) -> None:
    done = invoke(*BRIEF)
    assert done.exit_code == 0, (done.output, done.exception)
    [run] = (folder / "alto-demo" / "runs").iterdir()
    assert (run / "best" / "adapter_model.safetensors").is_file()
    assert (folder / "alto-demo" / "quickstart.yaml").read_bytes() == (
        ROOT / "examples" / "quickstart.yaml"
    ).read_bytes()
    after = done.stdout.partition("Next:")[2]
    evaluated = re.search(r"alto eval (\S+) --dataset (\S+)", after)
    assert evaluated is not None
    assert Path(evaluated[1]).resolve() == run
    assert Path(evaluated[2]).is_file()
    assert "alto tune alto-demo/quickstart.yaml" in after
    assert "alto init YOUR-ROWS.jsonl --model YOUR-MODEL" in after
    assert invoke(*BRIEF).exit_code == 0
    assert len(list((folder / "alto-demo" / "runs").iterdir())) == 2


def test_another_folder_is_left_alone(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "quickstart.yaml").write_text("model: other\n")
    done = invoke("mine")
    assert isinstance(done.exception, RunExistsError)
    assert "expected a new folder or the folder of an unchanged demo, found mine" in str(done.exception)
    assert [path.name for path in (folder / "mine").iterdir()] == ["quickstart.yaml"]
    assert (folder / "mine" / "quickstart.yaml").read_text() == "model: other\n"


def test_a_folder_that_cannot_be_made_is_named(folder: Path) -> None:
    (folder / "file").touch()
    done = invoke("file/demo")
    assert isinstance(done.exception, RunWriteError)
    assert "expected to write file/demo, found: Not a directory; name a folder" in str(done.exception)
