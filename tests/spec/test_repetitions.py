"""Jobs of a task that repeat a configuration with another seed."""

from __future__ import annotations

from typing import Any

import pytest

from alto.spec import Task


def repetitions(space: dict[str, Any], **keys: Any) -> dict[str, str]:
    return dict(Task(model="alto-tiny", dataset="rows.jsonl", search_space=space, **keys).repetitions)


def test_jobs_that_differ_in_the_seed_alone_repeat_the_first_of_them() -> None:
    assert repetitions({"lr": [1e-3, 2e-3], "seed": [1, 2]}) == {
        "job-000": "job-000",
        "job-001": "job-000",
        "job-002": "job-002",
        "job-003": "job-002",
    }
    assert repetitions({"seed": [1, 2], "lr": [1e-3, 2e-3]}) == {
        "job-000": "job-000",
        "job-001": "job-001",
        "job-002": "job-000",
        "job-003": "job-001",
    }


def test_a_job_that_repeats_none_and_is_not_repeated_is_left_out() -> None:
    paired = {"lr": [1e-3, 1e-3, 2e-3], "seed": [1, 2, 1]}
    assert repetitions({"paired": paired}) == {"job-000": "job-000", "job-001": "job-000"}


@pytest.mark.parametrize(
    ("space", "keys"),
    [
        ({"lr": [1e-3, 2e-3]}, {}),
        ({"lr": [1e-3, 2e-3], "seed": [7]}, {}),
        ({"paired": {"lr": [1e-3, 2e-3], "seed": [1, 2]}}, {}),
        ({"lr": [1e-3, 2e-3], "seed": [1, 2]}, {"repeat_by": "none"}),
        ({"lr": [1e-3, 2e-3], "seed": [1, 2]}, {"search": {"algorithm": "random", "budget": {"jobs": 4}}}),
    ],
    ids=["no-seed", "one-seed", "paired", "none", "random"],
)
def test_other_jobs_are_no_repetitions(space: dict[str, Any], keys: dict[str, Any]) -> None:
    assert repetitions(space, **keys) == {}
