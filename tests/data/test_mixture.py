"""Rows of a job that draws from several sources: how many from each, in which order."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from budgets import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import load_tokenizer, write_rows

from alto.data import Conversation, MixtureOrder, digest_of, read_task_rows
from alto.data.batch import mixture_counts
from alto.errors import BadRowsError
from alto.spec import Task


def rows_of_epoch(order: MixtureOrder, epoch: int, num_rows: int, batch_size: int) -> list[int]:
    steps = -(-num_rows // batch_size)
    return [row for step in range(epoch * steps, (epoch + 1) * steps) for row in order.rows_of_step(step)]


@pytest.mark.parametrize(
    ("num_rows", "shares", "counts"),
    [
        (10, [0.5, 0.5], [5, 5]),
        (10, [1.0, 0.0], [10, 0]),
        (10, [1 / 3, 1 / 3, 1 / 3], [4, 3, 3]),
        (10, [0.26, 0.25, 0.49], [3, 2, 5]),
        (1, [0.4, 0.6], [0, 1]),
        (7, [0.1] * 10, [1] * 7 + [0] * 3),
    ],
)
def test_counts_are_shares_rounded(num_rows: int, shares: list[float], counts: list[int]) -> None:
    assert mixture_counts(num_rows, shares) == counts


SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), sizes=SIZES, batch_size=st.integers(1, 9), seed=st.integers(0, 99))
def test_every_epoch_has_its_counts_and_a_source_is_used_up_before_it_repeats(
    data: st.DataObject, sizes: list[int], batch_size: int, seed: int
) -> None:
    weights = data.draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)).filter(any))
    shares = [weight / sum(weights) for weight in weights]
    num_rows, order = sum(sizes), MixtureOrder(sizes, shares, batch_size, seed)
    assert sum(order.counts) == num_rows
    firsts = [sum(sizes[:source]) for source in range(len(sizes))]
    seen: Counter[int] = Counter()
    for epoch in range(3):
        rows = rows_of_epoch(order, epoch, num_rows, batch_size)
        assert len(rows) == num_rows
        seen.update(rows)
        for first, size, count in zip(firsts, sizes, order.counts, strict=True):
            of_source = [row for row in rows if first <= row < first + size]
            assert len(of_source) == count
            # In an endless stream of shuffles, rows differ by at most one appearance.
            times = [seen[row] for row in range(first, first + size)]
            assert max(times) - min(times) <= 1
            assert sum(times) == (epoch + 1) * count


def test_an_order_has_no_state_and_every_seed_and_epoch_its_own() -> None:
    shares = [0.75, 0.25]
    order = MixtureOrder([20, 5], shares, 4, 1)
    forward = [order.rows_of_step(step) for step in range(21)]
    assert [MixtureOrder([20, 5], shares, 4, 1).rows_of_step(step) for step in reversed(range(21))][::-1] == forward
    epochs = [rows_of_epoch(order, epoch, 25, 4) for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert rows_of_epoch(MixtureOrder([20, 5], shares, 4, 2), 0, 25, 4) != epochs[0]
    small = [[row for row in rows if row >= 20] for rows in epochs]
    assert all(len(rows) == 6 and 4 <= len(set(rows)) <= 5 for rows in small)
    assert len({tuple(rows) for rows in small}) == 3
    large = [[row for row in rows if row < 20] for rows in epochs]
    assert set(range(20)) <= set(large[0]) | set(large[1])


def test_the_order_stays_what_it_is() -> None:
    order = MixtureOrder([4, 3], [0.5, 0.5], 3, 42)
    assert [order.rows_of_step(step) for step in range(3)] == [[4, 5, 2], [0, 1, 6], [3]]


def make_mixture(folder: Path, **keys: object) -> Task:
    sources = [
        {"path": str(write_rows(folder / "maths.jsonl", 20)), "weight": 3},
        {"path": str(write_rows(folder / "chat.jsonl", 10, first=50)), "name": "talk", "weight": 1},
    ]
    return Task(**{"model": "alto-tiny", "dataset": sources, "name": "mixed"} | keys)


def test_sources_are_split_and_tokenised_each_by_itself(tmp_path: Path) -> None:
    rows = read_task_rows(make_mixture(tmp_path, validation_split=0.2))
    assert rows.train_sources == (("maths", 16), ("talk", 8))
    assert rows.validation_sources == (("maths", 4), ("talk", 2))
    data = rows.encode(load_tokenizer())
    assert (data.train.sources, data.validation.sources) == (rows.train_sources, rows.validation_sources)
    assert data.notes[0] == (
        "A mixture of maths (16 rows, 4 for validation), talk (8 rows, 2 for validation). An epoch has 24 rows, drawn "
        "by the weights of each job."
    )
    alone = read_task_rows(Task(model="alto-tiny", dataset=str(tmp_path / "chat.jsonl"), validation_split=0.2))
    assert rows.train[16:] == alone.train
    assert rows.validation[4:] == alone.validation


def test_one_validation_dataset_serves_all_sources(tmp_path: Path) -> None:
    other = str(write_rows(tmp_path / "v.jsonl", 12, first=200))
    rows = read_task_rows(make_mixture(tmp_path, validation_dataset=other))
    assert (rows.validation_sources, len(rows.validation)) == ((), 12)
    assert rows.train_sources == (("maths", 20), ("talk", 10))


def test_a_bad_row_names_its_source(tmp_path: Path) -> None:
    task = make_mixture(tmp_path)
    (tmp_path / "chat.jsonl").write_text("{\n{\n" + '{"prompt": "p", "completion": "c"}\n' * 9)
    with pytest.raises(BadRowsError, match=r"dataset \(talk\): expected rows that can be used, found 2 of 11 bad"):
        read_task_rows(task)
    rows = read_task_rows(task.replace(on_bad_row="skip"))
    assert rows.train_sources == (("maths", 18), ("talk", 8))


def test_sources_have_forms_and_columns_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("ask,say\n" + "a,b\n" * 10)
    path = str(write_rows(tmp_path / "maths.jsonl", 10))
    own = {"path": str(tmp_path / "own.csv"), "columns": {"prompt": "ask", "completion": "say"}}
    rows = read_task_rows(Task(model="alto-tiny", dataset=[path_of(path), own]))
    assert [turn.content for turn in rows.train[-1]] == ["a", "b"]


def test_the_tasks_form_is_that_of_sources_without_their_own(tmp_path: Path) -> None:
    task = make_mixture(tmp_path, dataset_format="raw_prompt_completion")
    one = Task(model="alto-tiny", dataset=str(tmp_path / "chat.jsonl"), dataset_format="raw_prompt_completion")
    assert read_task_rows(task).train[18:] == read_task_rows(one).train
    own = [{**path_of(source.path), "dataset_format": "prompt_completion"} for source in task.sources]
    assert read_task_rows(task.replace(dataset=own)).train[18:] != read_task_rows(one).train


def test_pairs_to_validate_on_become_labelled_replies_too(tmp_path: Path) -> None:
    def write(name: str, count: int) -> str:
        rows = [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(count)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    sources = [path_of(write("a.jsonl", 6)), path_of(write("b.jsonl", 3))]
    other = write("v.jsonl", 2)
    task = Task(model="alto-tiny", method="kto", dataset=sources, validation_dataset=other, test_dataset=other)
    rows = read_task_rows(task)
    assert rows.train_sources == (("a", 12), ("b", 6))
    for split in (rows.validation, rows.test):
        assert [row.is_desirable for row in split or () if isinstance(row, Conversation)] == [True, False] * 2


def test_data_with_a_row_of_another_source_is_other_data(tmp_path: Path) -> None:
    data = read_task_rows(make_mixture(tmp_path)).encode(load_tokenizer())
    assert data.train.sources == (("maths", 18), ("talk", 9))
    moved = replace(data.train, sources=(("maths", 17), ("talk", 10)))
    assert digest_of(moved) != digest_of(data.train)


def path_of(path: str) -> dict[str, str]:
    return {"path": path}
