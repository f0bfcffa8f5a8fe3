"""The recordings on which policies are compared, and the committed lengths of GSM8K's rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from alto import Task
from alto.early_exit import Recording
from benchmarks.kernels.lengths import row_lengths
from tools import record_sweeps
from tools.make_row_lengths import derive

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", record_sweeps.PLANS)
def test_parts_of_a_plan_are_different_jobs_of_one_search(name: str) -> None:
    plan = record_sweeps.PLANS[name]
    parts = [
        Task(model="alto-tiny", dataset="rows.jsonl", search_space=space, **plan.fixed).jobs for space in plan.spaces
    ]
    configs = [job.config for part in parts for job in part]
    assert len(set(configs)) == len(configs) >= 16
    assert len({frozenset(space) for space in plan.spaces}) == 1


def test_jobs_of_parts_are_counted_through() -> None:
    whole = Recording.read(ROOT / "benchmarks" / "recordings" / "gsm8k-alto-tiny.json.gz")
    parts = [replace(whole, jobs=whole.jobs[:3]), replace(whole, jobs=whole.jobs[3:5])]
    joined = record_sweeps.join(parts)
    assert [job.job for job in joined.jobs] == [f"job-{number:03d}" for number in range(5)]
    assert [job.evaluations for job in joined.jobs] == [job.evaluations for job in whole.jobs[:5]]


SHARED = Path(__file__).parents[3] / "shared"


def test_committed_lengths_are_those_of_the_data() -> None:
    data, gpt2 = SHARED / "data" / "gsm8k" / "train.jsonl", SHARED / "tokenizers" / "gpt2"
    if not data.exists() or not gpt2.exists():
        pytest.skip(f"needs GSM8K at {data} and GPT-2's tokenizer at {gpt2}")
    for tokenizer, found in derive(data, gpt2).items():
        assert tuple(found) == row_lengths(tokenizer)
