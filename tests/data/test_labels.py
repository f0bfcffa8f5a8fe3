"""Texts with labels: their forms, the valid labels, and their tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import load_tokenizer

from alto.data import TaskRows, read_task_rows, reading
from alto.data.messages import LabelledText
from alto.errors import BadRowsError, DataFormatError
from alto.records import ModelLimits
from alto.spec import Task


def read(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> TaskRows:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    keys = {"method": "classification", "validation_split": 0.5} | settings
    return read_task_rows(Task(model="m", dataset=str(path), **keys))


def labels_of(found: TaskRows) -> dict[str, Any]:
    rows = [row for row in (*found.train, *found.validation) if isinstance(row, LabelledText)]
    return {str(row.text): row.label for row in rows}


def rows_of(*labels: Any) -> list[dict[str, Any]]:
    return [{"text": f"text {index}", "label": label} for index, label in enumerate(labels)]


@pytest.mark.parametrize(
    ("labels", "settings", "names", "expected"),
    [
        (["pos", "neg", "pos", "neg"], {}, ("neg", "pos"), [1, 0, 1, 0]),
        ([1, 0, 2, 0], {}, ("LABEL_0", "LABEL_1", "LABEL_2"), [1, 0, 2, 0]),
        (["1", "0", "2", "0"], {}, ("LABEL_0", "LABEL_1", "LABEL_2"), [1, 0, 2, 0]),
        ([1, 0, 1, 0], {"id2label": ["bad", "good"]}, ("bad", "good"), [1, 0, 1, 0]),
        (["good", "bad"], {"id2label": {0: "bad", 1: "good"}}, ("bad", "good"), [1, 0]),
        ([True, False], {}, ("false", "true"), [1, 0]),
        ([1, 0], {"num_labels": 4}, tuple(f"LABEL_{index}" for index in range(4)), [1, 0]),
        (["1", "one"], {}, ("1", "one"), [0, 1]),
        # Label names may look like numbers.
        ([5, 1], {"id2label": ["1", "5"]}, ("1", "5"), [1, 0]),
        ([["a", "b"], [], ["b"]], {}, ("a", "b"), [(1.0, 1.0), (0.0, 0.0), (0.0, 1.0)]),
        ([[1, 0, 1], [0, 0, 0.0]], {}, ("LABEL_0", "LABEL_1", "LABEL_2"), [(1.0, 0.0, 1.0), (0.0, 0.0, 0.0)]),
        ([0.5, "2", 3], {"method": "regression"}, ("LABEL_0",), [(0.5,), (2.0,), (3.0,)]),
        ([[0.5, 1], [2, 3]], {"method": "regression"}, ("LABEL_0", "LABEL_1"), [(0.5, 1.0), (2.0, 3.0)]),
    ],
)
def test_labels_are_names_indices_lists_or_numbers(
    tmp_path: Path, labels: list[Any], settings: dict[str, Any], names: tuple[str, ...], expected: list[Any]
) -> None:
    found = read(tmp_path, rows_of(*labels), **settings)
    assert found.labels is not None
    assert found.labels.labels.names == names
    assert labels_of(found) == {f"text {index}": label for index, label in enumerate(expected)}


@pytest.mark.parametrize(
    ("labels", "settings", "words"),
    [
        ([1, 2, 3], {}, "num_labels if some do not occur"),
        ([0.5, 1.5], {}, "method: regression"),
        (["a", "a"], {}, "at least two"),
        (["a", "b", "c"], {"num_labels": 2}, "num_labels"),
        ([None, ""], {}, "found none"),
    ],
)
def test_labels_of_another_kind_are_refused(
    tmp_path: Path, labels: list[Any], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataFormatError, match=words):
        read(tmp_path, rows_of(*labels), **settings)


@pytest.mark.parametrize(
    ("labels", "settings", "kind"),
    [
        (["a", "b", None], {}, "without a label"),
        (["a", "b", ""], {}, "without a label"),
        (["a", "b", "c"], {"id2label": ["a", "b"]}, "with a label that is not among the others"),
        ([0, 1, -1], {}, "with a label that is not among the others"),
        ([0, 1, 7], {"num_labels": 3}, "with a label that is not among the others"),
        (["a", "b", 1], {}, "with a label that is not among the others"),
        (["a", "b", ["a"]], {"problem_type": "single_label_classification"}, "with a value of the wrong kind"),
        ([[1, 0], [0, 1], [1, 1, 1]], {}, "with a value of the wrong kind"),
        ([1.5, 2.5, "many"], {"method": "regression"}, "with a value of the wrong kind"),
    ],
)
def test_a_row_without_a_known_label_is_a_bad_row(
    tmp_path: Path, labels: list[Any], settings: dict[str, Any], kind: str
) -> None:
    with pytest.raises(BadRowsError, match=r"rows\.jsonl:3"):
        read(tmp_path, rows_of(*labels), **settings)
    found = read(tmp_path, rows_of(*labels), on_bad_row="skip", **settings)
    assert len(labels_of(found)) == 2
    assert [str(fault) for bad in found.bad_rows for fault in bad.kinds] == [kind]


def test_validation_rows_have_the_labels_of_the_training_rows(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "x", "label": "b"}\n{"text": "y", "label": "new"}\n', encoding="utf-8")
    settings = {"validation_split": None, "validation_dataset": str(other)}
    with pytest.raises(BadRowsError, match=r"other\.jsonl:2.*expected label to be one of a, b, found 'new'"):
        read(tmp_path, rows_of("a", "b"), **settings)
    found = read(tmp_path, rows_of("a", "b"), on_bad_row="skip", **settings)
    assert [row.label for row in found.validation if isinstance(row, LabelledText)] == [1]


@pytest.mark.parametrize(
    ("row", "settings", "texts"),
    [
        ({"sentence": "a", "label": 0}, {}, ("a", None)),
        ({"sentence1": "a", "sentence2": "b", "label": 0}, {}, ("a", "b")),
        ({"question": "a", "sentence": "b", "label": 0}, {}, ("a", "b")),
        ({"review": "a", "stars": 0}, {"columns": {"text": "review", "label": "stars"}}, ("a", None)),
        # If only the first text is named, the second is ignored.
        ({"sentence1": "a", "sentence2": "b", "label": 0}, {"columns": {"text": "sentence1"}}, ("a", None)),
        ({"text": "a", "labels": [0.0, 1.0]}, {}, ("a", None)),
    ],
)
def test_texts_are_in_the_columns_of_known_data_sets(
    tmp_path: Path, row: dict[str, Any], settings: dict[str, Any], texts: tuple[str, str | None]
) -> None:
    other = {key: {0: 1}.get(value, value) if isinstance(value, int) else value for key, value in row.items()}
    found = read(tmp_path, [row, other, row, other], **settings)
    first = found.train[0]
    assert isinstance(first, LabelledText)
    assert (first.text, first.text_pair) == texts


def test_a_row_without_a_text_is_a_bad_row(tmp_path: Path) -> None:
    rows = [*rows_of("a", "b"), {"text": " ", "label": "a"}]
    with pytest.raises(BadRowsError, match="expected a text"):
        read(tmp_path, rows)


def test_tokens_equal_those_of_transformers_and_the_last_one_before_padding_is_read(tmp_path: Path) -> None:
    tokenizer = load_tokenizer()
    rows = [{"text": "a text", "text_pair": "and another one", "label": name} for name in ("a", "b")]
    found = read(tmp_path, rows, max_length=4).encode(tokenizer)
    for split in (found.train, found.validation):
        expected = tokenizer("a text", "and another one", truncation=True, max_length=4)["input_ids"]
        assert split.input_ids[0].tolist() == expected
        assert split.num_truncated == 1
        assert split.targets[0].tolist() == [-100] * 3 + [0]
        assert split.weights == (1,)
    padded = read(tmp_path, rows, max_length=4).encode(tokenizer, ModelLimits(pad_token_id=expected[-1]))
    (position,) = (padded.train.targets[0] == 0).nonzero().flatten().tolist()
    last = [token != expected[-1] for token in expected]
    assert position == max(index for index, is_text in enumerate(last) if is_text)


def test_a_conversation_is_written_by_the_chat_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer()
    turns = [{"role": "user", "content": "Is it good?"}, {"role": "assistant", "content": "Yes."}]
    found = read(tmp_path, [{"messages": turns, "label": name} for name in ("a", "b")]).encode(tokenizer)
    expected = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"]
    assert found.train.input_ids[0].tolist() == expected
    assert found.notes[0].startswith("Labels and their training and validation rows: ")


def test_a_note_counts_the_rows_of_each_label_and_names_labels_with_few_validation_rows(tmp_path: Path) -> None:
    validation = tmp_path / "validation.jsonl"
    labels = ["a"] * 12 + ["b"] * 10 + ["c"] * 9
    validation.write_text("".join(json.dumps(row) + "\n" for row in rows_of(*labels)), encoding="utf-8")
    rows = rows_of("a", "a", "b", "c", "d")
    other = {"validation_split": None, "validation_dataset": str(validation)}
    found = read(tmp_path, rows, **other).encode(load_tokenizer())
    counts = "Labels and their training and validation rows: a (2 and 12), b (1 and 10), c (1 and 9), d (1 and 0)."
    assert found.notes[0] == f"{counts} F1 rests on fewer than ten validation rows for c."
    assert found.notes[1] == "No validation row has the label d."


def test_labels_of_large_data_are_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))
    rows = rows_of("a", "b", "a", "b")
    expected = read(tmp_path, rows).encode(load_tokenizer())
    monkeypatch.setattr(reading, "LARGE_BYTES", 0)
    found = read(tmp_path, rows).encode(load_tokenizer())
    assert found.train.classes == expected.train.classes
    assert found.notes == expected.notes
    assert not (tmp_path / "cache").exists()


def test_a_row_that_is_trained_and_validated_on_is_counted_with_its_label(tmp_path: Path) -> None:
    train = [{"text": "one", "label": "a"}, {"text": "two", "label": "b"}, {"text": "three", "label": "a"}]
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(train[0]) + "\n" + json.dumps({"text": "two", "label": "a"}) + "\n")
    found = read(tmp_path, train, validation_split=None, validation_dataset=str(other))
    assert found.encode(load_tokenizer()).num_repeated == 1
