"""``ap``: ALTO. The base sharded over the ranks, the adapters dealt out to them."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch.distributed as dist
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.backbone.sharding import find_roots, shard
from alto.executor import BankSize, JobState, MicroBatches, TaskContext, build_trainer, initial_states
from alto.executor.ranks import Ranks
from alto.lora import AdapterWeights
from benchmarks.kernels.variants import JobFacts
from benchmarks.kernels.workload import Workload

__all__ = ["AdapterParallel"]


class AdapterParallel:
    """The trainer as the executor has it, with as many adapters on every rank."""

    def __init__(self, base: PreTrainedModel, workload: Workload) -> None:
        self._workload = workload
        ranks = Ranks(dist.get_rank(), dist.get_world_size())
        mesh = ranks.mesh(base.device)
        assert mesh is not None
        model = copy.deepcopy(base)
        shard(model, mesh)
        find_roots(model)
        self._backbone = Backbone(model, None, "random")
        self._ranks = ranks
        self._jobs: dict[int, list[JobState]] = {}
        micro_batches = MicroBatches(workload.max_tokens_per_pass, lambda event: None, can_retry=False)
        size = BankSize.of(
            [job.planned for job in self.jobs(1)], self._backbone, num_slots=len(workload.ranks) // ranks.size
        )
        self._trainer = build_trainer(self._backbone, size, micro_batches, ranks)
        for job in self.jobs(1):
            local_slot = self._trainer.local_slot(job)
            if local_slot is not None:
                self._trainer.admit_fresh(job, local_slot)

    def jobs(self, batch_size: int) -> list[JobState]:
        """The jobs, in the slots of all ranks, before their first step."""
        if batch_size not in self._jobs:
            task = self._workload.task(batch_size)
            jobs = initial_states(TaskContext.of(task, self._backbone, self._workload.data, self._ranks))
            for slot, job in enumerate(jobs):
                job.slot = slot
            self._jobs[batch_size] = jobs
        return self._jobs[batch_size]

    def step(self, batch_size: int) -> None:
        self._trainer.step(self.jobs(batch_size))

    def facts(self, batch_size: int, weights: Sequence[AdapterWeights]) -> dict[int, JobFacts]:
        bank, jobs = self._trainer.bank, self.jobs(batch_size)
        held = {
            index: local_slot
            for index, job in enumerate(jobs)
            if (local_slot := self._trainer.local_slot(job)) is not None
        }
        for index, local_slot in held.items():
            self._trainer.admit_warm(jobs[index], local_slot, weights[index])
        losses = self._trainer.backward(jobs)
        found = {}
        for index, local_slot in held.items():
            gradients = bank.read(local_slot, bank.grads_ZP)
            found[index] = JobFacts(loss=float(losses[index]), gradients=gradients)
        bank.grads_ZP.zero_()
        return found
