"""Replies with labels: read, made from pairs, encoded; and prompts with the replies of other rows."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import load_tokenizer

from alto.data import (
    Conversation,
    EncodedDataset,
    JobRows,
    TaskData,
    collate,
    digest_of,
    mismatched_rows,
    read_heldout_rows,
    read_task_rows,
)
from alto.errors import DataError, DataFormatError, SpecError
from alto.objectives import find_objective
from alto.spec import Task


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def labelled_rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{n} plus 1?", "completion": f" {n + 1 + n % 2}.", "label": n % 2 == 0} for n in range(count)]


def pairs(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{n} plus 1?", "chosen": f" {n + 1}.", "rejected": f" {n + 2}."} for n in range(count)]


def make_task(path: Path, rows: list[dict[str, Any]], **changes: Any) -> Task:
    return Task(model="alto-tiny", dataset=write(path / "rows.jsonl", rows), **{"method": "kto", **changes})


def encode(task: Task) -> TaskData:
    return read_task_rows(task).encode(load_tokenizer())


def test_labels_are_read_beside_replies(tmp_path: Path) -> None:
    rows = read_task_rows(make_task(tmp_path, labelled_rows(20)))
    assert rows.layout.form == "unpaired_preference"
    assert not rows.unread_columns
    found = {turns[0].content: turns.is_desirable for turns in [*rows.train, *rows.validation]}  # type: ignore[union-attr]
    assert found == {row["prompt"]: row["label"] for row in labelled_rows(20)}
    data = encode(make_task(tmp_path, labelled_rows(20), validation_split=0.5))
    assert data.train.weights == (1,) * 10
    plain = encode(make_task(tmp_path, labelled_rows(20), validation_split=0.5, method="sft"))
    assert [ids.tolist() for ids in plain.train.input_ids] == [ids.tolist() for ids in data.train.input_ids]
    assert plain.train.labels is None
    assert digest_of(plain.train) != digest_of(data.train)
    assert digest_of(data.train) != digest_of(replace(data.train, labels=(True,) * 10))


def test_pairs_become_two_labelled_rows_on_one_side_of_a_split(tmp_path: Path) -> None:
    rows = read_task_rows(make_task(tmp_path, pairs(20), validation_split=0.3, test_split=0.1))
    assert (len(rows.train), len(rows.validation), len(rows.test or ())) == (24, 12, 4)
    for part in (rows.train, rows.validation, rows.test or []):
        assert all(row.is_desirable is not None for row in part)  # type: ignore[union-attr]
        assert [row.is_desirable for row in part] == [True, False] * (len(part) // 2)  # type: ignore[union-attr]
        assert all(first[0] == second[0] for first, second in zip(part[::2], part[1::2], strict=True))  # type: ignore[index]


def test_messages_as_prompt_and_completion(tmp_path: Path) -> None:
    row = {
        "prompt": [{"role": "user", "content": "1 plus 1?"}],
        "completion": [{"role": "assistant", "content": "2"}],
        "label": 1,
    }
    (first, *_) = read_task_rows(make_task(tmp_path, [row] * 4)).train
    assert [turn.content for turn in first] == ["1 plus 1?", "2"]  # type: ignore[union-attr]
    assert pickle.loads(pickle.dumps(first)) == first
    assert first != first.labelled(False)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "keys", [("messages", "role", "content", "user", "assistant"), ("conversations", "from", "value", "human", "gpt")]
)
def test_a_conversation_ends_with_the_labelled_reply(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """Earlier replies belong to the prompt and are not trained."""
    column, role, says, user, assistant = keys
    plain, talks = [], []
    for n in range(8):
        turns = [("user", f"{n}?"), ("assistant", "Plus 1?"), ("user", "Yes."), ("assistant", f"{n + 1}.")]
        messages = [{"role": who, "content": text} for who, text in turns]
        plain.append({"prompt": messages[:-1], "completion": messages[-1:], "label": n % 2 == 0})
        named = [{role: user if who == "user" else assistant, says: text} for who, text in turns]
        talks.append({column: named, "label": n % 2 == 0})
    (tmp_path / "plain").mkdir()
    expected, found = encode(make_task(tmp_path / "plain", plain)), encode(make_task(tmp_path, talks))
    assert read_task_rows(make_task(tmp_path, talks)).layout.form == "unpaired_preference"
    assert digest_of(found.train) == digest_of(expected.train)
    assert digest_of(found.validation) == digest_of(expected.validation)
    named_columns = [{"talk": row[column], "good": row["label"], "label": 3} for row in talks]
    renamed = make_task(tmp_path, named_columns, columns={"messages": "talk", "label": "good"})
    assert digest_of(encode(renamed).train) == digest_of(expected.train)


def test_prompt_and_completion_win_over_a_conversation(tmp_path: Path) -> None:
    rows = [{**row, "messages": [{"role": "user", "content": "other"}]} for row in labelled_rows(8)]
    assert read_task_rows(make_task(tmp_path, rows)).layout.column("prompt") == "prompt"


def test_a_conversation_without_a_last_reply_is_refused(tmp_path: Path) -> None:
    messages = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(DataFormatError, match="expected messages to end with the reply that the label is about"):
        read_task_rows(make_task(tmp_path, [{"messages": messages, "label": True}] * 4))


@pytest.mark.parametrize("label", [None, "yes", 2, 0.5])
def test_an_invalid_label_is_refused(tmp_path: Path, label: object) -> None:
    rows = [*labelled_rows(4), {"prompt": "a", "completion": "b", "label": label}]
    with pytest.raises(DataFormatError, match=r"rows.jsonl:5: expected label to be true .* or false, found"):
        read_task_rows(make_task(tmp_path, rows))


def test_rows_without_labels_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}] * 4
    with pytest.raises(DataFormatError, match=r"unpaired_preference \(prompt, completion, label\)"):
        read_task_rows(make_task(tmp_path, rows))
    with pytest.raises(DataError, match="method kto: expected replies with labels"):
        find_objective("kto").check(encode(make_task(tmp_path, rows, method="sft")).train, [])


def test_labels_that_are_all_alike_are_refused(tmp_path: Path) -> None:
    data = encode(make_task(tmp_path, [{**row, "label": False} for row in labelled_rows(8)]))
    with pytest.raises(DataError, match="expected both desirable and undesirable replies, found 7 that are all undes"):
        find_objective("kto").check(data.train, [])


def test_an_adapter_is_measured_on_desirable_replies(tmp_path: Path) -> None:
    rows = read_heldout_rows(make_task(tmp_path, pairs(20)), write(tmp_path / "other.jsonl", labelled_rows(6))).rows
    assert [row[-1].content for row in rows] == [" 1.", " 3.", " 5."]  # type: ignore[index]
    assert all(row.is_desirable is None for row in rows)  # type: ignore[union-attr]


def test_an_adapter_is_measured_on_desirable_replies_of_its_own_rows_too(tmp_path: Path) -> None:
    task = make_task(tmp_path, pairs(20))
    found = read_heldout_rows(task, None).rows
    validation = [row for row in read_task_rows(task).validation if isinstance(row, Conversation)]
    assert all(row.is_desirable is not None for row in validation)
    assert found == [row.labelled(None) for row in validation if row.is_desirable]
    assert len(found) == 2


def test_answers_are_not_scored_and_one_row_makes_no_estimate(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="select_by should be 'metric' with method 'kto', whose validation rows"):
        make_task(tmp_path, labelled_rows(4), select_by="eval_accuracy")
    with pytest.raises(SpecError, match="per_device_train_batch_size should be above 1 with loss_type 'kto', found 1"):
        make_task(tmp_path, labelled_rows(4), batch_size=1).jobs  # noqa: B018
    assert make_task(tmp_path, labelled_rows(4), batch_size=1, loss_type="apo_zero_unpaired").jobs


def dataset(*rows: tuple[list[int], list[int]], **settings: Any) -> EncodedDataset:
    input_ids = tuple(torch.tensor(prompt + reply) for prompt, reply in rows)
    targets = tuple(torch.tensor([-100] * (len(prompt) - 1) + reply + [-100]) for prompt, reply in rows)
    return EncodedDataset(input_ids=input_ids, targets=targets, **settings)


def test_every_prompt_gets_the_reply_of_the_row_before() -> None:
    rows = dataset(([1], [2, 3]), ([4, 5, 6], [7]), ([8, 9], [10, 11, 12]), labels=(True, False, True))
    found = mismatched_rows(rows, (2, 0, 1))
    wanted = dataset(([8, 9], [7]), ([1], [10, 11, 12]), ([4, 5, 6], [2, 3]))
    for first, second in ((found.input_ids, wanted.input_ids), (found.targets, wanted.targets)):
        assert [row.tolist() for row in first] == [row.tolist() for row in second]
    assert found.weights == (1, 1, 1)


def test_a_row_is_cut_where_the_rows_of_its_dataset_were() -> None:
    rows = dataset(([1, 2, 3, 4], [5]), ([6], [7, 8, 9, 10]), labels=(True, False), max_length=5)
    found = mismatched_rows(rows, (0, 1))
    assert [row.tolist() for row in found.input_ids] == [[1, 2, 3, 4, 7], [6, 5]]
    assert [row.tolist() for row in found.targets] == [[-100, -100, -100, 7, -100], [5, -100]]


def test_a_batch_counts_desirable_rows_of_the_whole_batch() -> None:
    rows = dataset(*[([1], [2])] * 6, labels=(True, False, False, True, True, False))
    parts = [*JobRows(rows, 0, (0, 1, 2)).single_rows()]
    batch = collate([parts[2], JobRows(rows, 1, (3, 5, 4))])
    assert (batch.job_desirable, batch.row_labels) == ((1, 2), (False, True, False, True))
    assert batch.part(1, 2).row_labels == (True, False, True)
    assert (batch.job_weights, batch.part(1, 2).job_desirable) == ((3, 3), (2,))
