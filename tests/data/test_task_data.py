"""The data of a whole task: its rows, the counts, and the messages to the user."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import load_tokenizer, make_task, write_rows

from alto.data import Pair, TaskData, read_heldout_rows, read_task_rows
from alto.errors import DataError, DataFileNotFoundError, DataFormatError
from alto.spec import Task
from alto.spec.objective_settings import OBJECTIVES, ObjectiveEntry


def encode(task: Task, tokenizer: Any = None, max_length: int | None = None) -> TaskData:
    task = task if max_length is None else task.replace(max_length=max_length)
    return read_task_rows(task).encode(tokenizer or load_tokenizer())


def test_a_validation_dataset_is_taken_as_it_is(tmp_path: Path) -> None:
    task = make_task(tmp_path, max_samples=20)
    data = encode(task)
    assert (len(data.train), len(data.validation)) == (20, 6)
    assert len(read_task_rows(task).train) == 20


def test_without_one_a_share_is_set_aside_by_the_data_seed(tmp_path: Path) -> None:
    tokenizer = load_tokenizer()

    def validation_ids(seed: int) -> list[list[int]]:
        task = Task(dataset=str(write_rows(tmp_path / "rows.jsonl")), model="alto-tiny", data_seed=seed)
        data = encode(task, tokenizer)
        assert (len(data.train), len(data.validation), len(read_task_rows(task).train)) == (22, 2, 22)
        return [ids.tolist() for ids in data.validation.input_ids]

    assert validation_ids(1) == validation_ids(1)
    assert validation_ids(1) != validation_ids(2)


def test_the_rows_set_aside_stay_those_of_the_first_version(tmp_path: Path) -> None:
    task = Task(dataset=str(write_rows(tmp_path / "rows.jsonl")), model="alto-tiny")
    assert [row[0].content for row in read_task_rows(task).validation] == ["3 plus 3?", "20 plus 6?"]


def test_counts_tell_what_was_cut_and_left_out(tmp_path: Path) -> None:
    data = encode(make_task(tmp_path), max_length=20)
    counts = data.counts()
    assert counts["train_rows"] + counts["train_skipped_rows"] == 24
    assert counts["train_tokens"] == sum(ids.numel() for ids in data.train.input_ids)
    assert 0 < counts["train_truncated_rows"] <= 24
    assert counts["validation_trained_tokens"] == sum(int((row >= 0).sum()) for row in data.validation.targets)
    assert any(f"{counts['train_truncated_rows']} of 24 training rows" in note for note in data.notes)


def test_a_missing_file_is_found_before_any_work(tmp_path: Path) -> None:
    task = make_task(tmp_path, validation_dataset=str(tmp_path / "absent.jsonl"))
    with pytest.raises(DataFileNotFoundError, match=r"validation_dataset: .*absent\.jsonl"):
        read_task_rows(task)


def test_nothing_is_noted_on_good_data(tmp_path: Path) -> None:
    assert (
        encode(make_task(tmp_path, validation_dataset=str(write_rows(tmp_path / "v.jsonl", 10, first=200)))).notes == ()
    )


def test_rows_in_both_splits_are_counted(tmp_path: Path) -> None:
    data = encode(make_task(tmp_path, validation_dataset=str(write_rows(tmp_path / "v.jsonl", 12, first=20))))
    assert data.counts()["shared_rows"] == 4
    [note] = data.notes
    assert note.startswith("4 validation rows of 12 also in the training data")


def test_test_rows_in_the_other_splits_are_counted(tmp_path: Path) -> None:
    others = {
        "validation_dataset": str(write_rows(tmp_path / "v.jsonl", 12, first=200)),
        "test_dataset": str(write_rows(tmp_path / "t.jsonl", 15, first=21)),
    }
    data = encode(make_task(tmp_path, **others))
    assert (data.counts()["shared_rows"], data.counts()["shared_test_rows"]) == (0, 3)
    [note] = data.notes
    assert note.startswith("3 test rows of 15 also in the training or validation data")


def test_few_validation_rows_are_noted(tmp_path: Path) -> None:
    [note] = encode(make_task(tmp_path)).notes
    assert note.startswith("The validation data is only 6 rows")


def test_rows_left_out_are_noted_by_their_reason(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
    masked = good.replace('"content": "a"', '"content": "a", "weight": 0')
    path.write_text(good * 12 + masked * 3 + good.replace('"q"', f'"{"long " * 90}"'), encoding="utf-8")
    task = Task(model="alto-tiny", dataset=str(path), validation_dataset=str(write_rows(tmp_path / "v.jsonl")))
    assert encode(task, max_length=50).notes == (
        "1 of 16 training rows (6.2%) cut at max_length 50.",
        "1 of 16 training rows left out: no trained token within max_length 50.",
        "3 of 16 training rows left out: no trained token in them.",
    )


def test_rows_unrolled_into_replies_are_noted(tmp_path: Path) -> None:
    tokenizer = load_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.role == 'assistant' %}(hm){% endif %}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    conversation = json.dumps({"messages": turns}) + "\n"
    path = tmp_path / "rows.jsonl"
    path.write_text(conversation * 12, encoding="utf-8")
    task = Task(model="alto-tiny", dataset=str(path), validation_dataset=str(write_rows(tmp_path / "v.jsonl")))
    data = encode(task, tokenizer)
    assert data.counts()["train_unrolled_rows"] == 12
    [note] = data.notes
    assert note.startswith("12 training rows with several replies trained one reply at a time")
    assert note.endswith("So there are 24 examples.")


def test_a_tokenizer_without_a_template_is_noted(tmp_path: Path) -> None:
    tokenizer = load_tokenizer()
    tokenizer.chat_template = None
    notes = encode(make_task(tmp_path), tokenizer).notes
    assert any(note.startswith("The tokenizer has no chat template") for note in notes)


def test_a_tokenizer_without_eos_is_refused_unless_the_template_ends_replies(tmp_path: Path) -> None:
    tokenizer = load_tokenizer()
    tokenizer.eos_token = None
    notes = encode(make_task(tmp_path), tokenizer).notes
    assert any("replies end with the template's '<|end|>'" in note for note in notes)
    for template in (None, "{% for m in messages %}{{ m.content }} {% endfor %}"):
        tokenizer.chat_template = template
        with pytest.raises(DataError, match="would never learn to stop; set eos_token"):
            encode(make_task(tmp_path), tokenizer)


def test_one_row_cannot_be_split(tmp_path: Path) -> None:
    task = Task(model="alto-tiny", dataset=str(write_rows(tmp_path / "rows.jsonl", 1)))
    with pytest.raises(DataError, match="validation_split: expected at least 2 rows to split, found 1"):
        read_task_rows(task)


def write_pairs(path: Path, *pairs: tuple[str, str, str]) -> str:
    rows = [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def good_pairs(count: int, first: int = 0) -> list[tuple[str, str, str]]:
    return [(f"question {n}", f"yes {n}", f"no {n}") for n in range(first, first + count)]


def test_pairs_are_read_split_and_counted(tmp_path: Path) -> None:
    pairs = [*good_pairs(40), ("long " * 40, "yes", "no")]
    task = Task(
        model="alto-tiny",
        method="dpo",
        dataset=write_pairs(tmp_path / "train.jsonl", *pairs),
        validation_dataset=write_pairs(tmp_path / "validation.jsonl", *good_pairs(12, first=38)),
        max_length=30,
    )
    data = encode(task)
    assert (data.train.is_paired, data.validation.is_paired) == (True, True)
    counts = data.counts()
    assert (counts["train_rows"], counts["train_skipped_rows"], counts["train_alike_rows"]) == (40, 1, 0)
    assert (counts["train_masked_rows"], counts["train_truncated_rows"], counts["shared_rows"]) == (0, 1, 2)
    assert data.notes == (
        "2 validation rows of 12 also in the training data: the validation loss looks better than it is, and "
        "overfitting is seen late.",
        "1 of 41 training pairs (2.4%) cut at max_length 30.",
        "1 of 41 training pairs left out: no part in which the replies differ is within max_length 30.",
    )


def test_pairs_are_split_like_rows(tmp_path: Path) -> None:
    task = Task(model="alto-tiny", method="orpo", dataset=write_pairs(tmp_path / "pairs.jsonl", *good_pairs(20)))
    rows = read_task_rows(task)
    assert (len(rows.train), len(rows.validation), rows.layout.form) == (18, 2, "preference")


@pytest.mark.parametrize("method", ["dpo", "orpo"])
def test_rows_with_one_reply_are_refused_for_pairs_before_a_model_is_asked(tmp_path: Path, method: str) -> None:
    with pytest.raises(DataFormatError) as caught:
        read_task_rows(make_task(tmp_path, method=method))
    assert str(caught.value) == (
        f"dataset: expected preference pairs for method {method}, found rows with one reply (prompt_completion "
        "(prompt, completion)); set method: sft, or name the columns of the pairs with columns: {prompt: <its "
        "column>, chosen: <its column>, rejected: <its column>}"
    )


def test_pairs_are_refused_for_supervised_fine_tuning_even_where_their_rows_are_broken(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"chosen": 7, "rejected": "b"}\n' * 3, encoding="utf-8")
    with pytest.raises(DataFormatError) as caught:
        read_task_rows(Task(model="alto-tiny", dataset=str(path)))
    assert str(caught.value) == (
        "dataset: expected rows with one reply for method sft, found preference pairs (preference (chosen, rejected)); "
        "learn from them with method: dpo; or train on the chosen replies with columns: {completion: chosen}"
    )


def test_the_validation_rows_have_to_be_of_the_same_kind(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl", *good_pairs(12))
    with pytest.raises(DataFormatError, match=r"^validation_dataset: expected preference pairs for method dpo"):
        read_task_rows(make_task(tmp_path, method="dpo", dataset=pairs))
    with pytest.raises(DataFormatError, match=r"^validation_dataset: expected rows with one reply for method sft"):
        read_task_rows(make_task(tmp_path, validation_dataset=pairs))


def test_an_adapter_may_be_judged_on_rows_of_the_other_kind(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl", *good_pairs(12))
    task = make_task(tmp_path)
    assert all(isinstance(row, Pair) for row in read_heldout_rows(task, pairs).rows)
    preferring = task.replace(method="dpo", dataset=pairs, validation_dataset=pairs)
    assert not any(isinstance(row, Pair) for row in read_heldout_rows(preferring, task.dataset).rows)


@pytest.fixture
def simpo(monkeypatch: pytest.MonkeyPatch) -> str:
    objectives = replace(OBJECTIVES, own={**OBJECTIVES.own, "simpo": ObjectiveEntry(implementation="simpo:SimPO")})
    monkeypatch.setattr("alto.spec.method.OBJECTIVES", objectives)
    return "simpo"


def test_a_packages_method_takes_either_kind_of_rows_but_not_both(tmp_path: Path, simpo: str) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl", *good_pairs(12))
    task = make_task(tmp_path, method=simpo)
    assert not read_task_rows(task).layout.is_paired
    assert read_task_rows(task.replace(dataset=pairs, validation_dataset=pairs)).layout.is_paired
    with pytest.raises(DataFormatError, match=r"^validation_dataset: expected rows with one reply for method simpo"):
        read_task_rows(task.replace(validation_dataset=pairs))
