"""Unusable rows: listed in one error, or left out and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import load_tokenizer, write_rows

from alto.data import preview_rows, read_task_rows
from alto.data.rows import LIST_LENGTH, FaultKind, FaultList, RowFault
from alto.engine import Engine
from alto.errors import BadRowsError, SpecError
from alto.spec import Task

GOOD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
BAD: dict[FaultKind, Any] = {
    FaultKind.NOT_JSON: "{not json",
    FaultKind.NOT_AN_OBJECT: [1, 2],
    FaultKind.NO_COLUMNS: {"prompt": "p"},
    FaultKind.WRONG_VALUE: {"messages": "text"},
    FaultKind.BAD_MESSAGE: {"messages": [{"role": "wizard", "content": "x"}]},
    FaultKind.NO_REPLY: {"messages": [{"role": "user", "content": "q"}]},
    FaultKind.EMPTY_REPLY: {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": " "}]},
    FaultKind.NOT_UTF8: b'{"messages": "\xff"}',
}


def write(path: Path, *rows: Any) -> str:
    with path.open("wb") as lines:
        for row in rows:
            text = row if isinstance(row, str | bytes) else json.dumps(row)
            lines.write((text if isinstance(text, bytes) else text.encode()) + b"\n")
    return str(path)


def make(tmp_path: Path, *rows: Any, **keys: Any) -> Task:
    if "validation_dataset" not in keys:
        keys["validation_dataset"] = write(tmp_path / "validation.jsonl", *[GOOD] * 12)
    return Task(model="alto-tiny", dataset=write(tmp_path / "train.jsonl", *rows), **keys)


def test_every_kind_of_fault_is_listed_in_one_error(tmp_path: Path) -> None:
    with pytest.raises(BadRowsError) as caught:
        read_task_rows(make(tmp_path, GOOD, *BAD.values(), *[GOOD] * 20))
    first, *lines = str(caught.value).split("\n")
    assert first.startswith("dataset: expected rows that can be used, found 8 of 29 bad (1 not JSON, 1 not an object, ")
    assert first.endswith("correct them, or leave them out with on_bad_row: skip:")
    assert all(f"1 {kind}" in first for kind in BAD)
    assert [line.split(": ")[0] for line in lines] == [f"  {tmp_path / 'train.jsonl'}:{row}" for row in range(2, 10)]
    assert all("expected" in line and "found" in line for line in lines)


def test_an_unreadable_labelled_row_is_not_reported_as_unlabelled(tmp_path: Path) -> None:
    good = [{"prompt": "p", "completion": f"c {n}", "label": n % 2 == 0} for n in range(20)]
    with pytest.raises(BadRowsError, match=r"train\.jsonl:1: expected one JSON object per line"):
        read_task_rows(make(tmp_path, "{not json", *good, method="kto", validation_dataset=None, validation_split=0.2))


def test_a_line_that_ends_too_early_is_not_called_two(tmp_path: Path) -> None:
    with pytest.raises(BadRowsError, match=r"train\.jsonl:2: expected one JSON object per line, ") as caught:
        read_task_rows(make(tmp_path, GOOD, '{"prompt": "p", "completion": "c"', *[GOOD] * 20))
    assert "(Expecting ',' delimiter)" in str(caught.value)


def test_a_fault_of_many_rows_is_reported_once_with_their_places(tmp_path: Path) -> None:
    with pytest.raises(BadRowsError) as caught:
        read_task_rows(make(tmp_path, *["{"] * 30, *[GOOD] * 5, BAD[FaultKind.NO_REPLY]))
    first, *lines = str(caught.value).split("\n")
    assert "found 31 of 36 bad (30 not JSON, 1 without a reply)" in first
    assert first.endswith("correct them, or leave them out with on_bad_row: skip:")
    path = tmp_path / "train.jsonl"
    assert [line.split(": ")[0] for line in lines] == [f"  {path}:1", "    29 more like it", f"  {path}:36"]
    assert lines[1].endswith(f": {path}:2, 3, 4, 5, 6, 7, 8, 9, 10, 11, …")


def test_rows_with_different_wrong_values_are_one_fault(tmp_path: Path) -> None:
    """A file with texts instead of messages is one mistake, not one per row."""
    with pytest.raises(BadRowsError) as caught:
        read_task_rows(make(tmp_path, *[{"messages": f"text {number}"} for number in range(25)]))
    assert str(caught.value).count("expected messages to be a list with at least one message, found 'text 0'") == 1
    assert str(caught.value).count("\n") == 2
    assert "24 more like it" in str(caught.value)


def test_twenty_different_faults_are_listed() -> None:
    faults = FaultList("dataset")
    for number in range(50):
        faults.add(f"row {number}", RowFault(FaultKind.WRONG_VALUE, f"expected {number}, found y"))
    with pytest.raises(BadRowsError, match=rf"found 50 of 100 bad .*; the first {LIST_LENGTH} faults:") as caught:
        faults.settle(100, "error")
    assert str(caught.value).count("\n") == LIST_LENGTH


def test_one_bad_row_is_one_line_with_both_remedies(tmp_path: Path) -> None:
    with pytest.raises(BadRowsError) as caught:
        read_task_rows(make(tmp_path, GOOD, GOOD, BAD[FaultKind.NO_REPLY]))
    assert str(caught.value) == (
        f"{tmp_path / 'train.jsonl'}:3: expected at least one assistant message to train on, found none; add it, or "
        "leave it out with on_bad_row: skip"
    )


def test_skipped_rows_are_left_out_counted_and_noted(tmp_path: Path) -> None:
    task = make(tmp_path, GOOD, *BAD.values(), *[GOOD] * 20, on_bad_row="skip")
    rows = read_task_rows(task)
    assert len(rows.train) == 21
    data = rows.encode(load_tokenizer())
    assert data.counts()["bad_rows"] == 8
    assert data.notes[0].startswith("dataset: 8 of 29 rows left out (on_bad_row: skip): 1 not JSON, 1 not an object,")
    assert data.notes[0].endswith(f"; the first is {tmp_path / 'train.jsonl'}:2.")
    assert preview_rows(rows, load_tokenizer(), task, num_rows=0).notes == data.notes


def test_bad_rows_of_every_dataset_are_left_out(tmp_path: Path) -> None:
    other = write(tmp_path / "validation.jsonl", *[GOOD] * 12, "{", "{")
    task = make(tmp_path, *[GOOD] * 3, "{", validation_dataset=other, on_bad_row="skip")
    rows = read_task_rows(task)
    assert (len(rows.train), len(rows.validation)) == (3, 12)
    assert [(bad.key, bad.num_bad) for bad in rows.bad_rows] == [("dataset", 1), ("validation_dataset", 2)]
    with pytest.raises(BadRowsError, match=r"validation_dataset: expected rows that can be used, found 2 of 14 bad"):
        read_task_rows(task.replace(dataset=write(tmp_path / "good.jsonl", GOOD, GOOD), on_bad_row="error"))


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
@pytest.mark.parametrize("row", ["{", BAD[FaultKind.NO_REPLY]], ids=["unread", "unconverted"])
def test_a_file_of_bad_rows_alone_is_an_error_in_any_case(tmp_path: Path, on_bad_row: str, row: Any) -> None:
    with pytest.raises(BadRowsError, match=r"dataset: expected rows that can be used, found all 3 bad .*correct them:"):
        read_task_rows(make(tmp_path, row, row, row, on_bad_row=on_bad_row))


def test_a_broken_first_row_does_not_decide_the_form(tmp_path: Path) -> None:
    rows = read_task_rows(make(tmp_path, "{", {"text": "x"}, *[GOOD] * 9, on_bad_row="skip"))
    assert (rows.layout.form, len(rows.train)) == ("messages", 9)
    assert dict(rows.bad_rows[0].kinds) == {FaultKind.NOT_JSON: 1, FaultKind.NO_COLUMNS: 1}


def test_pairs_with_equal_or_empty_replies_are_bad_rows(tmp_path: Path) -> None:
    pairs = [{"prompt": f"q{number}", "chosen": "yes", "rejected": "no"} for number in range(12)]
    broken = [{**pairs[0], "rejected": "yes"}, {**pairs[0], "chosen": ""}, {"prompt": "q", "chosen": "yes"}]
    others = write(tmp_path / "validation.jsonl", *pairs)
    task = make(tmp_path, *pairs, *broken, method="dpo", validation_dataset=others, on_bad_row="skip")
    [bad] = read_task_rows(task).bad_rows
    assert dict(bad.kinds) == {FaultKind.EQUAL_REPLIES: 1, FaultKind.EMPTY_REPLY: 1, FaultKind.NO_COLUMNS: 1}
    with pytest.raises(BadRowsError, match="found 3 of 15 bad"):
        read_task_rows(task.replace(on_bad_row="error"))


def test_rows_of_a_table_are_faults_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"prompt,completion\np,c\np,c,d\np,\xff\np,\nq,d\n")
    keys = {"validation_dataset": str(write_rows(tmp_path / "v.jsonl")), "on_bad_row": "skip"}
    rows = read_task_rows(Task(model="alto-tiny", dataset=str(path), **keys))
    assert [row[0].content for row in rows.train] == ["p", "q"]
    assert set(rows.bad_rows[0].kinds) == {FaultKind.OTHER_CELLS, FaultKind.NOT_UTF8, FaultKind.EMPTY_REPLY}


def test_conversations_that_the_template_refuses_are_bad_rows(tmp_path: Path) -> None:
    tokenizer = load_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    refused = {"messages": [{"role": "system", "content": "s"}, *GOOD["messages"]]}
    task = make(tmp_path, *[GOOD] * 12, refused, GOOD, on_bad_row="skip")
    data = read_task_rows(task).encode(tokenizer)
    assert (len(data.train), data.train.num_skipped, data.counts()["bad_rows"]) == (13, 0, 1)
    assert any("the training data: 1 of 14 rows left out" in note for note in data.notes)
    with pytest.raises(BadRowsError, match=r"train\.jsonl:13: expected turns .*\(no system\)"):
        read_task_rows(task.replace(on_bad_row="error")).encode(tokenizer)


def test_a_list_without_faults_settles_to_nothing() -> None:
    assert FaultList("dataset").settle(0, "error") is None


def test_the_text_of_few_faults_is_kept() -> None:
    faults = FaultList("dataset")
    for number in range(1000):
        faults.add(f"row {number}", RowFault(FaultKind.NOT_JSON, "expected x, found y"))
    bad = faults.settle(2000, "skip")
    assert bad is not None
    assert (bad.num_bad, bad.first) == (1000, "row 0")
    assert sum(1 + len(alike.places) for alike in faults._listed.values()) == 11


def test_the_key_takes_two_words(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"on_bad_row .* should be 'error' or 'skip', found 'ignore'"):
        make(tmp_path, GOOD, on_bad_row="ignore")


def test_the_note_reaches_journal_and_report(tmp_path: Path) -> None:
    task = make(tmp_path, *[GOOD] * 20, *["{"] * 3, on_bad_row="skip", max_steps=1, max_slots=1, report_to="none")
    result = Engine(output_dir=tmp_path / "runs").tune(task)
    run = Path(result.run_dir)
    started = json.loads((run / "journal.jsonl").read_text().split("\n")[0])
    assert started["data"]["bad_rows"] == 3
    assert started["notes"][0].startswith("dataset: 3 of 23 rows left out (on_bad_row: skip): 3 not JSON")
    assert "dataset: 3 of 23 rows left out" in (run / "report.html").read_text()
