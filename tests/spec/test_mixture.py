"""A dataset that is a list of sources, and the weights of jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alto.errors import AltoError, SpecError, UnknownKeyError
from alto.spec import JobConfig, Task, load_task

SOURCES = [{"path": "maths.jsonl", "weight": 3}, {"path": "chat.jsonl", "weight": 1}]


def make(dataset: Any = SOURCES, **keys: Any) -> Task:
    return Task(model="alto-tiny", dataset=dataset, **keys)


def shares(task: Task) -> list[dict[str, float]]:
    return [dict(job.config.mixture_weights or ()) for job in task.jobs]


def test_weights_of_sources_are_those_of_jobs_by_default() -> None:
    task = make()
    assert (task.name, task.dataset_name) == ("maths-chat", "maths.jsonl + chat.jsonl")
    assert shares(task) == [{"maths": 0.75, "chat": 0.25}]
    assert shares(make(mixture_weights={"maths": 1, "chat": 1})) == [{"maths": 0.5, "chat": 0.5}]


def test_weights_are_searched_beside_other_keys() -> None:
    both = [{"maths": 0.5, "chat": 0.5}, {"maths": 0.8, "chat": 0.2}]
    task = make(search_space={"mixture_weights": both, "lr": [1e-4, 1e-3]})
    assert shares(task) == [both[0]] * 2 + [both[1]] * 2
    product = make(search_space={"mixture_weights": {"maths": [1, 4], "chat": 1}})
    assert shares(product) == both
    paired = make(search_space={"paired": {"mixture_weights": both, "lr": [1e-4, 1e-3]}})
    assert [(job.config.learning_rate, dict(job.config.mixture_weights or ())) for job in paired.jobs] == [
        (1e-4, both[0]),
        (1e-3, both[1]),
    ]


def test_equal_weights_are_refused_in_any_order_of_names() -> None:
    with pytest.raises(SpecError, match="found that job-000 and job-001 are equal"):
        make(search_space={"mixture_weights": [{"maths": 1, "chat": 2}, {"chat": 2, "maths": 1}]})


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"mixture_weights": {"maths": 1, "chat": 2}},
        {"search_space": {"mixture_weights": [{"maths": 1, "chat": 2}, {"chat": 0, "maths": 1}]}},
        {"search_space": {"mixture_weights": {"maths": [1, 2, 3], "chat": 1}, "r": [8, 16]}},
    ],
)
def test_a_task_is_read_back_as_it_is_written(tmp_path: Path, keys: dict[str, Any]) -> None:
    task = make(**keys)
    (tmp_path / "task.yaml").write_text(task.to_yaml(), encoding="utf-8")
    again = load_task(tmp_path / "task.yaml")
    assert again == task
    assert [job.config for job in again.jobs] == [job.config for job in task.jobs]
    for job in task.jobs:
        assert task.job_config(job.config.to_dict()) == job.config
        assert job.config.replace(r=4).mixture_weights == job.config.mixture_weights
    assert task.replace(name="other").jobs == task.jobs


def test_paths_of_sources_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "maths.jsonl").touch()
    (tmp_path / "task.yaml").write_text("model: alto-tiny\ndataset: [{path: maths.jsonl}, {path: owner/chat}]\n")
    task = load_task(tmp_path / "task.yaml")
    assert [source.path for source in task.sources] == [str(tmp_path / "maths.jsonl"), "owner/chat"]


@pytest.mark.parametrize(
    ("dataset", "keys", "message"),
    [
        ([], {}, "dataset should have rows, found an empty list"),
        (["a.jsonl"], {}, r"dataset\[0\] should be a mapping with a path, found 'a.jsonl'"),
        ([{"path": "a", "wieght": 1}], {}, "did you mean|Did you mean 'weight'"),
        ([{"path": "a", "weight": -1}], {}, r"In dataset\[0\]: weight .* >= 0"),
        ([{"path": "a", "weight": 0}], {}, "dataset should have a source with a weight above 0"),
        ([{"path": "a/x.csv"}, {"path": "b/x.csv"}], {}, "should give every source a different name, found 'x' twice"),
        (SOURCES, {"columns": {"prompt": "q"}}, "columns should be set in the entries of 'dataset'"),
        (SOURCES, {"mixture_weights": {"maths": 1}}, r"a weight for every source \(maths, chat\), found 'maths'"),
        (SOURCES, {"mixture_weights": {"maths": 1, "chatt": 1}}, "found 'maths', 'chatt'"),
        (SOURCES, {"mixture_weights": {"maths": -1, "chat": 2}}, "finite weights >= 0"),
        (SOURCES, {"mixture_weights": 0.5}, "should map names of sources to weights, found 0.5"),
        (SOURCES, {"search_space": {"mixture_weights": {"maths": [1, 2], "chat": [1, 2]}}}, "make every job different"),
        ("x.jsonl", {"mixture_weights": {"maths": 1}}, "only if 'dataset' is a list of sources, found one dataset"),
    ],
)
def test_no_mixture(dataset: Any, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(AltoError, match=message) as caught:
        make(dataset, **keys)
    assert isinstance(caught.value, SpecError)


def test_a_misspelt_key_of_a_source_is_unknown() -> None:
    with pytest.raises(UnknownKeyError, match=r"dataset\[0\] has the unknown key 'wieght'. Did you mean 'weight'"):
        make([{"path": "a", "wieght": 1}])


def test_weights_are_kept_as_shares() -> None:
    config = JobConfig(mixture_weights={"a": 1, "b": 2})
    assert config.mixture_weights == (("a", 1 / 3), ("b", 2 / 3))
    assert JobConfig(**config.to_dict()) == config
    assert "mixture_weights" not in JobConfig().to_dict()
