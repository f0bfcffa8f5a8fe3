"""Tasks in one executor where memory runs out, a bank cannot grow, or an error belongs to one task or to none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_executor import SETTINGS, Curves, SharedExecutor, assert_as_alone, curves_alone, events_of, tasks

from alto.errors import DeviceMemoryError, RunBusyError, RunError, RunWriteError
from alto.executor import Hooks, JobState, shared_bank
from alto.executor.micro_batches import NoMemoryError, RowTooLargeError
from alto.executor.shared_bank import build_trainer
from alto.executor.trainer import Trainer
from alto.runs import JobAction, Mailbox


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Curves:
    return curves_alone(
        tmp_path_factory.mktemp("alone"), {name: tasks()[name] for name in ("ash", "birch", "cedar", "elm")}
    )


def full(*_: object) -> None:
    raise RunWriteError("the disk is full, as the test wants it")


def limit_slots(patch: pytest.MonkeyPatch, most: int) -> None:
    """Let no bank with more slots fit into memory."""

    def limited(backbone: Any, size: Any, *args: Any) -> Trainer:
        if size.num_slots > most:
            raise NoMemoryError("bank")
        return build_trainer(backbone, size, *args)

    patch.setattr(shared_bank, "build_trainer", limited)


def of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in events_of(folder) if event["event"] == kind]


def test_a_row_that_does_not_fit_fails_a_job_of_its_task(
    tmp_path: Path, alone: Curves, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = Trainer.backward

    def too_large(self: Trainer, jobs: Sequence[JobState]) -> torch.Tensor:
        (job,) = cedar.state.jobs.values()
        if job in jobs:
            assert job.slot is not None
            raise RowTooLargeError(job.slot, 77, 0)
        return backward(self, jobs)

    with SharedExecutor(tmp_path) as shared:
        for name in ("ash", "cedar"):
            shared.attach(name, *tasks()[name])
        cedar = shared.executor.sessions["cedar"]
        shared.turn(2)
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "backward", too_large)
            patch.setattr("alto.scheduler.TokenShares.choose", lambda *_: ("ash", "cedar"))
            shared.turn()
        assert not shared.ended
        shared.finish()
    (event,) = of(tmp_path / "cedar", "job_exited")
    assert (event["job"], event["reason"], event["evidence"]["row_tokens"]) == ("job-000", "failed", 77)
    assert_as_alone(tmp_path, ("ash",), alone)


def test_without_memory_for_the_update_every_task_is_saved(
    tmp_path: Path, alone: Curves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes the task whose jobs have already stepped, and the one that was not in the step."""
    names, update = ("ash", "cedar", "elm"), Trainer.update

    def for_the_first(self: Trainer, jobs: Sequence[JobState]) -> torch.Tensor:
        update(self, jobs[:1])
        raise DeviceMemoryError("none left, as the test wants it")

    def steps() -> dict[str, list[int]]:
        return {name: [job.step for job in shared.executor.sessions[name].state.jobs.values()] for name in names}

    with SharedExecutor(tmp_path) as shared:
        for name in names:
            shared.attach(name, *tasks()[name])
        shared.turn(3)
        before = [step for name in names for step in steps()[name]]
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "update", for_the_first)
            patch.setattr("alto.scheduler.TokenShares.choose", lambda *_: ("ash", "cedar"))
            with pytest.raises(DeviceMemoryError):
                shared.turn()
        first, second, *others = [step for name in names for step in steps()[name]]
        assert [first - 1, second, *others] == before
        found = steps()
    for name in names:
        assert [saved["step"] for saved in of(tmp_path / name, "checkpoint")[-1]["jobs"].values()] == found[name]
    with SharedExecutor(tmp_path) as shared:
        for name in names:
            shared.attach(name, *tasks()[name])
        shared.finish()
    assert_as_alone(tmp_path, names, alone)


def test_a_task_that_does_not_fit_is_refused_and_the_others_continue(
    tmp_path: Path, alone: Curves, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(backbone: Any, size: Any, *args: Any) -> Trainer:
        if size.max_rank > 8:
            raise NoMemoryError("bank")
        return build_trainer(backbone, size, *args)

    with SharedExecutor(tmp_path) as shared:
        shared.attach("ash", *tasks()["ash"])
        shared.turn(2)
        slots = shared.executor.sessions["ash"].state.slots()
        with monkeypatch.context() as patch:
            patch.setattr(shared_bank, "build_trainer", small)
            with pytest.raises(DeviceMemoryError, match="one adapter of rank 16"):
                shared.attach("birch", *tasks()["birch"])
            assert shared.executor.sessions["ash"].state.slots() == slots
            shared.turn()
            shared.attach("elm", *tasks()["elm"])
        shared.finish()
    assert shared.ended == dict.fromkeys(("ash", "elm"))
    assert "job_parked" not in [event["event"] for event in events_of(tmp_path / "ash")]
    assert_as_alone(tmp_path, ("ash", "elm"), alone)


@pytest.mark.parametrize("is_full", [False, True])
def test_jobs_that_a_smaller_bank_has_no_slot_for_are_parked(
    is_full: bool, tmp_path: Path, alone: Curves, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SharedExecutor(tmp_path) as shared:
        for name in ("elm", "ash"):
            shared.attach(name, *tasks()[name])
        shared.turn(2)
        limit_slots(monkeypatch, 2)
        if is_full:
            monkeypatch.setattr(shared.executor.sessions["ash"]._recorder, "job_parked", full)
        shared.attach("birch", *tasks()["birch"])
        assert [event["num_slots"] for event in of(tmp_path / "birch", "oom")] == [2]
        assert not of(tmp_path / "elm", "oom")
        shared.turn()
        if is_full:
            assert isinstance(shared.ended["ash"], RunWriteError)
        else:
            assert [event["reason"] for event in of(tmp_path / "ash", "job_parked")] == ["fewer_slots"]
        shared.finish()
    assert_as_alone(tmp_path, ("elm", "birch", *(() if is_full else ("ash",))), alone)


def test_what_has_fitted_into_memory_is_known_to_those_who_come_later(tmp_path: Path) -> None:
    with SharedExecutor(tmp_path) as shared:
        shared.attach("ash", *tasks()["ash"])
        shared.turn()
        shared.executor.bank.trainer.passes.micro_batches.max_tokens = 60  # as after memory has run out
        for name in ("elm", "birch"):  # the second needs a new bank
            shared.attach(name, *tasks()[name])
            assert shared.executor.bank.trainer.passes.micro_batches.max_tokens == 60
        while "birch" in shared.executor.sessions:
            shared.turn()
        assert shared.executor.bank.trainer.passes.micro_batches.max_tokens == 60


def test_a_run_whose_lock_is_lost_is_not_written_for_the_sake_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise RunBusyError("another process works on it, as the test wants it")

    with SharedExecutor(tmp_path) as shared:
        for name in ("ash", "elm"):
            shared.attach(name, *tasks()[name])
        shared.turn(2)
        elm = shared.executor.sessions["elm"]
        monkeypatch.setattr(elm._start.run_dir, "check_lock", lost)
        files = {path: path.stat().st_mtime_ns for path in (tmp_path / "elm").rglob("*")}
        shared.attach("birch", *tasks()["birch"])
        shared.turn()
        assert isinstance(shared.ended["elm"], RunBusyError)
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "elm").rglob("*")} == files
        shared.finish()


@pytest.mark.parametrize("where", ["step", "evaluation", "bank"])
def test_a_device_that_cannot_be_used_again_ends_all(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise torch.AcceleratorError("an illegal memory access, as the test wants it")

    with SharedExecutor(tmp_path) as shared:
        for name in ("ash", "elm"):
            shared.attach(name, *tasks()[name])
        shared.turn()
        elm = shared.executor.sessions["elm"]
        if where == "step":
            monkeypatch.setattr(shared.executor.bank.trainer, "backward", lost)
        else:
            monkeypatch.setattr(*(elm, "stepped") if where == "evaluation" else (elm.state.slot_manager, "save"), lost)
        with pytest.raises(torch.AcceleratorError):
            shared.turn() if where != "bank" else shared.attach("birch", *tasks()["birch"])
        assert not shared.ended


def test_an_error_of_a_step_that_no_task_has_by_itself_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = Trainer.backward

    def fails_together(self: Trainer, jobs: Sequence[JobState]) -> torch.Tensor:
        if len({id(job.context) for job in jobs}) > 1:
            raise ZeroDivisionError("of both, as the test wants it")
        return backward(self, jobs)

    with SharedExecutor(tmp_path) as shared:
        for name in ("ash", "elm"):
            shared.attach(name, *tasks()[name])
        shared.turn()
        monkeypatch.setattr(Trainer, "backward", fails_together)
        with pytest.raises(ZeroDivisionError, match="of both"):
            shared.turn()
        assert not shared.ended


def test_a_run_that_cannot_be_built_leaves_no_limit_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RunError("as the test wants it")

    with SharedExecutor(tmp_path) as shared:
        shared.attach("ash", *tasks()["ash"])
        shared.turn()
        elm, data = tasks()["elm"]
        with monkeypatch.context() as patch:
            patch.setattr("alto.executor.session.Control", fail)
            with pytest.raises(RunError):
                shared.attach("elm", elm.replace(max_tokens_per_pass=50), data)
        assert shared.executor.bank.trainer.passes.micro_batches.max_tokens == SETTINGS["max_tokens_per_pass"]


def test_a_task_that_cannot_leave_a_bank_takes_no_step_before_it_ends(
    tmp_path: Path, alone: Curves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clone in another task makes the bank grow when this task's turn has begun and its checkpoint is due."""

    def full(*_: object) -> None:
        monkeypatch.setattr(slot_manager, "save", save)  # only once
        raise RunWriteError("the disk is full, as the test wants it")

    with SharedExecutor(tmp_path) as shared:
        for name in ("ash", "cedar"):
            shared.attach(name, *tasks()[name])
        shared.turn(2)
        ash, cedar = shared.executor.sessions["ash"], shared.executor.sessions["cedar"]
        ash.save()
        shared.turn(2)
        ash._next_save_at = 0.0
        slot_manager, save = ash.state.slot_manager, ash.state.slot_manager.save
        monkeypatch.setattr(slot_manager, "save", full)
        Mailbox(cedar._start.run_dir).send(JobAction.CLONE, "job-000", changes={"r": 32})
        shared.turn()
        assert isinstance(shared.ended["ash"], RunWriteError)
        shared.attach("ash", *tasks()["ash"])
        shared.finish()
    assert_as_alone(tmp_path, ("ash",), alone)


@pytest.mark.parametrize("failing", ["read_state", "Trainer.admit"])
def test_a_state_that_cannot_be_read_ends_its_task_alone(
    failing: str, tmp_path: Path, alone: Curves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot is free for others, whether the state was missing or belonged to another adapter."""
    stop_requests: list[bool] = []

    def broken(self: object, *_: object) -> None:
        if isinstance(self, Trainer):
            self.bank.occupy(_[1], _[0].shape)  # type: ignore[attr-defined, arg-type, index]
        raise RunError("not readable, as the test wants it")

    with SharedExecutor(tmp_path) as shared:
        shared.attach("ash", *tasks()["ash"], hooks=Hooks(is_interrupted=lambda: bool(stop_requests)))
        shared.attach("elm", *tasks()["elm"])
        shared.turn(3)
        stop_requests.append(True)
        shared.turn()
        with monkeypatch.context() as patch:
            patch.setattr(f"alto.executor.slot_manager.{failing}", broken)
            with pytest.raises(RunError, match="not readable"):
                shared.attach("ash", *tasks()["ash"])
        shared.turn()
        bank = shared.executor.bank.trainer.bank
        assert sum(not bank.is_free(slot) for slot in range(bank.num_slots)) == 1
        shared.finish()
    assert_as_alone(tmp_path, ("elm",), alone)
