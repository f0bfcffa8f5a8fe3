"""Columns of rows that reward functions get: which are kept, and when."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from tiny import load_tokenizer

from alto.data import TaskData, digest_of, read_heldout_rows, read_task_rows
from alto.errors import DataFormatError
from alto.spec import REWARD_ARGUMENTS, Task

TOKENIZER = load_tokenizer()
FUNCTION = ["my_rewards:score"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))


def rows(count: int = 12, **columns: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"{n} + 1?", "completion": str(n + 1), **columns} for n in range(count)]


def encoded(dataset: Any, **changes: Any) -> TaskData:
    keys: dict[str, Any] = {"model": "alto-tiny", "method": "grpo", "reward_funcs": FUNCTION, "data_seed": 0}
    return read_task_rows(Task(dataset=dataset, **(keys | changes))).encode(TOKENIZER)


def columns_of(data: TaskData) -> list[Any]:
    return [split.other_columns(row) for split in data.splits for row in range(len(split))]


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("token_cache", ["memory", "disk"])
def test_each_row_keeps_its_own_columns(token_cache: str, tmp_path: Path) -> None:
    given = [{**row, "level": n, "tags": ["ä", None]} for n, row in enumerate(rows(40))]
    data = encoded(written(tmp_path / "rows.jsonl", given), token_cache=token_cache)
    found = columns_of(data)
    assert sorted(one["level"] for one in found) == list(range(40))
    assert all(one["tags"] == ["ä", None] for one in found)
    for split in data.splits:
        for row in range(len(split)):
            prompt = TOKENIZER.decode(split.input_ids[row])
            assert f"{split.other_columns(row)['level']} + 1?" in prompt


def test_a_row_without_a_column_has_none() -> None:
    given = [*rows(6, hint="count"), *rows(6)]
    found = columns_of(encoded(given))
    assert [one["hint"] for one in found].count(None) == 6
    assert all(one.keys() == {"hint"} for one in found)


def test_the_replys_column_is_passed_too_if_it_has_a_name_of_its_own() -> None:
    given = [{"question": f"{n} + 1?", "answer": str(n + 1), "level": 1} for n in range(12)]
    assert all(one.keys() == {"answer", "level"} for one in columns_of(encoded(given)))
    given = [{"prompt": f"{n} + 1?", "reference": str(n + 1)} for n in range(12)]
    assert encoded(given, columns={"completion": "reference"}).train.columns is None


def test_values_that_are_no_json_become_text() -> None:
    day = datetime.date(2026, 11, 28)
    assert columns_of(encoded(rows(when=day)))[0] == {"when": "2026-11-28"}


def test_sources_of_a_mixture_have_their_own_columns(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a.jsonl", rows(level=1)), written(tmp_path / "b.jsonl", rows())
    data = encoded([{"path": first}, {"path": second}])
    assert data.train.columns is not None
    assert sorted(map(str, {json.dumps(one) for one in columns_of(data)})) == ['{"level": 1}', "{}"]


@pytest.mark.parametrize("changes", [{"reward_funcs": ["numeric"]}, {"method": "sft", "reward_funcs": []}])
def test_columns_that_no_function_gets_are_not_kept(changes: dict[str, Any]) -> None:
    data = encoded(rows(level=1), **changes)
    assert data.train.columns is None
    assert any("Columns that nothing reads: level" in note for note in data.notes)


@pytest.mark.parametrize("name", REWARD_ARGUMENTS)
def test_a_column_named_like_another_argument_is_refused(name: str) -> None:
    with pytest.raises(
        DataFormatError, match=rf"dataset: expected columns whose names are not arguments .*, found '{name}'; rename"
    ):
        encoded(rows(**{name: 1}))


def test_rows_of_an_evaluation_may_have_any_columns(tmp_path: Path) -> None:
    task = Task(model="alto-tiny", dataset=rows(level=1), method="grpo", reward_funcs=FUNCTION)
    other = written(tmp_path / "other.jsonl", rows(reference="a book"))
    assert len(read_heldout_rows(task, other).rows) == 12


def test_other_values_are_other_data() -> None:
    digests = {digest_of(*encoded(rows(level=level)).splits) for level in (1, 1, 2)}
    assert len(digests) == 2
