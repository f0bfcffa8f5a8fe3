"""The batches of the next step are made before this step's losses are read, and no bit of any step changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from resident_jobs import Bank, make_model, make_task

from alto.data import JobRows, TokenBatch
from alto.executor import forward_plan, trainer
from alto.executor.forward_plan import PreparedStep
from alto.kernels import DropoutKey, TokenSchedule

CONFIGS: list[dict[str, object]] = [
    {"lr": 1e-3, "r": 4, "batch_size": 3, "seed": 1, "lora_dropout": 0.3},
    {"lr": 5e-4, "r": 8, "batch_size": 4, "seed": 2, "lora_dropout": 0.1},
    {"lr": 2e-4, "r": 2, "batch_size": 5, "seed": 3, "lora_dropout": 0.0},
]
CPU = torch.device("cpu")


def make_bank(**settings: object) -> Bank:
    return Bank(make_model("llama"), make_task(CONFIGS, **settings))


def step(bank: Bank, *, prepares: bool = True) -> list[float]:
    losses = bank.trainer.backward(bank.jobs)
    bank.trainer.update(bank.jobs)
    if prepares:
        bank.trainer.prepare(bank.jobs)
    values = bank.trainer.read(losses)
    for job in bank.jobs:
        job.step += 1
    return values


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The events in order: a batch was made, a loss was read."""
    happened: list[str] = []
    collate, read = forward_plan.collate, trainer.Trainer.read

    def noted_collate(parts: Sequence[JobRows], device: torch.device) -> TokenBatch:
        happened.append("collate")
        return collate(parts, device)

    def noted_read(self: trainer.Trainer, losses: torch.Tensor) -> list[float]:
        happened.append("read")
        return read(self, losses)

    monkeypatch.setattr(forward_plan, "collate", noted_collate)
    monkeypatch.setattr(trainer.Trainer, "read", noted_read)
    return happened


def test_the_next_batch_is_made_before_the_losses_are_read(events: list[str]) -> None:
    bank = make_bank()
    for _ in range(3):
        bank.trainer.step(bank.jobs)
        for job in bank.jobs:
            job.step += 1
    assert events == ["collate", "collate", "read", "collate", "read", "collate", "read"]


def test_so_are_those_of_several_micro_batches(events: list[str]) -> None:
    bank = make_bank(max_tokens_per_pass=60)
    bank.trainer.backward(bank.jobs)
    bank.trainer.update(bank.jobs)
    events.clear()
    bank.trainer.prepare(bank.jobs)
    assert len(events) == len(bank.trainer.passes.prepared._schedules) > 2
    for job in bank.jobs:
        job.step += 1
    events.clear()
    bank.trainer.backward(bank.jobs)
    assert events == []
    assert not bank.trainer.passes.prepared._schedules, "the schedules were those that the step needed"


@pytest.mark.parametrize("settings", [{}, {"max_tokens_per_pass": 60}], ids=["one micro-batch", "several"])
def test_preparing_changes_no_bit(settings: dict[str, object]) -> None:
    prepared, plain = make_bank(**settings), make_bank(**settings)
    for _ in range(6):
        assert step(prepared) == step(plain, prepares=False)
    assert torch.equal(prepared.trainer.bank.params_ZP, plain.trainer.bank.params_ZP)
    assert torch.equal(prepared.trainer.optimizer.exp_avg_ZP, plain.trainer.optimizer.exp_avg_ZP)


def test_a_step_of_other_jobs_or_smaller_micro_batches_makes_its_own(events: list[str]) -> None:
    prepared, plain = make_bank(), make_bank()
    step(prepared), step(plain, prepares=False)
    for bank in (prepared, plain):
        bank.jobs = bank.jobs[1:]
    events.clear()
    assert step(prepared) == step(plain, prepares=False)
    assert events == ["collate", "collate", "read", "collate", "read"]
    prepared.trainer.passes.micro_batches.max_tokens = plain.trainer.passes.micro_batches.max_tokens = 60
    assert step(prepared) == step(plain, prepares=False)
    assert torch.equal(prepared.trainer.bank.params_ZP, plain.trainer.bank.params_ZP)


def test_rows_that_cannot_be_read_are_an_error_where_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = make_bank()

    def broken(parts: Sequence[JobRows], device: torch.device) -> TokenBatch:
        raise OSError("the file is gone")

    expected = step(make_bank())
    losses = bank.trainer.backward(bank.jobs)
    bank.trainer.update(bank.jobs)
    with monkeypatch.context() as patch:
        patch.setattr(forward_plan, "collate", broken)
        with pytest.raises(OSError, match="the file is gone"):
            bank.trainer.prepare(bank.jobs)
    assert bank.trainer.read(losses) == expected, "a finished step was lost"


def test_memory_that_is_missing_for_the_next_batch_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, plain = make_bank(), make_bank()
    for bank in (prepared, plain):
        bank.trainer.backward(bank.jobs)
        bank.trainer.update(bank.jobs)

    def full(parts: Sequence[JobRows], device: torch.device) -> TokenBatch:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(forward_plan, "collate", full)
        prepared.trainer.prepare(prepared.jobs)
    for bank in (prepared, plain):
        for job in bank.jobs:
            job.step += 1
    assert step(prepared) == step(plain, prepares=False)


def test_nothing_is_prepared_past_the_last_step(events: list[str]) -> None:
    bank = make_bank()
    bank.jobs = bank.jobs[:1]
    bank.jobs[0].step = bank.jobs[0].total_steps - 1
    bank.trainer.step(bank.jobs)
    assert events == ["collate", "read"]


def test_tables_of_a_schedule_are_copied_when_it_is_prepared() -> None:
    def schedule(step: int) -> TokenSchedule:
        return TokenSchedule.build([1, 0], [5, 70], [2.0, 1.0], [DropoutKey(0.5, 3, step, 0), None])

    prepared = PreparedStep()
    first = prepared.take_schedule(schedule(0))
    first.table(CPU), first.slots_of_tokens(CPU)
    prepared.add([], make_batch(), schedule(1))
    second = prepared.take_schedule(schedule(1))
    assert second._tables.keys() == {CPU}
    assert second._copies.keys() == {("slots_of_tokens", CPU)}
    third = prepared.take_schedule(schedule(2))
    assert not third._tables
    assert not third._copies
    assert torch.equal(second.table(CPU).blocks_B6, schedule(1).table(CPU).blocks_B6)


def make_batch() -> TokenBatch:
    bank = make_bank()
    return forward_plan.collate([JobRows(bank.jobs[0].context.data.train, 0, (0, 1))], CPU)
