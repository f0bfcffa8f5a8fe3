"""Jobs with biases, magnitudes, heads, noise and every optimizer are parked, moved, killed, resumed, copied, cloned and
suggested: nothing of them is lost, and a slot keeps nothing of its previous job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from biased_models import llama
from job_kinds import KINDS
from oracle_classification import ONE_LABEL, data_of
from oracle_kto import LABELLED
from resident_jobs import DATA, Bank, make_task
from searches import TPE, Run, make
from shared_executor import curves

from alto.data import TaskData
from alto.executor import JobState
from alto.executor.checkpoint import StateStore, read_state, write_state
from alto.lora import ModuleNames, write_adapter
from alto.runs import RunDir
from alto.spec import Task

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

CONFIGS = list(KINDS.values())
ALL = slice(None)
SLOW = pytest.mark.slow("campaigns")
WITHOUT_NOISE = [{**config, "neftune_noise_alpha": None, "batch_size": 3} for config in CONFIGS]


def sft(jobs: slice = ALL, **settings: Any) -> tuple[Task, TaskData]:
    return make_task(CONFIGS[jobs], **settings), DATA


def classification(jobs: slice = ALL, **settings: Any) -> tuple[Task, TaskData]:
    task = make_task(CONFIGS[jobs], method="classification", **settings)
    return task.with_labels(ONE_LABEL), data_of(ONE_LABEL)


def kto(jobs: slice = ALL, **settings: Any) -> tuple[Task, TaskData]:
    return make_task(WITHOUT_NOISE[jobs], method="kto", beta=0.5, **settings), LABELLED


METHODS: dict[str, Callable[..., tuple[Task, TaskData]]] = {
    "sft": sft,
    "classification": classification,
    "kto": kto,
}


def bank_of(method: str, **settings: Any) -> Bank:
    task, data = METHODS[method](**settings)
    return Bank(llama(), task, data=data)


def parked(bank: Bank, job: JobState, store: StateStore) -> None:
    """Save a job and free its slot, as the executor does."""
    names, trainer, slot = ModuleNames.of(bank.backbone.model), bank.trainer, job.slot
    assert slot is not None

    def fill(folder: Path) -> None:
        write_adapter(folder, trainer.bank.read(slot), job.config, "unused", names)
        write_state(folder, trainer.optimizer.read(slot))

    store.save(job.id, "last", job.step, fill)
    trainer.bank.release(slot)
    job.slot = None


@pytest.mark.parametrize("adapter_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_jobs_come_back_to_other_slots_to_the_last_bit(method: str, adapter_dtype: str, tmp_path: Path) -> None:
    """Each moves to a slot that had a job with another optimizer and other tensors."""
    stays, moves = (bank_of(method, adapter_dtype=adapter_dtype) for _ in range(2))
    for _ in range(2):
        stays.step()
        moves.step()
    store = StateStore(RunDir(tmp_path))
    for job in moves.jobs:
        parked(moves, job, store)
    for job, slot in zip(moves.jobs, [*range(2, len(moves.jobs)), 0, 1], strict=True):
        job.slot = slot
        moves.trainer.admit(job, slot, *read_state(store.folder(job.id, "last")))
    for _ in range(2):
        expected, found = stays.step(), moves.step()
        for job in stays.jobs:
            assert found[job.id].loss == expected[job.id].loss
            for name, update in expected[job.id].updates.items():
                assert torch.equal(found[job.id].updates[name], update), (job.id, name)


def test_a_new_job_finds_nothing_of_the_one_before_in_its_slot() -> None:
    """Admitted later, into the slot of another kind of job, it takes the same steps as from the beginning."""
    first, late = bank_of("classification"), bank_of("classification")
    expected = [first.step() for _ in range(2)]
    for _ in range(2):
        late.step()
    for job in late.jobs:
        assert job.slot is not None
        late.trainer.bank.release(job.slot)
    for job, slot in zip(late.jobs, [*range(3, len(late.jobs)), 0, 1, 2], strict=True):
        job.slot, job.step = slot, 0
        late.trainer.admit(job, slot)
    for of_step in expected:
        found = late.step()
        for job_id, facts in of_step.items():
            assert found[job_id].loss == facts.loss
            assert all(torch.equal(found[job_id].updates[name], facts.updates[name]) for name in facts.updates)


RUNG: dict[str, Any] = {"rungs": [[0.5, 1.0]], "detect_divergence": False, "detect_overfitting": False}
"""A rung at which all jobs wait and continue."""


@pytest.mark.parametrize(
    ("method", "jobs"),
    [
        ("sft", slice(1, 5)),
        pytest.param("classification", slice(2, 6), marks=SLOW),
        pytest.param("kto", slice(3, None), marks=SLOW),
    ],
)
def test_a_run_that_is_killed_and_resumed_is_equal_to_the_last_bit(
    method: str, jobs: slice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alto.executor.session.MAX_SAVING_FRACTION", 1e9)
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))
    task, data = METHODS[method](jobs, name="killed", max_slots=2, max_steps=6, eval_steps=0.5, early_exit=RUNG)
    whole = Run(tmp_path / "whole", task, model=llama, data=data)
    killed = Run(tmp_path / "killed", task.replace(checkpoint_interval_s=0), model=llama, data=data)
    whole.train()
    for turns in (4, 3):
        killed.train(turns, is_killed=True)
    killed.train()
    assert len(killed.events("task_resumed")) == 2
    assert killed.events("job_parked")
    assert curves(killed.folder) == curves(whole.folder)
    found, expected = (states(run.root) for run in (killed, whole))
    assert len(expected) == 3 * len(task.jobs), "best and last adapters, and optimizer states"
    assert found == expected


def states(root: Path) -> dict[str, bytes]:
    files = root.glob("jobs/*/*/*.safetensors")
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


SEARCHED = {
    "lr": {"min": 1e-4, "max": 1e-2, "log": True},
    "use_dora": [False, True],
    "bias": ["none", "lora_only", "all"],
    "paired": {"optim": ["adamw_torch", "sgd", "adafactor"], "optim_args": [None, {"momentum": 0.9}, None]},
}


@SLOW
def test_a_search_suggests_jobs_of_all_kinds_killed_or_not(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="needs the search extra: pip install -e '.[search]'")
    search = {**TPE, "num_initial_jobs": 2, "budget": {"jobs": 8}}
    task = make(search, search_space=SEARCHED, batch_size=4, r=4, max_steps=4, max_slots=2)
    whole, parted = (Run(tmp_path / name, task, model=llama) for name in ("whole", "parted"))
    whole.train()
    for turns in (3, 4):
        parted.train(turns)
    parted.train()
    assert parted.added() == whole.added()
    assert curves(parted.folder) == curves(whole.folder)
    configs = [event["config"] for event in whole.added()]
    assert len(configs) == 6
    for key in ("use_dora", "bias", "optim"):
        assert len({config[key] for config in configs}) > 1, key
    whole.assert_decided_as_journalled()
