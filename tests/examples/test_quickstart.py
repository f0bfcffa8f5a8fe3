"""The quickstart's task file: valid, findable from any folder, and with something for every exit to show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from alto.spec import Task, load_task

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    """The task as read from a copy of examples/ with fresh data, while standing elsewhere."""
    folder = tmp_path / "examples"
    folder.mkdir()
    for name in ("quickstart.yaml", "make_word_problems.py"):
        (folder / name).write_bytes((EXAMPLES / name).read_bytes())
    subprocess.run([sys.executable, folder / "make_word_problems.py"], check=True, capture_output=True)
    monkeypatch.chdir(tmp_path)
    return load_task(folder / "quickstart.yaml")


def test_data_lies_where_the_generator_puts_it(task: Task) -> None:
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
