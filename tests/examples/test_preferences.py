"""The example of preferences: pairs that are the same on every machine, and a task that finds and takes them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import load_tokenizer

from alto.data import read_task_rows
from alto.spec import load_task

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of examples/ with fresh data."""
    folder = tmp_path_factory.mktemp("examples")
    for name in ("preferences.yaml", "make_preferences.py", "make_word_problems.py"):
        (folder / name).write_bytes((EXAMPLES / name).read_bytes())
    subprocess.run([sys.executable, folder / "make_preferences.py"], check=True, capture_output=True)
    return folder


def read_pairs(folder: Path) -> list[dict[str, str]]:
    files = (folder / f"{split}.jsonl" for split in ("train", "validation"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def test_every_chosen_answer_is_right_and_every_rejected_one_has_one_fault(folder: Path) -> None:
    pairs = read_pairs(folder / "data" / "preferences")
    assert len(pairs) == 300
    faults = {"slip": 0, "no steps": 0, "no result": 0}
    for pair in pairs:
        assert set(pair) == {"prompt", "chosen", "rejected"}
        *steps, result = pair["chosen"].split("\n")
        assert re.fullmatch(r"#### \d+", result)
        if pair["rejected"] == result:
            faults["no steps"] += 1
        elif pair["rejected"] == "\n".join(steps):
            faults["no result"] += 1
        else:
            *wrong, claimed = pair["rejected"].split("\n")
            assert wrong[:-1] == steps[:-1]
            assert wrong[-1] == steps[-1].replace(f"= {result[5:]} ", f"= {claimed[5:]} ")
            assert 0 < int(claimed[5:]) != int(result[5:])
            faults["slip"] += 1
    assert set(faults.values()) == {100}


def test_no_problem_is_in_both_splits(folder: Path) -> None:
    prompts = [pair["prompt"] for pair in read_pairs(folder / "data" / "preferences")]
    assert len(set(prompts)) == len(prompts)


def test_same_seed_same_files(folder: Path, tmp_path: Path) -> None:
    script = EXAMPLES / "make_preferences.py"
    subprocess.run([sys.executable, script, "--output", tmp_path], check=True, capture_output=True)
    for name in ("train.jsonl", "validation.jsonl"):
        assert (tmp_path / name).read_bytes() == (folder / "data" / "preferences" / name).read_bytes()


def test_the_task_takes_every_pair(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    task = load_task(folder / "preferences.yaml")
    assert (task.method, len(task.jobs), task.early_exit.enabled) == ("dpo", 12, True)
    data = read_task_rows(task).encode(load_tokenizer())
    assert (len(data.train), len(data.validation), data.notes) == (240, 60, ())
