"""The data of a whole task: which file, which rows, and what is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import load_tokenizer, make_task, write_rows

from alto.data import read_task_rows
from alto.errors import DataFileNotFoundError
from alto.spec import Task


def test_a_validation_dataset_is_taken_as_it_is(tmp_path: Path) -> None:
    task = make_task(tmp_path, max_samples=20)
    data = read_task_rows(task).encode(load_tokenizer(), task.max_length)
    assert (len(data.train), len(data.validation)) == (20, 6)
    assert len(read_task_rows(task).train) == 20


def test_without_one_a_share_is_set_aside_by_the_data_seed(tmp_path: Path) -> None:
    tokenizer = load_tokenizer()

    def validation_ids(seed: int) -> list[list[int]]:
        task = Task(dataset=str(write_rows(tmp_path / "rows.jsonl")), model="alto-tiny", data_seed=seed)
        data = read_task_rows(task).encode(tokenizer, task.max_length)
        assert (len(data.train), len(data.validation), len(read_task_rows(task).train)) == (22, 2, 22)
        return [ids.tolist() for ids in data.validation.input_ids]

    assert validation_ids(1) == validation_ids(1)
    assert validation_ids(1) != validation_ids(2)


def test_counts_tell_what_was_cut_and_left_out(tmp_path: Path) -> None:
    data = read_task_rows(make_task(tmp_path)).encode(load_tokenizer(), 12)
    counts = data.counts()
    assert counts["train_rows"] + counts["train_skipped_rows"] == 24
    assert counts["train_tokens"] == sum(ids.numel() for ids in data.train.input_ids)
    assert 0 < counts["train_truncated_rows"] <= 24
    assert counts["validation_trained_tokens"] == sum(int((row >= 0).sum()) for row in data.validation.targets)


def test_a_missing_file_is_found_before_any_work(tmp_path: Path) -> None:
    task = make_task(tmp_path, validation_dataset=str(tmp_path / "absent.jsonl"))
    with pytest.raises(DataFileNotFoundError, match=r"absent\.jsonl"):
        read_task_rows(task)
