"""Tasks on devices with too little memory: jobs end as with enough, or with a reason that states what would help."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from journals import entries
from tiny import curves_of, load_tiny, make_task, read_journal

from alto.data import TokenBatch
from alto.early_exit import audit
from alto.errors import DeviceMemoryError, NoResultError
from alto.executor import (
    RunInputs,
    TaskContext,
    TaskSession,
    Trainer,
    evaluator,
    recover,
    run_alone,
    session,
    shared_bank,
    trainer,
)
from alto.lora import AdapterBank
from alto.lora.row_optimizers import EightBitAdamW
from alto.records import ExitReason
from alto.runs import Journal, RunDir
from alto.spec import load_task

LOSS_TOLERANCE = 1e-5
JOBS = ["job-000", "job-001", "job-002"]


def run_in(folder: Path, **changes: Any) -> RunDir:
    """Create a run of three jobs of six steps."""
    settings = {
        "search_space": {"lr": [1e-4, 2e-4, 3e-4], "lora_dropout": [0.1]},
        "batch_size": 4,
        "num_train_epochs": 1,
        "target_modules": ["q_proj", "v_proj"],
        "early_exit": {"enabled": False},
    }
    return RunDir.create(folder / "runs", make_task(folder, **(settings | changes)))


def finish(run: RunDir) -> list[dict[str, Any]]:
    task, resume_state = load_task(run.task_file), recover(run)
    context = TaskContext.of(task, *load_tiny(task))
    with Journal(run.journal_file, past=resume_state.entries) as journal:
        run_alone(TaskSession(context, journal, RunInputs(run_dir=run, resume_state=resume_state)))
    return read_journal(run.root)


def assert_same_curves(found: list[dict[str, Any]], expected: list[dict[str, Any]], jobs: list[str]) -> None:
    assert audit(entries(found)) == ()
    curves, wanted = curves_of(found), curves_of(expected)
    for job in jobs:
        for mine, others in ((curves[job].train, wanted[job].train), (curves[job].validation, wanted[job].validation)):
            assert list(mine) == list(others)
            assert list(mine.values()) == pytest.approx(list(others.values()), rel=LOSS_TOLERANCE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return finish(run_in(tmp_path_factory.mktemp("undisturbed")))


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def small_device(monkeypatch: pytest.MonkeyPatch, fits: Callable[[TokenBatch], bool]) -> None:
    """Let only passes fit into memory for which ``fits`` returns true."""
    for module, name in ((trainer, "job_losses"), (evaluator, "micro_batch_terms")):
        op = getattr(module, name)

        def limited(backbone: Any, batch: TokenBatch, learners: Any, op: Any = op) -> Any:
            if not fits(batch):
                raise torch.OutOfMemoryError("no memory, as the test wants it")
            return op(backbone, batch, learners)

        monkeypatch.setattr(module, name, limited)


def test_a_task_on_a_small_device_ends_as_on_a_large_one(
    undisturbed: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_device(monkeypatch, lambda batch: sum(batch.job_tokens) <= 50)
    events = finish(run_in(tmp_path))
    assert_same_curves(events, undisturbed, JOBS)
    refused = of(events, "oom")
    assert {event["phase"] for event in refused} == {"forward"}
    assert refused[0]["residents"] == JOBS
    assert len(refused) < 6, "the lowered limit stays"
    assert 10 < refused[-1]["max_tokens_per_pass"] <= 50


def test_the_limit_survives_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_device(monkeypatch, lambda batch: sum(batch.job_tokens) <= 50)
    run = run_in(tmp_path, checkpoint_interval_s=0)
    monkeypatch.setattr(session, "MAX_SAVING_FRACTION", 1e9)
    update = Trainer.update

    def dies(self: Trainer, jobs: Any) -> torch.Tensor:
        if jobs[0].step == 4:
            raise KeyboardInterrupt
        return update(self, jobs)

    monkeypatch.setattr(Trainer, "update", dies)
    with pytest.raises(KeyboardInterrupt):
        finish(run)
    before = len(of(read_journal(run.root), "oom"))
    assert before
    monkeypatch.setattr(Trainer, "update", update)
    assert len(of(finish(run), "oom")) == before


def test_a_job_whose_row_never_fits_fails_and_its_siblings_go_on(
    undisturbed: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_device(monkeypatch, lambda batch: 1 not in batch.slots)
    events = finish(run_in(tmp_path))
    assert_same_curves(events, undisturbed, ["job-000", "job-002"])
    (exit,) = of(events, "job_exited")
    assert (exit["job"], exit["reason"], exit["step"]) == ("job-001", ExitReason.FAILED, 0)
    assert exit["evidence"]["row_tokens"] > 0
    assert all(event["job"] != "job-001" for event in of(events, "train"))


def test_a_validation_row_that_never_fits_fails_the_job_too(
    undisturbed: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_device(monkeypatch, lambda batch: torch.is_grad_enabled() or 1 not in batch.slots)
    events = finish(run_in(tmp_path))
    assert_same_curves(events, undisturbed, ["job-000", "job-002"])
    assert [event["job"] for event in of(events, "job_exited")] == ["job-001"]


def test_if_no_job_fits_the_error_says_what_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_device(monkeypatch, lambda batch: sum(batch.job_tokens) <= 13)
    with pytest.raises(
        NoResultError, match=r"3 of 3 jobs have a row .* tokens \(the largest .* has \d+\); lower max_length"
    ):
        finish(run_in(tmp_path))


def test_without_memory_for_the_update_everything_is_saved_and_can_be_resumed(
    undisturbed: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole").mkdir()
    whole = finish(run_in(tmp_path / "whole", optim="adamw_8bit"))
    run = run_in(tmp_path, optim="adamw_8bit")
    step = EightBitAdamW.step
    calls = itertools.count()

    def fails_for_the_second(self: EightBitAdamW, *args: Any, **kwargs: Any) -> None:
        if next(calls) >= 10:  # the second slot of the fourth step
            raise torch.OutOfMemoryError("no memory, as the test wants it")
        step(self, *args, **kwargs)

    monkeypatch.setattr(EightBitAdamW, "step", fails_for_the_second)
    with pytest.raises(DeviceMemoryError, match=r"optimizer step of 2 jobs; .* alto resume "):
        finish(run)
    monkeypatch.setattr(EightBitAdamW, "step", step)
    assert [event["phase"] for event in of(read_journal(run.root), "oom")] == ["update"] * 3
    assert_same_curves(finish(run), whole, JOBS)


def limit_slots(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    class Bank(AdapterBank):
        def __init__(self, layout: Any, num_slots: int, **settings: Any) -> None:
            if num_slots > most:
                raise torch.OutOfMemoryError("no memory, as the test wants it")
            super().__init__(layout, num_slots, **settings)

    monkeypatch.setattr(shared_bank, "AdapterBank", Bank)


def test_a_bank_that_does_not_fit_has_fewer_slots(
    undisturbed: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_slots(monkeypatch, 1)
    events = finish(run_in(tmp_path))
    assert_same_curves(events, undisturbed, JOBS)
    assert events[0]["max_slots"] == 1
    (refused,) = of(events, "oom")
    assert (refused["phase"], refused["num_slots"], refused["residents"]) == ("bank", 1, [])


def test_if_no_slot_fits_the_error_says_how_much_one_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_slots(monkeypatch, 0)
    with pytest.raises(DeviceMemoryError, match=r"one adapter of rank 16 on \d+ modules .* \(\d+\.\d MiB\); lower r"):
        finish(run_in(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="caps the memory of a process as Linux does")
def test_under_a_real_limit_a_task_ends_as_without(tmp_path: Path) -> None:
    """6 MiB do not hold a step of all four jobs of 463 tokens each; the real limit depends on the allocator."""
    free, capped = tmp_path / "free", tmp_path / "capped"
    capped.mkdir()
    path = os.pathsep.join(map(str, (Path(__file__).parents[1] / "support", *sys.path)))
    script = Path(__file__).parents[1] / "support" / "capped_task.py"
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, script, capped, "6"], env=environment, check=True, timeout=300)
    (root,) = (capped / "runs").iterdir()
    events = read_journal(root)
    refused = of(events, "oom")
    assert refused
    assert refused[-1]["max_tokens_per_pass"] < 4 * 463
    assert_same_curves(events, finish(RunDir.create(free, load_task(RunDir(root).task_file))), [*JOBS, "job-003"])
    assert not of(events, "job_exited")
