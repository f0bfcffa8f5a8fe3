"""Every block of docs/coming-from-axolotl.md runs, and its example gives the task and the report on the page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from profiles import measured_at_once
from transformers import TrainingArguments
from typer.testing import CliRunner, Result

from alto.cli import app
from alto.importing.axolotl_data import _LABELLED_TYPES, _PAIR_TYPES, _SFT_TYPES
from alto.spec import load_task

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming-from-axolotl.md").read_text(encoding="utf-8")
SMALLER = {
    "NousResearch/Meta-Llama-3-8B-Instruct": "alto-tiny",
    "load_in_4bit: true": "load_in_4bit: false",
    "adapter: qlora": "adapter: lora",
    "num_epochs: 4": "num_epochs: 1",
}
"""Changes to the example's configuration with which a test can train it."""


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


def commands(block: str) -> list[str]:
    return [line for line in block.splitlines() if line.startswith("alto ")]


def run(line: str) -> Result:
    """Run a command, whose output file may exist."""
    words = shlex.split(line, comments=True)[1:]
    if "--to" in words:
        Path(words[words.index("--to") + 1]).unlink(missing_ok=True)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"{line}: {done.output} {done.exception!r}"
    return done


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lora.yml").write_text(blocks("yaml")[0], encoding="utf-8")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "support.jsonl").write_text("{}\n", encoding="utf-8")
    return tmp_path


def make_smaller(folder: Path) -> str:
    """Reduce the example to the model that ships with ALTO and forty rows; return its text."""
    text = blocks("yaml")[0]
    for there, here in SMALLER.items():
        assert there in text, there
        text = text.replace(there, here)
    (folder / "lora.yml").write_text(text, encoding="utf-8")
    rows = [
        [{"from": "human", "value": f"{number} plus 2?"}, {"from": "gpt", "value": f"It is {number + 2}."}]
        for number in range(40)
    ]
    lines = (json.dumps({"conversations": row}) + "\n" for row in rows)
    (folder / "data" / "support.jsonl").write_text("".join(lines), encoding="utf-8")
    return text


def test_there_is_no_block_that_is_not_run() -> None:
    assert {name: len(blocks(name)) for name in ("bash", "yaml", "python", "")} == {
        "bash": 2,
        "yaml": 2,
        "python": 1,
        "": 1,
    }
    assert len(re.findall(r"^```", PAGE, re.MULTILINE)) == 2 * 6


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


def test_every_import_that_is_shown_gives_a_task(folder: Path) -> None:
    text = (folder / "lora.yml").read_text(encoding="utf-8")
    for name, rate in (("a", "1e-4"), ("b", "2e-4"), ("c", "5e-4")):
        changed = text.replace("learning_rate: 2e-4", f"learning_rate: {rate}")
        (folder / f"{name}.yml").write_text(changed, encoding="utf-8")
    arguments = TrainingArguments(output_dir="out", learning_rate=3e-4, per_device_train_batch_size=2)
    (folder / "args.json").write_text(arguments.to_json_string(), encoding="utf-8")
    rates: list[Any] = []
    lines = commands(blocks("bash")[0])
    for line in lines:
        done = run(line)
        if "--to" not in shlex.split(line, comments=True):
            (folder / "task.yaml").write_text(done.stdout, encoding="utf-8")
        rates.append([job.config.learning_rate for job in load_task("task.yaml").jobs])
    assert rates == [[2e-4], [1e-3], [1e-4, 2e-4, 5e-4], [3e-4]]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_example_is_previewed_planned_trained_evaluated_and_merged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_smaller(folder)
    monkeypatch.setenv("ALTO_CACHE", str(folder / "cache"))
    measured_at_once(monkeypatch)
    imported, preview, plan, tune, evaluate = commands(blocks("bash")[1])
    run(imported)
    assert "gpt" not in run(preview).stdout.split("--- example 1")[1], "the chat template writes the rows"
    assert "jobs:       6" in run(plan).stdout
    run(tune)
    (folder_of_run,) = (folder / "runs").iterdir()
    shown = run(evaluate).stdout
    assert all(f"job-00{number}" in shown for number in range(6))
    [block] = blocks("python")
    assert "runs/support-20261123-101500" in block
    exec(compile(block.replace("runs/support-20261123-101500", str(folder_of_run)), "page", "exec"), {})
    assert (folder / "merged" / "model.safetensors").is_file()


def test_every_type_of_rows_is_listed() -> None:
    for kind in (*_SFT_TYPES, *_PAIR_TYPES, *_LABELLED_TYPES):
        assert f"`{kind}`" in PAGE, kind
