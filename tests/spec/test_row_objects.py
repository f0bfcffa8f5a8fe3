"""Rows given as Python objects become files with the same rows; other objects are refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date, time
from pathlib import Path
from typing import Any

import numpy
import pytest

from alto.errors import SpecError, UnknownKeyError
from alto.spec import Task

pytestmark = pytest.mark.usefixtures("empty_cache")

ROWS = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(1, 7)]


def make_task(**keys: Any) -> Task:
    return Task(**{"model": "alto-tiny"} | keys)


def lines_of(path: object) -> list[dict[str, Any]]:
    assert isinstance(path, str)
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def generated() -> Iterator[dict[str, Any]]:
    yield from ROWS


class MapStyle:
    """Rows in the form of a torch dataset."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return ROWS[index]

    def __len__(self) -> int:
        return len(ROWS)


@pytest.mark.parametrize(
    "rows",
    [ROWS, tuple(ROWS), generated, generated(), MapStyle()],
    ids=["list", "tuple", "function", "generator", "map"],
)
def test_rows_are_kept_in_a_file_that_the_task_names(rows: object) -> None:
    task = make_task(dataset=rows)
    assert lines_of(task.dataset) == ROWS
    assert task.name == "task"
    assert Task(**task.to_dict()) == task


def test_equal_rows_have_one_file_and_leave_nothing_else(tmp_path: Path) -> None:
    first, second = make_task(dataset=ROWS), make_task(dataset=generated())
    assert first.dataset == second.dataset
    assert len(Path(str(first.dataset)).stem) == 32
    assert Path(str(first.dataset)).stat().st_mode & 0o777 == 0o644
    assert [path.name for path in (tmp_path / "cache" / "rows").iterdir()] == [Path(str(first.dataset)).name]


def test_every_key_of_rows_takes_objects_and_a_name_of_the_users_stays() -> None:
    task = make_task(name="sums", dataset=ROWS[:3], eval_dataset=ROWS[3:5], test_dataset=ROWS[5:])
    assert task.name == "sums"
    assert [lines_of(path) for path in (task.dataset, task.validation_dataset, task.test_dataset)] == [
        ROWS[:3],
        ROWS[3:5],
        ROWS[5:],
    ]
    assert lines_of(task.replace(dataset=ROWS[1:3]).dataset) == ROWS[1:3]


def test_a_mapping_of_splits_sets_all_that_it_has() -> None:
    task = make_task(dataset={"train": ROWS[:3], "validation": ROWS[3:5], "test": ROWS[5:]})
    assert lines_of(task.validation_dataset) == ROWS[3:5]
    assert lines_of(task.test_dataset) == ROWS[5:]
    chosen = make_task(
        dataset={"few": ROWS[:2], "validation": ROWS[3:]}, dataset_train_split="few", validation_split=0.5
    )
    assert (lines_of(chosen.dataset), chosen.validation_dataset) == (ROWS[:2], None)
    with pytest.raises(SpecError, match="with 'train' among them"):
        make_task(dataset={"few": ROWS})


def test_sources_of_a_mixture_take_objects() -> None:
    task = make_task(dataset=[{"path": ROWS[:3], "weight": 2.0}, {"path": ROWS[3:], "name": "rest"}])
    assert [source.name for source in task.sources] == ["source-0", "rest"]
    assert [lines_of(source.path) for source in task.sources] == [ROWS[:3], ROWS[3:]]
    apart = make_task(dataset=[{"dataset": ROWS[:3], "validation_dataset": ROWS[3:]}, {"path": ROWS[1:], "name": "b"}])
    assert [lines_of(source.path) for source in apart.sources] == [ROWS[:3], ROWS[1:]]
    assert lines_of(apart.sources[0].validation_dataset) == ROWS[3:]


def test_numbers_of_numpy_and_dates_are_written_as_plain_values() -> None:
    row = {"prompt": "x", "completion": "y", "n": numpy.int64(3), "v": numpy.arange(2)}
    row |= {"day": date(2026, 1, 2), "at": time(3, 4)}
    assert lines_of(make_task(dataset=[row]).dataset)[0] == {
        "prompt": "x",
        "completion": "y",
        "n": 3,
        "v": [0, 1],
        "day": "2026-01-02",
        "at": "03:04:00",
    }


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROWS[0], {"prompt": object()}], "row 2"),
        ([{"prompt": float("nan")}], "row 1"),
        (iter(["text"]), r"found 'text' \(str\) as row 1"),
        (iter(()), "should have rows, found none"),
        (lambda: 3, "should be a path, a name, or rows"),
    ],
)
def test_what_is_no_row_is_refused_and_leaves_no_file(rows: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        make_task(dataset=rows)
    assert list((tmp_path / "cache" / "rows").iterdir()) == []


def test_a_failing_generator_raises_its_own_error_and_leaves_no_file(tmp_path: Path) -> None:
    def failing() -> Iterator[dict[str, Any]]:
        yield ROWS[0]
        raise RuntimeError("the source is gone")

    with pytest.raises(RuntimeError, match="the source is gone"):
        make_task(dataset=failing)
    assert list((tmp_path / "cache" / "rows").iterdir()) == []


def test_frames_of_pandas() -> None:
    pandas = pytest.importorskip("pandas", reason="frames are pandas'")
    frame = pandas.DataFrame(ROWS).assign(note=[None, *"abcde"])
    assert lines_of(make_task(dataset=frame).dataset) == [
        {**row, "note": note} for row, note in zip(ROWS, [None, *"abcde"], strict=True)
    ]
    twice = pandas.DataFrame([["a", "b"]], columns=["prompt", "prompt"])
    with pytest.raises(SpecError, match="data frame with unique column names"):
        make_task(dataset=twice)


def test_datasets_of_hugging_face_are_read_as_their_own_rows() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets are Hugging Face's")
    from alto.data import read_task_rows

    whole = datasets.Dataset.from_list(ROWS)
    splits = datasets.DatasetDict(train=whole.select(range(4)), validation=whole.select(range(4, 6)))
    read = read_task_rows(make_task(dataset=splits))
    from_lists = read_task_rows(make_task(dataset={"train": ROWS[:4], "validation": ROWS[4:]}))
    assert (list(read.train), list(read.validation)) == (list(from_lists.train), list(from_lists.validation))
    assert len(read.train) == 4
    streamed = read_task_rows(make_task(dataset=whole.to_iterable_dataset(), validation_dataset=ROWS[4:]))
    assert len(streamed.train) == len(ROWS)


def test_a_function_may_return_any_rows() -> None:
    pandas = pytest.importorskip("pandas", reason="frames are pandas'")
    for made in (lambda: ROWS, lambda: pandas.DataFrame(ROWS)):
        assert lines_of(make_task(dataset=made).dataset) == ROWS
    datasets = pytest.importorskip("datasets", reason="datasets are Hugging Face's")
    whole = datasets.Dataset.from_list(ROWS)
    assert make_task(dataset=lambda: whole).dataset == make_task(dataset=whole).dataset


def test_an_error_of_the_operating_system_in_the_rows_is_their_own(tmp_path: Path) -> None:
    def failing() -> Iterator[dict[str, Any]]:
        yield ROWS[0]
        yield {"text": (tmp_path / "there-is-none.txt").read_text(encoding="utf-8")}

    with pytest.raises(FileNotFoundError, match=r"there-is-none\.txt"):
        make_task(dataset=failing)
    assert list((tmp_path / "cache" / "rows").iterdir()) == []


def test_numbers_of_frames_are_not_rounded_and_missing_cells_are_null() -> None:
    pandas = pytest.importorskip("pandas", reason="frames are pandas'")
    frame = pandas.DataFrame(
        {
            "text": ["a", "b", "c"],
            "label": [0.12345678901234566, 1e-17, float("nan")],
            "count": pandas.array([2**62 + 1, None, 3], dtype="Int64"),
            "day": [pandas.Timestamp("2026-01-02"), None, pandas.Timestamp("2026-01-03T04:05:06")],
            "tags": [["x"], None, [1, 2]],
            "huge": [10**30, 1, 2],
        }
    )
    assert lines_of(make_task(dataset=frame).dataset) == [
        {
            **{"text": "a", "label": 0.12345678901234566, "count": 2**62 + 1, "day": "2026-01-02T00:00:00"},
            **{"tags": ["x"], "huge": 10**30},
        },
        {"text": "b", "label": 1e-17, "count": None, "day": None, "tags": None, "huge": 1},
        {"text": "c", "label": None, "count": 3, "day": "2026-01-03T04:05:06", "tags": [1, 2], "huge": 2},
    ]


@pytest.mark.parametrize(
    ("cells", "message"),
    [({"text": []}, "should have rows, found none"), ({"text": ["\ud800"]}, "row 1"), ({"text": [b"a"]}, "row 1")],
    ids=["none", "surrogate", "bytes"],
)
def test_frames_that_cannot_be_written_are_refused_by_name(cells: dict[str, Any], message: str) -> None:
    pandas = pytest.importorskip("pandas", reason="frames are pandas'")
    with pytest.raises(SpecError, match=message):
        make_task(
            dataset=pandas.DataFrame({name: pandas.Series(values, dtype=object) for name, values in cells.items()})
        )


def test_a_transform_of_a_dataset_is_applied() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets are Hugging Face's")
    whole = datasets.Dataset.from_list([{"question": row["prompt"], "answer": row["completion"]} for row in ROWS])
    whole.set_transform(lambda batch: {"prompt": batch["question"], "completion": batch["answer"]})
    assert lines_of(make_task(dataset=whole).dataset) == ROWS


def test_rows_may_have_columns_that_are_keys_of_a_source() -> None:
    rows = [{**row, "dataset": "sums", "path": "a.jsonl", "weight": 1} for row in ROWS]
    assert lines_of(make_task(dataset=rows).dataset) == rows
    with pytest.raises(UnknownKeyError, match="weigth"):
        make_task(dataset=[{"path": "sums.jsonl", "weigth": 1.0}])


def test_splits_that_would_be_left_out_are_refused() -> None:
    with pytest.raises(SpecError, match="dataset_test_split should be a split"):
        make_task(dataset={"train": ROWS[:3], "test": ROWS[3:]}, dataset_test_split="tset")
    with pytest.raises(SpecError, match="in the split 'validation', found 'valid'"):
        make_task(dataset={"train": ROWS[:3], "valid": ROWS[3:]})
    apart = make_task(dataset={"train": ROWS[:3], "valid": ROWS[3:]}, validation_dataset=ROWS[3:])
    assert lines_of(apart.validation_dataset) == ROWS[3:]
    named = make_task(dataset={"train": ROWS[:3], "heldout": ROWS[3:], "rest": ROWS[:1]}, dataset_test_split="heldout")
    assert (lines_of(named.test_dataset), named.validation_dataset) == (ROWS[3:], None)
    assert (named.dataset_train_split, named.dataset_test_split) == (None, None)
    on_test = make_task(dataset={"test": ROWS, "validation": ROWS[:2]}, dataset_train_split="test")
    assert (lines_of(on_test.dataset), on_test.test_dataset) == (ROWS, None)


@pytest.mark.parametrize("key", ["dataset", "validation_dataset", "test_dataset"])
@pytest.mark.parametrize("rows", [[], ()])
def test_no_rows_are_no_mixture(key: str, rows: object) -> None:
    with pytest.raises(SpecError, match=f"^{key} should have rows, found an empty list. Give at least two"):
        Task(**{"model": "alto-tiny", "dataset": ROWS, key: rows})
