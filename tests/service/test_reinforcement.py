"""OpenAI's method ``reinforcement``: graders as rewards, its hyperparameters, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from services import ROWS, Served, local_plane, served
from sqlalchemy import select

from alto.errors import SpecError
from alto.runs.history import read_history
from alto.service.settings import ServiceSettings
from alto.service.store.tables import JobRow

CHECK = {
    "type": "string_check",
    "name": "right",
    "operation": "eq",
    "input": "{{ sample.output_text }}",
    "reference": "{{item.reference}}",
}
NEAR = {
    "type": "text_similarity",
    "name": "near",
    "input": "{{sample.output_text}}",
    "reference": "{{item.reference}}",
    "evaluation_metric": "fuzzy_match",
}
NUMBER = {"type": "numeric", "name": "number", "tolerance": 0.5}
FIXED = {"n_epochs": 1, "learning_rate": 1e-3, "r": 4}
EXACT, SIMILAR = {"scorer": "exact"}, {"scorer": "similarity", "measure": "fuzzy_match"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("reinforcement")) as found:
        yield found


def create(service: Served, grader: Any, file: bytes = ROWS, **hyperparameters: Any) -> Any:
    client = service.client()
    method: Any = {
        "type": "reinforcement",
        "reinforcement": {"grader": grader, "hyperparameters": {**FIXED, **hyperparameters}},
    }
    uploaded = service.upload(client, file)
    return client.fine_tuning.jobs.create(model="alto-tiny", training_file=uploaded, method=method)


def task_of(service: Served, grader: Any, **hyperparameters: Any) -> Any:
    job = create(service, grader, **hyperparameters)
    with service.service.store.reading() as session:
        return session.scalars(select(JobRow).where(JobRow.id == job.id)).one().task


def multi(formula: str, **graders: Any) -> dict[str, Any]:
    return {"type": "multi", "name": "both", "graders": graders, "calculate_output": formula}


@pytest.mark.parametrize(
    ("grader", "rewards", "weights"),
    [
        (CHECK, [EXACT], [1.0]),
        (CHECK | {"operation": "ne"}, [EXACT], [-1.0]),
        (CHECK | {"operation": "ilike"}, [{"scorer": "contains", "ignore_case": True}], [1.0]),
        (NEAR, [SIMILAR], [1.0]),
        (NUMBER, [{"scorer": "numeric", "tolerance": 0.5}], [1.0]),
        ({"type": "format", "tags": ["a", "b"]}, [{"scorer": "format", "tags": ["a", "b"]}], [1.0]),
        ({"type": "json", "keys": ["x"]}, [{"scorer": "json", "keys": ["x"]}], [1.0]),
        ({"type": "tool_call"}, [{"scorer": "tool_call"}], [1.0]),
        (multi("a", a=CHECK), [EXACT], [1.0]),
        (multi("a * 0.5 + b", a=CHECK, b=NEAR), [EXACT, SIMILAR], [0.5, 1.0]),
        (multi("(2 * a - b) / 4", a=CHECK, b=NEAR), [EXACT, SIMILAR], [0.5, -0.25]),
        (multi("-(a - 3*b) + a * 2", a=CHECK | {"operation": "ne"}, b=NEAR), [EXACT, SIMILAR], [-1.0, 3.0]),
        (multi("right", **{"type": "string_check"}) | {"graders": CHECK}, [EXACT], [1.0]),
    ],
)
def test_a_grader_is_a_sum_of_rewards(service: Served, grader: Any, rewards: Any, weights: Any) -> None:
    task = task_of(service, grader)
    assert (task["method"], task["reward_funcs"], task["reward_weights"]) == ("grpo", rewards, weights)
    assert "columns" not in task


def test_a_column_that_answers_are_compared_with_is_the_reply(service: Served) -> None:
    grader = CHECK | {"reference": "{{ item.reference_answer }}"}
    columns = {"prompt": "messages", "completion": "reference_answer"}
    assert task_of(service, grader)["columns"] == columns
    assert task_of(service, multi("a + b", a=grader, b=NUMBER))["columns"] == columns
    own = {"prompt": "question", "completion": "reference_answer"}
    assert task_of(service, grader, columns=own)["columns"] == own
    assert task_of(service, CHECK, columns=own)["columns"] == own


@pytest.mark.parametrize(
    ("hyperparameters", "expected"),
    [
        ({}, {"per_device_train_batch_size": 32}),
        ({"batch_size": 2}, {"per_device_train_batch_size": 16}),
        ({"batch_size": 2, "num_generations": 4}, {"per_device_train_batch_size": 8, "num_generations": 4}),
        ({"compute_multiplier": 0.5}, {"per_device_train_batch_size": 16, "num_generations": 4}),
        ({"compute_multiplier": "auto", "eval_interval": "auto", "eval_samples": "auto"}, {}),
        ({"reasoning_effort": "default", "eval_interval": None}, {}),
        ({"per_device_train_batch_size": 8, "num_generations": 2}, {"per_device_train_batch_size": 8}),
        ({"max_completion_length": 16, "temperature": 0.7}, {"max_completion_length": 16, "temperature": 0.7}),
        ({"learning_rate": None, "learning_rate_multiplier": 2}, {"learning_rate": 1e-3}),
    ],
)  # fmt: skip
def test_hyperparameters_are_those_of_the_task(service: Served, hyperparameters: Any, expected: Any) -> None:
    task = task_of(service, CHECK, **hyperparameters)
    assert expected.items() <= task.items()
    assert not {"eval_interval", "eval_samples", "reasoning_effort", "compute_multiplier"} & task.keys()


def test_auto_and_lists_are_searched(service: Served) -> None:
    assert task_of(service, CHECK, batch_size="auto")["search_space"] == {"per_device_train_batch_size": [16, 32, 64]}
    space = task_of(service, CHECK, batch_size=[1, 2], num_generations=[4, 6])["search_space"]
    assert space == {"per_device_train_batch_size": [12, 24], "num_generations": [4, 6]}
    task = task_of(service, CHECK, learning_rate=None)
    assert (task["search_space"], task["per_device_train_batch_size"]) == ("auto", 32)


TOO_DEEP = "-" * 999 + "a"
BAD = [
    ({"type": "python", "name": "f", "source": "def grade(sample, item):\n    return 1.0"},
     "found 'python'; this service runs no code of requests", "grader"),
    ({"type": "score_model", "name": "f", "model": "m", "input": []}, "this service asks no model", "grader"),
    ({"type": "label_model"}, "this service asks no model", "grader"),
    ({"type": "regex", "pattern": "(a+)+$"}, "found 'regex'; a pattern may never stop", "grader"),
    ({"type": "http", "url": "http://localhost:1/"}, "found 'http'; this service contacts no server", "grader"),
    ({"type": "multiple_choice"}, "found 'multiple_choice'", "grader"),
    ({}, "grader.type: expected string_check or text_similarity or multi or exact", "grader"),
    (CHECK | {"input": "{{ item.question }}"}, "grader.input: expected '{{sample.output_text}}'", "grader"),
    (CHECK | {"input": "{{sample.output_json.x}}"}, "grader.input: expected '{{sample.output_text}}'", "grader"),
    (CHECK | {"reference": "yes"}, "grader.reference: expected '{{item.<column>}}', found 'yes'", "grader"),
    (CHECK | {"reference": "{{item.a.b}}"}, "grader.reference: expected '{{item.<column>}}'", "grader"),
    (NUMBER | {"reference": "{{sample.output_text}}"}, "grader.reference: expected '{{item.<column>}}'", "grader"),
    (NUMBER | {"tolerance": -1}, "grader.tolerance", "grader"),
    (NEAR | {"evaluation_metric": "cosine"}, "grader.evaluation_metric: expected fuzzy_match or", "grader"),
    (multi("min(a, b)", a=CHECK, b=NEAR), "grader.calculate_output: expected a sum of a, b, each times a number (a * "
     "0.5 + b), found 'min(a, b)'", "grader"),
    *((multi(formula, a=CHECK, b=NEAR), f"found {formula!r}; write such a sum", "grader") for formula in (
        "a * b", "a + b + 1", "a / b", "a ** 2 + b", "a + c", "a if b else 0", "a + b; a", "", "__import__('os')",
        "a / 0 + b", "a + True * b")),
    *((multi(one, a=CHECK, b=NEAR), "use b, or remove it", "grader") for one in ("a", "a + 0 * b", "a + b - b")),
    (multi(TOO_DEEP, a=CHECK), "write such a sum", "grader"),
    (multi("a" + " + a" * 120, a=CHECK), "write such a sum", "grader"),
    (multi("a * 1e999", a=CHECK), "write such a sum", "grader"),
    (multi("a", a={"type": "python"}), "grader.graders.a.type: expected", "grader"),
    (multi("a", a=multi("b", b=CHECK)), "grader.graders.a.type: expected", "grader"),
    (multi("a", a=3), "grader.graders: expected graders by their names", "grader"),
    (multi("a + b", a=CHECK, b=NEAR | {"reference": "{{item.x}}"}), "column, found 'reference and x'", "grader"),
]  # fmt: skip


@pytest.mark.parametrize(("grader", "message", "param"), BAD)
def test_other_graders_are_refused(service: Served, grader: Any, message: str, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(service, grader)
    error: Any = caught.value.body
    assert message in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    ("hyperparameters", "message", "param"),
    [
        ({"eval_interval": 5}, "eval_interval: expected 'auto', found 5; .*use eval_steps", "eval_interval"),
        ({"eval_samples": 3}, "eval_samples: expected 'auto', found 3", "eval_samples"),
        ({"reasoning_effort": "high"}, "reasoning_effort: expected 'default', found 'high'", "reasoning_effort"),
        ({"compute_multiplier": 0}, "compute_multiplier: expected 'auto' or a number above 0", "compute_multiplier"),
        ({"compute_multiplier": 2, "num_generations": 4}, "found both", "hyperparameters"),
        ({"batch_size": 10_000}, "batch_size", "batch_size"),
        ({"num_generations": 1}, "num_generations", "num_generations"),
        ({"reward_funcs": ["os:system"]}, "reward_funcs: expected settings of training", "hyperparameters"),
        ({"columns": {"completion": "other"}}, "columns: expected completion: answer", "columns"),
        ({"num_gpus": 2}, "num_gpus should be 1 with method grpo", "num_gpus"),
    ],
)
def test_other_hyperparameters_are_refused(service: Served, hyperparameters: Any, message: str, param: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        create(service, CHECK | {"reference": "{{item.answer}}"}, **hyperparameters)
    error: Any = caught.value.body
    assert error["param"] == param


@pytest.mark.parametrize("settings", [None, {}, {"grader": CHECK, "response_format": {"type": "json_object"}}])
def test_a_method_without_a_grader_is_refused(service: Served, settings: Any) -> None:
    client = service.client()
    method: Any = {"type": "reinforcement"} | ({} if settings is None else {"reinforcement": settings})
    with pytest.raises(openai.BadRequestError, match=r"grader|response_format"):
        client.fine_tuning.jobs.create(model="alto-tiny", training_file=service.upload(client), method=method)


JUDGE = {"scorer": "http", "url": "https://judge.example/score"}


def test_the_owner_of_a_service_may_offer_graders_that_run_code_or_ask_a_server(tmp_path: Path) -> None:
    with served(tmp_path, graders={"judge": JUDGE, "style": "our_rewards:style"}) as service:
        grader = multi("judge + 2 * s", judge={"type": "judge"}, s={"type": "style", "reference": "{{item.answer}}"})
        task = task_of(service, grader)
        assert task["reward_funcs"] == [JUDGE, {"scorer": "python", "function": "our_rewards:style"}]
        assert task["reward_weights"] == [1.0, 2.0]
        assert task["columns"]["completion"] == "answer"
        for bad in ({"type": "style", "function": "os:system"}, {"type": "judge", "url": "http://localhost:1/"}):
            with pytest.raises(openai.BadRequestError, match="remove it"):
                create(service, bad)
        with pytest.raises(openai.BadRequestError, match="judge or style, found 'other'"):
            create(service, {"type": "other"})


@pytest.mark.parametrize("grader", [{"scorer": "python"}, {"scorer": "exact", "num_rows": 3}, ["exact"], "nonsense"])
def test_a_grader_of_the_settings_is_checked_at_the_start(grader: Any) -> None:
    with pytest.raises(SpecError, match=r"graders|reward_funcs"):
        ServiceSettings(graders={"own": grader})


@pytest.mark.slow("queues")
def test_a_job_learns_from_its_grader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "our_rewards.py").write_text(
        "def last_word(completions, messages=None, reference_answer=None, topic=None, **_):\n"
        "    assert set(topic) <= {'sums'} and set(map(type, reference_answer)) == {str}\n"
        "    return [-len(text) for text in completions]\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(tmp_path)
    rows = [
        {"messages": [{"role": "user", "content": f"{n} + 1?"}], "reference_answer": str(n + 1), "topic": "sums"}
        for n in range(24)
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    small = {"batch_size": 2, "num_generations": 4, "max_completion_length": 4, "early_exit": False}
    grader = multi(
        "2 * right + near",
        right=CHECK | {"reference": "{{item.reference_answer}}", "operation": "like"},
        near=NEAR | {"reference": "{{item.reference_answer}}"},
    )
    checked = CHECK | {"reference": "{{item.reference_answer}}"}
    own = {"type": "brief", "reference": "{{item.reference_answer}}"}
    root = tmp_path / "data"
    with served(root, open_plane=local_plane(root), graders={"brief": "our_rewards:last_word"}) as service:
        client = service.client()
        jobs = [create(service, one, content, **small) for one in (checked, grader, own)]
        bad = create(service, CHECK | {"reference": "{{item.missing}}"}, content, **small)
        found, both, brief = (service.finished(client, job.id) for job in jobs)
        for ended in (found, both, brief):
            assert ended.status == "succeeded", ended.error
        assert found.method.type == "reinforcement"
        assert found.method.reinforcement.grader.model_dump() == checked
        shown = found.method.reinforcement.hyperparameters
        assert (shown.batch_size, shown.n_epochs, shown.learning_rate_multiplier) == (2, 1, 2)
        events = [event.message for event in client.fine_tuning.jobs.list_events(both.id).data]
        assert any("mean reward 0.0" in message for message in events), events
        failed = service.finished(client, bad.id)
        assert failed.status == "failed"
        assert "missing" in failed.error.message
        # A queue has a journal of its own.
        folders = [path.parent for path in tmp_path.rglob("journal.jsonl") if '"grpo"' in path.read_text()]
        jobs_of_runs = [job for folder in folders for job in read_history(folder).jobs.values()]
    assert len(jobs_of_runs) == 3
    losses = [loss for job in jobs_of_runs for loss in job.train_losses]
    assert min(losses) < 0, "some completion has a character of its row's answer"
    assert max(losses) > 0, "long completions of the job with the service's own grader have negative rewards"
