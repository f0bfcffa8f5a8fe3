"""A task with bfloat16 moments: parked, killed, resumed and copied jobs continue with the same bits; plans count
them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from resident_jobs import DATA, STABLE, Bank, make_model, make_task
from safetensors.torch import load_file
from searches import PBT, SPACE, Run, make
from shared_executor import curves

from alto.errors import SpecError
from alto.executor.planned_job import plan_jobs
from alto.executor.profiling.measure import one_slot
from alto.executor.shared_bank import BankSize
from alto.spec import Task

RUNG = {"rungs": [[0.5, 1.0]], "detect_divergence": False, "detect_overfitting": False}
"""A rung at which all jobs wait and continue."""


def states(run: Run) -> dict[str, bytes]:
    files = run.root.glob("jobs/*/*/*.safetensors")
    return {str(path.relative_to(run.root)): path.read_bytes() for path in files}


def assert_equal_runs(found: Run, expected: Run) -> None:
    assert curves(found.folder) == curves(expected.folder)
    assert states(found) == states(expected)
    moments = list(expected.root.glob("jobs/*/last/optimizer.safetensors"))
    assert moments
    assert {part.dtype for path in moments for part in load_file(path).values()} == {torch.bfloat16}


@pytest.fixture(autouse=True)
def saves_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alto.executor.session.MAX_SAVING_FRACTION", 1e9)
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))


def test_a_run_that_parks_jobs_and_is_killed_and_resumed_is_equal_to_the_last_bit(tmp_path: Path) -> None:
    settings = {"max_slots": 2, "max_steps": 4, "eval_steps": 0.5, "early_exit": RUNG}
    task = make_task(STABLE[:3], optim_state_dtype="bfloat16", **settings)
    whole = Run(tmp_path / "whole", task)
    killed = Run(tmp_path / "killed", task.replace(checkpoint_interval_s=0))
    whole.train()
    for turns in (3, 2):
        killed.train(turns, is_killed=True)
    killed.train()
    assert len(killed.events("task_resumed")) == 2
    assert killed.events("job_parked")
    assert_equal_runs(killed, whole)


@pytest.mark.slow("campaigns")
def test_copies_of_a_population_continue_from_the_moments_of_their_origin(tmp_path: Path) -> None:
    task = make(PBT, optim_state_dtype="bfloat16", num_train_epochs=2, search_space=SPACE | {"r": [4]})
    whole, parted = (Run(tmp_path / name, task) for name in ("whole", "parted"))
    whole.train()
    for turns in (3, 4):
        parted.train(turns)
    parted.train()
    assert [event for event in whole.added() if event["forked_at"] is not None]
    assert_equal_runs(parted, whole)


@pytest.mark.parametrize(("state", "itemsize"), [(None, 4), ("float32", 4), ("bfloat16", 2)])
def test_the_bank_and_its_plan_have_moments_of_that_precision(state: str | None, itemsize: int) -> None:
    task = make_task(STABLE[:3], optim_state_dtype=state)
    bank = Bank(make_model("llama"), task)
    optimizer, rows = bank.trainer.optimizer, bank.trainer.bank.params_ZP
    assert {optimizer.exp_avg_ZP.itemsize, optimizer.exp_avg_sq_ZP.itemsize} == {itemsize}
    expected = rows.shape[1] * (4 + 4 + 2 * itemsize)
    planned = plan_jobs(task, bank.backbone.model, len(DATA.train))
    size = BankSize.of(planned, bank.backbone, num_slots=1, optim_state_dtype=task.optim_state_dtype)
    assert size.bytes_per_slot == expected
    assert one_slot(task, planned, bank.backbone).bytes_per_slot == expected


def test_steps_stay_those_of_float32_moments_but_for_rounding() -> None:
    usual, rounded = (
        Bank(make_model("llama"), make_task(STABLE[:3], optim_state_dtype=state)) for state in (None, "bfloat16")
    )
    differ = False
    for _ in range(8):
        usual.step()
        rounded.step()
    for job, other in zip(usual.jobs, rounded.jobs, strict=True):
        for name, pair in usual.trainer.bank.read(job.slot).items():
            for one, another in zip(pair, rounded.trainer.bank.read(other.slot)[name], strict=True):
                torch.testing.assert_close(another, one, rtol=0.0, atol=0.05 * job.config.learning_rate * 8)
                differ |= not torch.equal(another, one)
    assert differ


def test_a_job_with_another_optimizer_is_not_added() -> None:
    task = make_task(STABLE[:2], optim_state_dtype="bfloat16")
    with pytest.raises(SpecError, match=r"^optim_state_dtype should be left out with optim 'sgd'"):
        task.job_config({**task.jobs[0].config.to_dict(), "optim": "sgd"})
    assert isinstance(Task(**task.to_dict()), Task)
