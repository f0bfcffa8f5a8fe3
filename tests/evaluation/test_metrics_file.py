"""metrics.json keeps every evaluation, a repeated one once, and everything else in the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alto.errors import RunError, RunWriteError
from alto.evaluation import add_evaluation
from alto.records import Evaluation


def evaluation(**changes: Any) -> Evaluation:
    facts = {
        "dataset": "test.jsonl",
        "num_rows": 4,
        "loss": 1.5,
        "exact_match": 0.25,
        "num_correct": 1,
        "settings": {"weights": "adapter", "limit": None},
        "date": "2026-01-01T00:00:00+00:00",
    }
    return Evaluation(**(facts | changes))


def read(folder: Path) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return metrics


def test_the_file_is_made_where_there_is_none(tmp_path: Path) -> None:
    add_evaluation(tmp_path, evaluation())
    assert read(tmp_path) == {
        "evaluations": [
            {
                "dataset": "test.jsonl",
                "num_rows": 4,
                "loss": 1.5,
                "exact_match": 0.25,
                "num_correct": 1,
                "settings": {"weights": "adapter", "limit": None},
                "date": "2026-01-01T00:00:00+00:00",
                "reward_accuracy": None,
                "reward_margin": None,
                "reward": None,
                "scorer": None,
                "score": None,
                "accuracy": None,
                "macro_f1": None,
                "label_f1": None,
                "confusion": None,
                "mse": None,
                "spearman": None,
            }
        ]
    }
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]


def test_a_repeated_evaluation_replaces_the_older_one(tmp_path: Path) -> None:
    add_evaluation(tmp_path, evaluation())
    add_evaluation(tmp_path, evaluation(dataset="other.jsonl"))
    add_evaluation(tmp_path, evaluation(settings={"weights": "base", "limit": None}))
    add_evaluation(tmp_path, evaluation(loss=1.25))
    found = [(entry["dataset"], entry["settings"]["weights"], entry["loss"]) for entry in read(tmp_path)["evaluations"]]
    assert found == [("other.jsonl", "adapter", 1.5), ("test.jsonl", "base", 1.5), ("test.jsonl", "adapter", 1.25)]


def test_what_else_is_in_the_file_stays(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text('{"job": "job-003", "mine": [1], "evaluations": ["an older form"]}')
    add_evaluation(tmp_path, evaluation())
    metrics = read(tmp_path)
    assert list(metrics) == ["job", "mine", "evaluations"]
    assert metrics["mine"] == [1]
    assert metrics["evaluations"][0] == "an older form"


@pytest.mark.parametrize("content", ["{", "[]", '{"evaluations": {}}'])
def test_a_file_that_is_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    (tmp_path / "metrics.json").write_text(content)
    with pytest.raises(RunError, match=r"metrics.json: expected a JSON object"):
        add_evaluation(tmp_path, evaluation())
    assert (tmp_path / "metrics.json").read_text() == content


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    add_evaluation(tmp_path, evaluation())
    monkeypatch.setattr("alto.evaluation.metrics_file.replace_file", refuse)
    with pytest.raises(RunWriteError, match="No space left on device"):
        add_evaluation(tmp_path, evaluation(loss=0.0))
    assert read(tmp_path)["evaluations"][0]["loss"] == 1.5
