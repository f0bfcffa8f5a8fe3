"""Searches on several ranks: the same suggestions and lineage as in one process, whichever rank has a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_jobs import train
from ranks import failures_on_ranks
from resident_jobs import DATA

from alto.early_exit import audit
from alto.executor.planned_job import resolve_rungs
from alto.runs import RunDir, read_entries, read_events, read_history
from alto.spec import Task

pytest.importorskip("optuna", reason="needs the search extra: pip install -e '.[search]'")
pytestmark = [pytest.mark.slow("campaigns"), pytest.mark.filterwarnings("ignore::FutureWarning")]

SEARCHES: dict[str, dict[str, Any]] = {
    "pbt": {"algorithm": "pbt", "num_initial_jobs": 4, "interval": 0.3, "exchanged": 0.25},
    "tpe": {"algorithm": "tpe", "num_initial_jobs": 4, "budget": {"jobs": 8}},
}


def make(search: str) -> Task:
    task = Task(
        model="unused",
        dataset="unused.jsonl",
        name=search,
        max_slots=4,
        max_tokens_per_pass=300,
        num_train_epochs=2,
        eval_steps=0.25,
        search=SEARCHES[search],
        search_space={"lr": {"min": 1e-5, "max": 3e-3, "log": True}, "r": [2, 4], "batch_size": [4, 7]},
    )
    return resolve_rungs(task, len(DATA.train))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """Runs of each search in one process, and on two ranks, where it is stopped once and resumed."""
    found = {}
    for num_ranks in (1, 2):
        folder = tmp_path_factory.mktemp(f"ranks-{num_ranks}")
        checks: list[Any] = []
        for search in SEARCHES:
            root = str(RunDir.create(folder, make(search)).root)
            found[search, num_ranks] = Path(root)
            checks += [(f"{search} begun", train, (root, 5))] if num_ranks > 1 else []
            checks.append((search, train, (root,)))
        assert failures_on_ranks(num_ranks, checks, folder) == {}
    return found


@pytest.mark.parametrize("search", SEARCHES)
def test_the_same_jobs_are_added_as_in_one_process(search: str, runs: dict[tuple[str, int], Path]) -> None:
    def added(num_ranks: int) -> list[tuple[Any, ...]]:
        keys = ("job", "origin", "replaces", "values", "config")
        events = read_events(runs[search, num_ranks] / "journal.jsonl")
        return [tuple(event.get(key) for key in keys) for event in events if event["event"] == "job_added"]

    assert len(added(1)) >= 2
    assert added(2) == added(1)
    assert audit(read_entries(runs[search, 2] / "journal.jsonl")) == ()
    winners = {read_history(runs[search, num_ranks]).result.best_job for num_ranks in (1, 2)}
    assert len(winners) == 1


def test_copies_are_made_of_rows_on_another_rank(runs: dict[tuple[str, int], Path]) -> None:
    events = list(read_events(runs["pbt", 2] / "journal.jsonl"))
    ranks: dict[str, list[list[int]]] = {}
    for event in events:
        if event["event"] in ("job_admitted", "job_resumed"):
            ranks.setdefault(event["job"], []).append(event["ranks"])
    assert len({tuple(of) for admitted in ranks.values() for of in admitted}) > 1, "both ranks train"
    forks = [event for event in events if event["event"] == "job_added"]
    assert all(fork["job"] in ranks for fork in forks)
