"""The example tasks: valid, and runnable from any folder; and data that is the same on every machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny import load_tokenizer

from alto.data import read_task_rows
from alto.spec import Task, load_task

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    """The task read from a copy of examples/ with fresh data, from another current directory."""
    folder = tmp_path / "examples"
    folder.mkdir()
    for name in ("quickstart.yaml", "make_word_problems.py"):
        (folder / name).write_bytes((EXAMPLES / name).read_bytes())
    subprocess.run([sys.executable, folder / "make_word_problems.py"], check=True, capture_output=True)
    monkeypatch.chdir(tmp_path)
    return load_task(folder / "quickstart.yaml")


def test_data_is_where_the_generator_puts_it(task: Task) -> None:
    assert task.validation_dataset is not None
    assert Path(task.dataset).is_absolute()
    assert Path(task.dataset).name == "train.jsonl"
    assert Path(task.dataset).is_file()
    assert Path(task.validation_dataset).name == "validation.jsonl"
    assert Path(task.validation_dataset).is_file()


def test_jobs_are_many_and_one_learning_rate_is_far_too_high(task: Task) -> None:
    assert 20 <= len(task.jobs) <= 32
    rates = sorted({job.config.learning_rate for job in task.jobs})
    assert rates[-1] >= 10 * rates[-2]
    assert {job.config.lora_alpha / job.config.r for job in task.jobs} == {2}


def test_early_exit_is_the_default_policy(task: Task) -> None:
    assert task.early_exit.enabled
    assert task.early_exit.policy == "alto"


def test_every_top_level_key_has_a_comment_or_values_with_comments() -> None:
    text = (EXAMPLES / "quickstart.yaml").read_text(encoding="utf-8")
    for block in text.split("\n\n"):
        for key in yaml.safe_load(block) or {}:
            body = block[block.index(f"{key}:") :].split("\n")
            nested = [line for line in body[1:] if line.startswith(" ")]
            assert any("#" in line for line in [body[0], *nested]), key


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
    assert len(pairs) == 285
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
    assert set(faults.values()) == {95}


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
    assert (len(data.train), len(data.validation), data.notes) == (240, 45, ())
