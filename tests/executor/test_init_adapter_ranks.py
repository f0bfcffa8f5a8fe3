"""Jobs that begin with a saved adapter (``init_adapter``) on two ranks, and in a population (``search: pbt``): they
equal PEFT alone, and what they are in one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from oracle import flat, relative_distance
from peft_adapters import save_with_peft
from rank_jobs import (
    an_adapter_on_embeddings_is_refused,
    first_steps_from_a_saved_adapter_are_those_of_peft_alone,
    steps_on_labelled_replies_are_those_of_one_process,
    steps_on_pairs_are_those_of_one_process,
    train,
)
from ranks import failures_on_ranks
from resident_jobs import DATA, make_model, make_task

from alto.early_exit import audit
from alto.executor.planned_job import resolve_rungs
from alto.lora import read_adapter, saved_settings
from alto.runs import RunDir, read_entries, read_events, read_history
from alto.spec import Task

pytestmark = pytest.mark.filterwarnings("ignore")

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "up_proj"]},
    "dora": {"r": 4, "use_dora": True, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "patterns": {"rank_pattern": {"q_proj": 2, "up_proj": 6}, "alpha_pattern": {"v_proj": 5}},
}
_LLAMA = partial(make_model, "llama")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An adapter of each kind, as PEFT writes it."""
    folder = tmp_path_factory.mktemp("saved")
    return {kind: save_with_peft(make_model("llama"), folder / kind, **keys) for kind, keys in KINDS.items()}


def test_steps_on_two_ranks_are_those_of_peft_alone(saved: dict[str, Path], tmp_path: Path) -> None:
    first = first_steps_from_a_saved_adapter_are_those_of_peft_alone
    plain = str(saved["plain"])
    checks: list[Any] = [
        *((f"steps of {kind}", first, (str(folder),)) for kind, folder in saved.items()),
        ("pairs", steps_on_pairs_are_those_of_one_process, (str(tmp_path / "pairs"), plain)),
        ("labelled", steps_on_labelled_replies_are_those_of_one_process, (str(tmp_path / "labelled"), plain)),
        ("embeddings", an_adapter_on_embeddings_is_refused, (str(tmp_path / "embeddings"),)),
    ]
    keys = {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}
    save_with_peft(make_model("llama"), tmp_path / "embeddings", **keys)
    failures = failures_on_ranks(2, checks, tmp_path)
    assert not failures, "\n".join(f"{name}: {reason}" for name, reason in failures.items())


def several(folder: Path) -> Task:
    """Jobs that end one after the other, until fewer are left than ranks."""
    configs = [
        {"lr": 1e-3, "batch_size": 4, "seed": 1, "num_train_epochs": 2},
        {"lr": 5e-4, "batch_size": 5, "seed": 2, "num_train_epochs": 2},
        {"lr": 1e-3, "batch_size": 7, "seed": 3, "num_train_epochs": 6},
    ]
    alone = {"rungs": [[0.3, 1.0]], "detect_divergence": False, "detect_overfitting": False}
    filled = [config | saved_settings(folder) for config in configs]
    return make_task(filled, name="several", init_adapter=str(folder), eval_steps=0.5, early_exit=alone)


def population(folder: Path) -> Task:
    return Task(
        model="unused",
        dataset="unused.jsonl",
        name="pbt",
        init_adapter=str(folder),
        max_slots=4,
        max_tokens_per_pass=300,
        num_train_epochs=2,
        eval_steps=0.25,
        keep="all",
        search={"algorithm": "pbt", "num_initial_jobs": 4, "interval": 0.3, "exchanged": 0.25},
        search_space={"lr": {"min": 1e-5, "max": 2e-3, "log": True}, "batch_size": [4, 7]},
        **saved_settings(folder),
    )


TASKS = {"several": several, "pbt": population}
Runs = dict[tuple[str, int], Path]


@pytest.fixture(scope="module")
def runs(saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Of each task, in one process and on two ranks, where it is stopped once and resumed."""
    found: Runs = {}
    for num_ranks in (1, 2):
        folder = tmp_path_factory.mktemp(f"ranks-{num_ranks}")
        checks: list[Any] = []
        for name, make in TASKS.items():
            task = resolve_rungs(make(saved["plain"]), len(DATA.train))
            root = str(RunDir.create(folder, task).root)
            found[name, num_ranks] = Path(root)
            begun = partial(train, model=_LLAMA)
            checks += [(f"{name} begun", begun, (root, 7))] if num_ranks > 1 else []
            checks.append((name, begun, (root,)))
        assert failures_on_ranks(num_ranks, checks, folder) == {}
    return found


@pytest.mark.parametrize("name", TASKS)
def test_every_job_is_what_it_is_in_one_process(name: str, runs: Runs) -> None:
    one, two = (read_history(runs[name, num_ranks]) for num_ranks in (1, 2))
    assert one.jobs.keys() == two.jobs.keys()
    for job, expected in one.jobs.items():
        found = two.jobs[job]
        assert found.train_losses == pytest.approx(expected.train_losses, rel=1e-4, nan_ok=True)
        losses = [[point.validation_loss for point in of_one.evaluations] for of_one in (found, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        starts = [of_one.start for of_one in (found, expected) if of_one.start is not None]
        assert len(starts) == (0 if expected.forked_at else 2)
        assert len({round(start.validation_loss, 4) for start in starts}) <= 1
        adapters = [flat(read_adapter(RunDir(runs[name, num]).job(job, "last"))) for num in (2, 1)]
        assert relative_distance(*adapters) <= 1e-4
    assert one.result is not None
    assert two.result is not None
    assert two.result.best_job == one.result.best_job


def test_the_last_jobs_train_on_all_ranks(runs: Runs) -> None:
    events = read_events(runs["several", 2] / "journal.jsonl")
    admitted = [event for event in events if event["event"] in ("job_admitted", "job_resumed")]
    assert {len(event["ranks"]) for event in admitted} == {1, 2}


def test_copies_of_a_population_are_those_of_one_process(runs: Runs) -> None:
    def added(num_ranks: int) -> list[tuple[Any, ...]]:
        keys = ("job", "origin", "replaces", "forked_at", "config")
        events = read_events(runs["pbt", num_ranks] / "journal.jsonl")
        return [tuple(event.get(key) for key in keys) for event in events if event["event"] == "job_added"]

    assert len(added(1)) >= 2
    assert added(2) == added(1)
    assert audit(read_entries(runs["pbt", 2] / "journal.jsonl")) == ()
