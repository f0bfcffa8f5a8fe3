"""``select_by``: valid metrics and scorers, their values, and refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from alto.errors import SpecError, UnknownKeyError
from alto.spec import Scoring, Task, load_task, read_run_task
from alto.spec.scoring import LOSS, check_metric, loss_scale, metric_notes, score_of

PYTHON = {"scorer": "python", "function": "my_package.scoring:score"}
HTTP = {"scorer": "http", "url": "https://judge.example/score?key=secret"}


def task(select_by: Any, **changes: Any) -> Task:
    return Task(model="alto-tiny", dataset="rows.jsonl", select_by=select_by, **changes)


@pytest.mark.parametrize("word", ["metric", "eval_accuracy"])
def test_the_words_of_earlier_versions_stay(word: str, tmp_path: Path) -> None:
    written = task(word)
    assert written.select_by == word
    assert written.to_dict()["select_by"] == word
    assert (written.scoring is None) == (word == "metric")
    (tmp_path / "task.yaml").write_text(written.to_yaml(), encoding="utf-8")
    assert read_run_task(tmp_path / "task.yaml") == written


@pytest.mark.parametrize(
    "settings",
    [
        {"scorer": "exact_match"},
        {"scorer": "multiple_choice", "num_rows": 100},
        {**PYTHON, "timeout_s": 2.5, "max_new_tokens": 64},
        {**HTTP, "headers_env": "JUDGE_HEADERS", "rows_per_request": 4},
        {**PYTHON, "at": [0.1, 0.6]},
        {"scorer": "exact", "ignore_case": True},
        {"scorer": "json", "keys": ["total", "city.name"]},
        {"scorer": "regex", "pattern": r"Answer: (\w)", "ignore_case": True},
        {"scorer": "numeric", "tolerance": 0.5},
        {"scorer": "tool_call"},
        {"scorer": "format", "tags": ["reasoning", "answer"]},
        {"scorer": "similarity", "measure": "rouge_l"},
    ],
)
def test_a_mapping_is_written_and_read_back(settings: dict[str, Any], tmp_path: Path) -> None:
    written = task(settings)
    assert written.select_by == Scoring(**settings)
    assert written.scoring == written.select_by
    assert written.to_dict()["select_by"] == settings
    assert Task(**written.to_dict()) == written
    assert written.replace(max_length=64).select_by == written.select_by
    path = tmp_path / "task.yaml"
    path.write_text(written.to_yaml(), encoding="utf-8")
    assert read_run_task(path) == written
    assert load_task(path, ["select_by.num_rows=7"]).select_by == Scoring(**{**settings, "num_rows": 7})


def test_only_those_that_reach_outside_need_trust() -> None:
    needing = [
        task(given).needs_trust for given in ("metric", "eval_accuracy", {"scorer": "exact_match"}, PYTHON, HTTP)
    ]
    assert needing == [False, False, False, True, True]
    assert task("metric", trust_remote_code=True).needs_trust


@pytest.mark.parametrize("end", ["?key=secret", "#secret", "?key=secret#more", "#secret?more"])
def test_an_address_is_shown_without_what_may_be_a_key(end: str) -> None:
    assert Scoring(scorer="http", url=f"https://judge.example/score{end}").address == "https://judge.example/score"


@pytest.mark.parametrize(
    ("select_by", "message"),
    [
        (
            "accuracy",
            r"select_by should be 'metric', 'eval_accuracy' or a mapping of settings, found 'accuracy'",
        ),
        (3, "select_by .* found 3"),
        ({}, "select_by.scorer .* is missing: expected 'exact' or 'contains' or .*'python' or 'http'"),
        ({"scorer": "bleu"}, "select_by.scorer .* should be 'exact' .* found 'bleu'"),
        ({"scorer": "python"}, "select_by.function is missing: expected it with scorer 'python'"),
        ({"scorer": "http"}, "select_by.url is missing"),
        ({**PYTHON, "url": "http://a/"}, "select_by.url: expected it with scorer 'http' only, found 'python'"),
        ({"scorer": "exact_match", "function": "a.b"}, "select_by.function: expected it with scorer 'python' only"),
        ({"scorer": "exact_match", "headers_env": "A"}, "select_by.headers_env: expected it with scorer 'http' only"),
        ({"scorer": "python", "function": "score"}, "select_by.function should be the dotted name .* found 'score'"),
        ({"scorer": "python", "function": "a.b:c d"}, "select_by.function should be the dotted name"),
        ({"scorer": "http", "url": "file:///etc/passwd"}, "select_by.url should be an address that begins with http"),
        ({"scorer": "http", "url": "http://[::1/"}, "select_by.url should be an address that begins with http"),
        (
            {"scorer": "http", "url": "https://me:pw@judge.example/"},
            "select_by.url should be an address without a user",
        ),
        ({**HTTP, "headers_env": "Bearer abc"}, "select_by.headers_env should be the name of an environment variable"),
        ({"scorer": "regex"}, "select_by.pattern is missing: expected it with scorer 'regex'"),
        (
            {"scorer": "regex", "pattern": "Answer: ("},
            r"select_by.pattern should be a regular expression of Python, found 'Answer: \(' \(missing \)",
        ),
        ({"scorer": "regex", "pattern": "a{99999999999}"}, "select_by.pattern should be a regular expression"),
        ({"scorer": "regex", "pattern": "*"}, "select_by.pattern should be a regular expression"),
        ({"scorer": "json", "keys": []}, "select_by.keys should be a list of keys"),
        ({"scorer": "json", "keys": "total"}, "select_by.keys should be a list of keys of JSON objects, found 'total'"),
        ({"scorer": "exact", "keys": ["a"]}, "select_by.keys: expected it with scorer 'json' only, found 'exact'"),
        ({"scorer": "exact", "tolerance": 1}, "select_by.tolerance: expected it with scorer 'numeric' only"),
        ({"scorer": "numeric", "tolerance": -1}, "select_by.tolerance .* >= 0"),
        (
            {"scorer": "json", "ignore_case": True},
            "select_by.ignore_case: expected it with scorer 'exact' or 'contains' or 'regex' only, found 'json'",
        ),
        ({**PYTHON, "timeout_s": 0}, "select_by.timeout_s .* should be a finite number > 0 and <= 3600, found 0"),
        ({**PYTHON, "num_rows": 0}, "select_by.num_rows .* >= 1"),
        ({**PYTHON, "max_new_tokens": "64"}, "select_by.max_new_tokens .* found '64'"),
        ({**PYTHON, "at": "rungs"}, "select_by.at should be 'finalists', or a list of rungs .* found 'rungs'"),
        ({**PYTHON, "at": []}, "select_by.at should be 'finalists', or a list"),
        ({**PYTHON, "at": [1.0]}, "select_by.at should be 'finalists', or a list"),
        ({**PYTHON, "at": [0.2, 0.1]}, "select_by.at should be in increasing order"),
        ({**PYTHON, "at": [0.1, 0.1]}, "select_by.at should be in increasing order"),
        (
            {**PYTHON, "at": [0.25, 0.3]},
            r"should be rungs of early_exit \(0.01, 0.025, 0.05, 0.1, 0.25, 0.6\), found 0.3",
        ),
    ],
)
def test_what_is_refused(select_by: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        task(select_by)


@pytest.mark.parametrize("url", ["https://me:topsecret@judge.example/", "ftp://topsecret/"])
def test_no_message_shows_what_may_be_a_secret(url: str) -> None:
    with pytest.raises(SpecError) as refusal:
        task({**HTTP, "url": url})
    assert "topsecret" not in str(refusal.value)
    with pytest.raises(SpecError) as refusal:
        task({**HTTP, "headers_env": "Bearer topsecret"})
    assert "topsecret" not in str(refusal.value)


def test_a_misspelt_key_is_named_with_the_right_one() -> None:
    with pytest.raises(UnknownKeyError, match=r"select_by has the unknown key 'time_out_s'. Did you mean 'timeout_s'"):
        task({**PYTHON, "time_out_s": 3})


@pytest.mark.parametrize("method", ["dpo", "orpo"])
def test_pairs_have_no_reply_to_score(method: str) -> None:
    with pytest.raises(SpecError, match=f"select_by should be 'metric' with method '{method}'.* found 'python'"):
        task(PYTHON, method=method)


def test_rungs_that_are_scored_are_those_of_the_task() -> None:
    own = {"rungs": [[0.3, 0.5]]}
    assert task({**PYTHON, "at": [0.3]}, early_exit=own).select_by.at == (0.3,)
    with pytest.raises(SpecError, match=r"select_by.at should be rungs of early_exit \(0.3\), found 0.1"):
        task({**PYTHON, "at": [0.1]}, early_exit=own)
    for off in (False, {"select": False}):
        with pytest.raises(SpecError, match=r"rungs of early_exit .none, as no jobs are ranked.*, found 0.1"):
            task({**PYTHON, "at": [0.1]}, early_exit=off)


@pytest.mark.parametrize("algorithm", ["tpe", "pbt"])
def test_jobs_that_come_later_are_not_scored_at_rungs(algorithm: str) -> None:
    space = {"learning_rate": {"min": 1e-5, "max": 1e-2, "num": 8}}
    with pytest.raises(SpecError, match=f"select_by.at should be 'finalists' with search.algorithm '{algorithm}'"):
        task({**PYTHON, "at": [0.1]}, search=algorithm, search_space=space)


ROWS = {"model": "alto-tiny", "dataset": "pairs.jsonl"}


def test_a_task_chooses_by_the_loss_unless_told_otherwise() -> None:
    assert Task(**ROWS).metric == LOSS
    assert Task(**ROWS, method="dpo").metric == LOSS


@pytest.mark.parametrize(("method", "metric"), [("dpo", "reward_accuracy"), ("orpo", "reward_margin"), ("sft", "loss")])
def test_a_metric_of_the_method_is_kept_in_its_file(method: str, metric: str) -> None:
    task = Task(**ROWS, method=method, metric=metric)
    assert task.metric == metric
    assert Task(**task.to_dict()) == task


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"metric": "reward_accuracy"},
            r"metric 'reward_accuracy' is not available with method 'sft' \(available: loss\).*dpo or orpo",
        ),
        (
            {"method": "dpo", "metric": "wins"},
            r"metric 'wins' is .* with method 'dpo' \(available: loss, reward_accuracy, reward_margin\).*correct it",
        ),
        ({"method": "dpo", "metric": "accuracy"}, "metric 'accuracy' is not.*change the method to classification"),
        ({"method": "dpo", "metric": "kl"}, "metric 'kl' is not available"),
        ({"method": "dpo", "metric": 3}, "metric"),
        ({"method": "dpo", "metric": ""}, "metric"),
    ],
)
def test_a_metric_that_the_method_does_not_measure_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Task(**ROWS, **settings)


def test_a_method_of_a_package_has_scores_of_its_own() -> None:
    check_metric("win_rate", "my_method", ("win_rate",))
    with pytest.raises(
        SpecError, match=r"'reward_accuracy' is not available with method 'my_method' \(available: loss, win_rate\)"
    ):
        check_metric("reward_accuracy", "my_method", ("win_rate",))


@pytest.mark.parametrize(
    ("metric", "space", "message"),
    [
        (LOSS, {"beta": [0.1, 0.2]}, "Jobs differ in beta, "),
        (LOSS, {"beta": [0.1, 0.2], "loss_type": ["ipo", "sigmoid"]}, "Jobs differ in beta and loss_type, "),
        (
            LOSS,
            {"label_smoothing": [0.0, 0.2]},
            "Jobs differ in label_smoothing, ",
        ),
        (LOSS, {"lr": [1e-4, 2e-4]}, ""),
        ("reward_margin", {"beta": [0.1, 0.2]}, "Jobs differ in beta, and therefore in the scale of the reward margin"),
        ("reward_margin", {"label_smoothing": [0.0, 0.2]}, ""),
        ("reward_accuracy", {"beta": [0.1, 0.2]}, ""),
    ],
)
def test_comparing_losses_of_other_scales_gives_a_note(
    metric: str, space: dict[str, list[object]], message: str
) -> None:
    task = Task(**ROWS, method="dpo", metric=metric, search_space=space)
    notes = metric_notes(task.metric, task.method, [job.config for job in task.jobs])
    assert "".join(notes).startswith(message)
    assert bool(notes) is bool(message)


def test_what_an_evaluation_is_worth() -> None:
    assert score_of("reward_accuracy", {"reward_accuracy": 0.75, "kl": 3.0}) == 0.75
    assert score_of(LOSS, {"reward_accuracy": 0.75}) == score_of(LOSS, {}) == 0.0
    with pytest.raises(KeyError):
        score_of("reward_accuracy", {})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "inf"])
def test_a_value_that_is_not_finite_is_worth_the_least_and_can_be_compared(value: float | str) -> None:
    score = score_of("reward_margin", {"reward_margin": value})
    assert math.isfinite(score)
    assert score < -1e300


def test_settings_of_the_method_decide_the_scale_of_a_loss_and_no_others() -> None:
    task = Task(**ROWS, method="dpo", search_space={"beta": [0.1, 0.2], "lr": [1e-4, 2e-4]})
    scales = [loss_scale(job.config.to_dict()) for job in task.jobs]
    assert scales[0] == scales[1] != scales[2] == scales[3]
    # a method that a package registers
    assert loss_scale({"r": 8, "target_margin": 0.5}) != loss_scale({"r": 8, "target_margin": 1.0})
    # the configuration of an ORPO job in version 0.1
    assert loss_scale({"r": 8, "beta": 0.1, "loss_type": None}) == loss_scale({"r": 16, "beta": 0.1})
