"""``ap``: ALTO. The base sharded over the ranks, the adapters dealt out to them."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch.distributed as dist
from kernels_lib.variants import JobFacts
from kernels_lib.workload import Workload
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.backbone.sharding import find_roots, shard
from alto.executor import JobRun, Trainer, plan_jobs
from alto.executor.ranks import Ranks
from alto.lora import AdapterWeights, linear_modules

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
        self._runs: dict[int, list[JobRun]] = {}
        self._trainer = Trainer(
            self._backbone,
            workload.data,
            modules=linear_modules(model),
            max_rank=max(workload.ranks),
            num_slots=len(workload.ranks) // ranks.size,
            max_tokens_per_pass=workload.max_tokens_per_pass,
            optims={run.config.optim for run in self.runs(1)},
            ranks=ranks,
        )
        for run in self.runs(1):
            place = self._trainer.place(run)
            if place is not None:
                self._trainer.admit_fresh(run, place)

    def runs(self, batch_size: int) -> list[JobRun]:
        """The jobs, seated in the slots of all ranks, before their first step."""
        if batch_size not in self._runs:
            runs = plan_jobs(self._workload.task(batch_size), self._backbone, self._workload.data)
            for slot, run in enumerate(runs):
                run.slot = slot
            self._runs[batch_size] = runs
        return self._runs[batch_size]

    def step(self, batch_size: int) -> None:
        self._trainer.step(self.runs(batch_size))

    def facts(self, batch_size: int, weights: Sequence[AdapterWeights]) -> dict[int, JobFacts]:
        bank, runs = self._trainer.bank, self.runs(batch_size)
        places = {job: place for job, run in enumerate(runs) if (place := self._trainer.place(run)) is not None}
        for job, place in places.items():
            self._trainer.admit_warm(runs[job], place, weights[job])
        losses = self._trainer.backward(runs)
        found = {}
        for job, place in places.items():
            gradients = {m.name: (a.clone(), b.clone()) for m, a, b in bank.matrices(bank.grads_ZP, place)}
            found[job] = JobFacts(loss=float(losses[job]), gradients=gradients)
        bank.grads_ZP.zero_()
        return found
