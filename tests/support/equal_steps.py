"""What every kind of job is held to: steps beside others are PEFT's alone, NaN stays alone, parking loses no bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oracle import SoloJob
from resident_jobs import DATA, Bank, assert_same_step, make_task
from torch import equal
from transformers import PreTrainedModel

from alto.executor.checkpoint import StateStore, read_state, write_state
from alto.lora import ModuleNames, write_adapter
from alto.runs import RunDir


def compare(model: Callable[[], PreTrainedModel], bank: Bank, num_steps: int = 3) -> None:
    """Every job's next steps are PEFT's, each from equal state."""
    for _ in range(num_steps):
        states = [(bank.trainer.bank.read(job.slot), bank.trainer.optimizer.read(job.slot)) for job in bank.jobs]
        found = bank.step()
        for job, state in zip(bank.jobs, states, strict=True):
            solo = SoloJob(model(), DATA.train, job.config)
            solo.load(*state)
            assert_same_step(found[job.id], solo.train_step())


def assert_nan_stays_alone(
    model: Callable[[], PreTrainedModel], configs: list[dict[str, Any]], slots: Sequence[int]
) -> None:
    """The first job goes NaN; no other job changes by one bit."""
    banks = [Bank(model(), make_task(configs), slots=list(slots)) for _ in range(2)]
    for bank in banks:
        bank.step()
    victim = banks[1].jobs[0]
    banks[1].trainer.bank.params_ZP[victim.slot].fill_(float("nan"))
    for _ in range(2):
        clean, poisoned = (bank.step() for bank in banks)
        for job in banks[0].jobs:
            if job.id != victim.id:
                assert clean[job.id].loss == poisoned[job.id].loss
                for kind in ("gradients", "updates"):
                    for name, tensor in getattr(clean[job.id], kind).items():
                        assert equal(tensor, getattr(poisoned[job.id], kind)[name])
    assert poisoned[victim.id].loss != poisoned[victim.id].loss, "the victim itself must be NaN, or nothing was shown"


def assert_continues_to_the_last_bit(
    model: Callable[[], PreTrainedModel], configs: list[dict[str, Any]], folder: Path
) -> None:
    """Jobs that were parked on disk continue as if they had stayed."""
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
        back.trainer.readmit(after, after.slot, *read_state(store.folder(after.id, "last")))
    for _ in range(2):
        expected, found = stays.step(), back.step()
        for job in stays.jobs:
            assert found[job.id].loss == expected[job.id].loss
            for name, update in expected[job.id].updates.items():
                assert equal(found[job.id].updates[name], update)
