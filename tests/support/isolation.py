"""Checks of the isolation of jobs, for any method: a job that becomes NaN changes no other job; the division of a
step's rows into micro-batches does not matter; parking loses no bit; and dropout equals PEFT's with the same masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import SoloJob
from resident_jobs import DATA, LOSS_TOLERANCE, Bank, assert_same_step, make_task, state_of
from transformers import PreTrainedModel

from alto.data import EncodedDataset
from alto.executor import JobState
from alto.executor.checkpoint import StateStore, read_state, write_state
from alto.kernels import DropoutKey
from alto.kernels.dropout import dropout_factor
from alto.lora import ModuleNames, adaptable, write_adapter
from alto.runs import RunDir
from alto.spec import JobConfig

__all__ = [
    "assert_continues_to_the_last_bit",
    "assert_micro_batches_change_nothing",
    "assert_nan_stays_alone",
    "assert_step_is_that_of",
    "compare_dropped",
    "evaluations_beside",
]


def assert_nan_stays_alone(make: Callable[[], Bank], victim: int = 1, poison: str = "weights") -> None:
    """Check that two steps of all other jobs have the same bits beside a job of NaN.

    Args:
        make: Makes a bank, the same each time.
        victim: Index of the job that becomes NaN.
        poison: Place of the NaN: in its ``weights``, or in its ``moments``.
    """
    banks = [make() for _ in range(2)]
    for bank in banks:
        bank.step()
    broken = banks[1].jobs[victim]
    trainer = banks[1].trainer
    rows = {"weights": trainer.bank.params_ZP, "moments": trainer.optimizer.exp_avg_ZP}[poison]
    rows[broken.slot].fill_(float("nan"))
    for _ in range(2):
        clean, poisoned = (bank.step() for bank in banks)
        for job in banks[0].jobs:
            if job.id != broken.id:
                assert clean[job.id].loss == poisoned[job.id].loss
                assert clean[job.id].grad_norm == poisoned[job.id].grad_norm
                for kind in ("gradients", "updates"):
                    for name, tensor in getattr(clean[job.id], kind).items():
                        assert torch.equal(tensor, getattr(poisoned[job.id], kind)[name])
    assert poisoned[broken.id].loss != poisoned[broken.id].loss, (
        "the victim itself must be NaN, or the test proves nothing"
    )
    for job, *worths in zip(banks[0].jobs, *(bank.trainer.evaluate(bank.jobs) for bank in banks), strict=True):
        assert (worths[0] == worths[1]) == (job.id != broken.id)


def assert_step_is_that_of(solos: Sequence[Any], bank: Bank) -> None:
    """Check that the next step of every job of ``bank`` equals that of its solo, from equal state."""
    states, found = [state_of(bank, job) for job in bank.jobs], bank.step()
    for job, solo, state in zip(bank.jobs, solos, states, strict=True):
        solo.load(*state)
        assert_same_step(found[job.id], solo.train_step())


def evaluations_beside(
    solos: Sequence[Any], bank: Bank, rows: EncodedDataset
) -> Iterator[tuple[JobState, dict[str, float], dict[str, float]]]:
    """Evaluate all jobs of ``bank`` and, from equal state, their solos on ``rows``; check that their losses are the
    same.

    Returns:
        For every job its metrics in the bank, and what its solo finds.
    """
    for job, solo, worth in zip(bank.jobs, solos, bank.trainer.evaluate(bank.jobs), strict=True):
        solo.load(*state_of(bank, job))
        expected = solo.evaluate(rows)
        assert worth.loss == pytest.approx(expected["loss"], rel=LOSS_TOLERANCE)
        yield job, worth.metrics, expected


def assert_micro_batches_change_nothing(whole: Bank, split: Bank) -> None:
    """Check that two steps, each from equal state, and an evaluation are the same if the rows of a job are divided.

    Args:
        whole: A bank whose micro-batches take all rows of a step.
        split: The same jobs with smaller micro-batches.
    """
    for _ in range(2):
        expected, found = whole.step(), split.step()
        for job in whole.jobs:
            assert_same_step(found[job.id], expected[job.id])
        for mine, others in zip(split.jobs, whole.jobs, strict=True):  # continue from equal state
            weights, optimizer = state_of(whole, others)
            split.trainer.bank.write(mine.slot, weights)
            split.trainer.optimizer.write(mine.slot, mine.config.optim, optimizer)
    for found, expected in zip(split.trainer.evaluate(split.jobs), whole.trainer.evaluate(whole.jobs), strict=True):
        assert found.loss == pytest.approx(expected.loss, rel=LOSS_TOLERANCE)
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)


def assert_continues_to_the_last_bit(
    model: Callable[[], PreTrainedModel], configs: list[dict[str, Any]], folder: Path
) -> None:
    """Check that jobs that were parked on disk continue as if they had stayed."""
    stays, leaves, back = (Bank(model(), make_task(configs)) for _ in range(3))
    names = ModuleNames.of(model())
    for bank in (stays, leaves):
        bank.step()
        bank.step()
    store = StateStore(RunDir(folder))
    for before, after in zip(leaves.jobs, back.jobs, strict=True):

        def fill(folder: Path, job: Any = before) -> None:
            write_adapter(folder, leaves.trainer.bank.read(job.slot), job.config, "unused", names)
            write_state(folder, leaves.trainer.optimizer.read(job.slot))

        store.save(before.id, "last", before.step, fill)
        after.step = before.step
        back.trainer.admit(after, after.slot, *read_state(store.folder(after.id, "last")))
    for _ in range(2):
        expected, found = stays.step(), back.step()
        for job in stays.jobs:
            assert found[job.id].loss == expected[job.id].loss
            for name, update in expected[job.id].updates.items():
                assert torch.equal(found[job.id].updates[name], update)


class _SameMask(torch.nn.Module):
    """PEFT's dropout with the masks of ALTO, whose key is the job, the step and the input of the module."""

    def __init__(self, config: JobConfig, number: int) -> None:
        super().__init__()
        self._config, self._number, self._step = config, number, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = DropoutKey(self._config.lora_dropout, self._config.seed, self._step)
        self._step += 1
        return x * dropout_factor(key, self._number, x.shape[1], x.shape[2], x.device)


def compare_dropped(model: Callable[[], PreTrainedModel], bank: Bank, num_steps: int = 2) -> None:
    """Check that jobs that train one row per step have PEFT's steps under the same masks of dropout.

    PEFT's batch of one row has no padding, so a token has the position by which its mask is keyed.
    """
    numbers = {module.name: number for number, module in enumerate(adaptable(bank.backbone.model))}
    for names in bank.trainer.bank.layout.shared_inputs:
        numbers |= dict.fromkeys(names, numbers[names[0]])
    solos = []
    for job in bank.jobs:
        masks = (lambda name, _, job=job: _SameMask(job.config, numbers[name])) if job.config.lora_dropout else None
        solo = SoloJob(model(), DATA.train, job.config, dropout=masks)
        solo.load(bank.trainer.bank.read(job.slot))
        solos.append(solo)
    for _ in range(num_steps):
        found = bank.step()
        for job, solo in zip(bank.jobs, solos, strict=True):
            assert_same_step(found[job.id], solo.train_step())
