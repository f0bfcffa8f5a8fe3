"""Checks by a rank of its own jobs, which train biases, magnitudes and noise under every optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from biased_models import bloom, llama, starcoder2
from job_kinds import KINDS, ON_BLOOM, Config, same_but_rounding
from noise import same_noise
from oracle import SoloJob
from rank_jobs import Slots, joined, sharded, train
from resident_jobs import DATA, make_task
from transformers import PreTrainedModel

__all__ = ["steps_of_all_kinds_are_those_of_peft_alone", "train_all_kinds"]

MODELS: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, Config]]] = {
    "llama": (llama, KINDS),
    "starcoder2": (starcoder2, KINDS),
    "bloom": (bloom, ON_BLOOM),
}
SPREAD = ("bias-sgd", "dora-bias-adafactor", "everything-adamw")
"""Jobs that are trained by all ranks together."""


def steps_of_all_kinds_are_those_of_peft_alone(name: str) -> None:
    """Check steps from equal state: once job by job, once with jobs that train on all ranks."""
    ranks, (model, kinds) = joined(), MODELS[name]
    for is_data_parallel, configs in ((False, list(kinds.values())), (True, [kinds[kind] for kind in SPREAD])):
        slots = Slots(sharded(model(), ranks), make_task(configs), ranks, is_data_parallel=is_data_parallel)
        num_checked = 0
        for _ in range(2):
            states = {
                job.id: (slots.trainer.bank.read(local_slot), slots.trainer.optimizer.read(local_slot))
                for job, local_slot in slots.here(slots.jobs)
            }
            found = slots.step()
            for job in slots.jobs:
                if job.id in found:
                    alone = SoloJob(model(), DATA.train, job.config)
                    alone.load(*states[job.id])
                    with same_noise(alone):
                        same_but_rounding(found[job.id], alone.train_step())
                    num_checked += 1
        assert num_checked >= 2 * (len(configs) // (1 if is_data_parallel else ranks.size))


def train_all_kinds(folder: str, interrupt_after: int | None = None) -> None:
    """Train the task of the run in ``folder``, to its end or for a number of turns."""
    assert Path(folder).is_dir()
    train(folder, interrupt_after, model=llama)
