from __future__ import annotations

from typing import Any

import pytest

from alto.errors import ConflictingKeysError, SpecError, UnsupportedError
from alto.records import LabelSet
from alto.spec import Task


def make(**values: Any) -> Task:
    return Task(model="m", dataset="rows.csv", **values)


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ({"task_type": "SEQ_CLS"}, "classification"),
        ({"task_type": "seq_cls", "problem_type": "multi_label_classification"}, "classification"),
        ({"task_type": "SEQ_CLS", "problem_type": "regression"}, "regression"),
        ({"task_type": "SEQ_CLS", "method": "regression"}, "regression"),
        ({"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}, "classification"),
        ({"task_type": "CAUSAL_LM"}, "sft"),
    ],
)
def test_the_task_type_of_peft_names_the_method(given: dict[str, Any], method: str) -> None:
    task = make(**given)
    assert task.method == method
    assert Task(**task.to_dict()) == task


def test_what_peft_saves_beside_the_head_is_kept() -> None:
    task = make(task_type="SEQ_CLS", modules_to_save=["score", "embed_tokens"])
    assert [job.config.modules_to_save for job in task.jobs] == [("embed_tokens",)]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"task_type": "SEQ_CLS", "method": "dpo"}, ConflictingKeysError, "Remove task_type"),
        ({"task_type": "TOKEN_CLS"}, UnsupportedError, "SEQ_CLS"),
        ({"num_labels": 3}, SpecError, "method classification or regression"),
        ({"method": "classification", "problem_type": "regression"}, SpecError, "method: regression"),
        ({"method": "regression", "problem_type": "single_label_classification"}, SpecError, "method: classification"),
        ({"method": "classification", "num_labels": 1}, SpecError, "at least 2"),
        ({"method": "classification", "num_labels": 3, "id2label": ["a", "b"]}, SpecError, "agree"),
        ({"method": "classification", "id2label": ["a", "a"]}, SpecError, "different names"),
        ({"method": "classification", "id2label": {0: "a", 2: "b"}}, SpecError, "labels 0 to K - 1"),
        ({"method": "classification", "id2label": {0: True, 1: False}}, SpecError, "in quotes"),
        ({"method": "classification", "label2id": {"a": 0}}, UnsupportedError, "id2label"),
        ({"method": "classification", "train_on": "all"}, SpecError, "learns labels"),
        ({"method": "classification", "select_by": "eval_accuracy"}, SpecError, "metric: accuracy"),
        ({"method": "classification", "dataset_format": "alpaca"}, SpecError, "text_classification"),
        ({"dataset_format": "text_classification"}, SpecError, "another form"),
        ({"method": "classification", "metric": "pearson"}, SpecError, "regression"),
    ],
)
def test_contradictions_are_refused_with_a_remedy(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words.replace("(", r"\(")):
        make(**given)


def test_names_are_a_list_or_a_mapping_from_indices() -> None:
    for given in (["bad", "good"], {0: "bad", 1: "good"}, {"1": "good", "0": "bad"}):
        assert make(method="classification", id2label=given).id2label == ("bad", "good")


def test_the_labels_that_were_found_are_written_into_the_task() -> None:
    labels = LabelSet(problem_type="single_label_classification", names=("bad", "good"))
    task = make(method="classification", num_labels=2)
    assert task.label_set is None
    resolved = task.with_labels(labels)
    assert resolved.label_set == labels
    assert Task(**resolved.to_dict()).label_set == labels


def test_labels_are_not_in_the_token_cache() -> None:
    for method in ("classification", "regression"):
        with pytest.raises(UnsupportedError, match="token_cache: 'disk' does not support method"):
            Task(model="alto-tiny", dataset="x.jsonl", method=method, token_cache="disk")
