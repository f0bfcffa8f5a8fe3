"""Graders of answers: the graders that requests may name, and how they choose the winner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from services import ROWS, Served, local_plane, served
from sqlalchemy import select

from alto.runs.history import read_history
from alto.service.store.tables import JobRow

CHECK = {
    "type": "string_check",
    "name": "right",
    "input": "{{ sample.output_text }}",
    "reference": "{{item.reference}}",
}
SIMILARITY = {
    "type": "text_similarity",
    "name": "near",
    "input": "{{sample.output_text}}",
    "reference": "{{ item.reference }}",
    "evaluation_metric": "rouge_l",
}
TRAINED = {"n_epochs": 1, "learning_rate": [1e-3, 5e-3], "r": 4, "batch_size": 4}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("graders")) as found:
        yield found


def created(service: Served, select_by: Any, **more: Any) -> Any:
    client = service.client()
    method: Any = {"type": "supervised", "supervised": {"hyperparameters": TRAINED | {"select_by": select_by, **more}}}
    job = client.fine_tuning.jobs.create(model="alto-tiny", training_file=service.upload(client), method=method)
    with service.service.store.reading() as session:
        return session.scalars(select(JobRow).where(JobRow.id == job.id)).one().task


@pytest.mark.parametrize(
    ("grader", "scoring"),
    [
        (CHECK | {"operation": "eq"}, {"scorer": "exact"}),
        (CHECK | {"operation": "like"}, {"scorer": "contains"}),
        (CHECK | {"operation": "ilike"}, {"scorer": "contains", "ignore_case": True}),
        ({"scorer": "json", "keys": ["total"]}, {"scorer": "json", "keys": ["total"]}),
        ({"scorer": "tool_call"}, {"scorer": "tool_call"}),
        ({"scorer": "numeric", "tolerance": 0.5}, {"scorer": "numeric", "tolerance": 0.5}),
        ({"scorer": "format", "tags": ["a"]}, {"scorer": "format", "tags": ["a"]}),
        ({"type": "numeric", "tolerance": 0.5}, {"scorer": "numeric", "tolerance": 0.5}),
        (SIMILARITY, {"scorer": "similarity", "measure": "rouge_l"}),
        ("eval_accuracy", "eval_accuracy"),
    ],
)
def test_a_grader_of_a_request_is_what_chooses_in_its_task(service: Served, grader: Any, scoring: Any) -> None:
    task = created(service, grader, num_finalists=2)
    assert (task["select_by"], task["num_finalists"]) == (scoring, 2)


BAD = [
    (CHECK | {"operation": "ne"}, "expected eq or like or ilike, found 'ne'"),
    (CHECK, "operation: expected eq or ne or like or ilike, found None"),
    (CHECK | {"operation": ["eq"]}, "expected eq or ne or like or ilike"),
    (CHECK | {"operation": "eq", "input": "{{item.answer}}"}, "input: expected '{{sample.output_text}}'"),
    (CHECK | {"operation": "eq", "reference": "{{item.answer}}"}, "reference: expected '{{item.reference}}'"),
    (CHECK | {"operation": "eq", "url": "http://localhost:1/"}, "found 'url'; remove it"),
    *(({"type": kind}, f"similarity, found '{kind}'; {why}")
      for kind, why in (("python", "this service runs no code of requests"), ("http", "this service contacts no"),
                        ("score_model", "this service asks no model"), ("label_model", "this service asks no model"),
                        ("regex", "a pattern may never stop"), ("multi", "use one of these"))),
    ({"type": ["string_check"]}, "select_by.type: expected string_check or text_similarity or exact"),
    (SIMILARITY | {"evaluation_metric": "bleu"}, "evaluation_metric: expected fuzzy_match or rouge_1"),
    ({"type": "numeric", "url": "http://localhost:1/"}, "found 'url'; remove it"),
    *(({"scorer": kind, **more}, f"found '{kind}'; use one of these")
      for kind, more in (("regex", {"pattern": "(a+)+$"}), ("python", {"function": "os:system"}),
                         ("http", {"url": "http://localhost:1/"}))),
    ({"scorer": "exact", "url": "http://localhost:1/"}, "found 'url'; remove it"),
    ({"Scorer": "exact"}, "select_by.scorer: expected exact"),
    ({"scorer": ["exact"]}, "select_by.scorer: expected exact"),
    ({}, "select_by.scorer: expected exact"),
]  # fmt: skip


@pytest.mark.parametrize(("grader", "message"), BAD)
def test_other_graders_are_refused_by_name(service: Served, grader: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        created(service, grader)
    error: Any = caught.value.body
    assert message in error["message"]
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error", "select_by", "unsupported_grader",
    )  # fmt: skip


@pytest.mark.parametrize("value", ["os:system", ["http://localhost:1/"], 1, {"scorer": "exact", "tolerance": 1}])
def test_what_is_no_grader_is_refused(service: Served, value: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="select_by"):
        created(service, value)


def test_a_grader_is_checked_by_itself(service: Served) -> None:
    url = f"{service.url}/v1/fine_tuning/alpha/graders/validate"
    grader = CHECK | {"operation": "eq"}
    answer = httpx2.post(url, json={"grader": grader})
    assert (answer.status_code, answer.json()) == (200, {"grader": grader})
    for bad in (
        CHECK | {"operation": "is"},
        {"scorer": "regex", "pattern": "a"},
        {"scorer": "json", "keys": []},
        {"type": "json", "keys": []},
        {"type": "python", "name": "f", "source": "def grade(sample, item):\n    return 1.0"},
    ):
        assert httpx2.post(url, json={"grader": bad}).status_code == 400
    assert httpx2.post(f"{service.url}/v1/fine_tuning/alpha/graders/run", json={}).status_code == 400


@pytest.mark.slow("queues")
def test_answers_choose_the_model_of_a_job(tmp_path: Path) -> None:
    with served(tmp_path, open_plane=local_plane(tmp_path)) as service:
        client = service.client()
        hyperparameters = TRAINED | {
            "select_by": {**CHECK, "operation": "like"},
            "num_finalists": 2,
            "early_exit": False,
        }
        method: Any = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
        file = service.upload(client, ROWS)
        job = client.fine_tuning.jobs.create(model="alto-tiny", training_file=file, method=method)
        found = service.finished(client, job.id)
        assert found.status == "succeeded", found.error
        (journal,) = (one for one in tmp_path.rglob("journal.jsonl") if '"finalists_judged"' in one.read_text())
        history = read_history(journal.parent)
    assert len(history.finalists) == 2
    assert history.scorer == "contains"
    assert history.scorer_failure == ""
