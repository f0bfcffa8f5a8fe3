"""One training step of many jobs, done in seven ways on the same frozen weights and the same tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.backbone.sharding import find_roots, shard
from alto.data import TokenBatch
from alto.executor import BankSize, JobState, MicroBatches, Ranks, TaskContext, build_trainer, initial_states
from alto.lora import AdapterWeights, adapter_scale, linear_modules
from alto.objectives import Learners, find_objective, job_losses
from benchmarks.baselines import grouped_mm, loop, lorafusion
from benchmarks.baselines.bare_peft import loss_sum
from benchmarks.baselines.stacked import MAX_GRAD_NORM, AfterBase, JobTokens, Products, StackedAdapters, share
from benchmarks.kernels.workload import LEARNING_RATE, Workload

__all__ = ["VARIANTS", "JobFacts", "Ours", "Sequential", "Variant", "build", "peft_model", "usable_variants"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """The results of one job's forward and backward pass.

    Attributes:
        loss: Nats per trained token.
        gradients: Gradients of ``A`` as ``[K, r]`` and of ``B`` as ``[r, N]``, by module; empty without an adapter.
    """

    loss: float
    gradients: AdapterWeights


class Variant(Protocol):
    """One way to do the step."""

    def backward(self, batch_size: int) -> list[float]:
        """Run forward and backward pass of all jobs and return their losses; gradients are added to existing ones."""

    def step(self, batch_size: int) -> None:
        """Run a whole training step of all jobs."""

    def facts(self, batch_size: int, weights: Sequence[AdapterWeights]) -> list[JobFacts]:
        """Return losses and gradients of all jobs with these adapters."""


class Frozen:
    """The floor: the base alone, forward and backward of activations, no adapters."""

    def __init__(self, base: PreTrainedModel, workload: Workload) -> None:
        self._backbone = Backbone(share(base), None, "random")
        self._workload = workload
        # No weight requires grad, so the backward pass needs an input that does.
        embeddings = self._backbone.model.get_input_embeddings()
        embeddings.register_forward_hook(lambda module, inputs, output: output.requires_grad_(torch.is_grad_enabled()))

    def backward(self, batch_size: int) -> list[float]:
        return _batched_backward(self._backbone, self._workload, batch_size, lambda batch: nullcontext())

    def step(self, batch_size: int) -> None:
        self.backward(batch_size)

    def facts(self, batch_size: int, weights: Sequence[AdapterWeights]) -> list[JobFacts]:
        return [JobFacts(loss=loss, gradients={}) for loss in self.backward(batch_size)]


def peft_model(base: PreTrainedModel, rank: int) -> PeftModel:
    """Return a copy of ``base`` with PEFT's adapter of this rank on every linear layer, in its dtype."""
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(share(base), config, autocast_adapter_dtype=False).train()


class Sequential:
    """The way of today's users: PEFT, one job at a time, with each batch padded to its longest row.

    One PEFT model for each rank replaces one for each job: the time does not depend on the values in it, and no time is
    lost by switching.
    """

    def __init__(self, base: PreTrainedModel, workload: Workload) -> None:
        self._workload = workload
        self._models = {rank: _PeftJob(base, rank) for rank in sorted(set(workload.ranks))}
        self._examples = workload.examples()

    def backward(self, batch_size: int) -> list[float]:
        losses = []
        for rank, rows in zip(self._workload.ranks, self._workload.rows(batch_size), strict=True):
            losses.append(self._models[rank].backward([self._examples[row] for row in rows]))
        return [float(loss) for loss in torch.stack(losses).tolist()]

    def step(self, batch_size: int) -> None:
        losses = []
        for rank, rows in zip(self._workload.ranks, self._workload.rows(batch_size), strict=True):
            losses.append(self._models[rank].backward([self._examples[row] for row in rows]))
            self._models[rank].update()
        torch.stack(losses).tolist()

    def epoch(self, batch_size: int) -> None:
        """Train all rows once with every job, one job after the other."""
        losses = []
        by_step = [self._workload.rows(batch_size, step) for step in range(self._workload.num_steps(batch_size))]
        for number, rank in enumerate(self._workload.ranks):
            for rows in by_step:
                losses.append(self._models[rank].backward([self._examples[row] for row in rows[number]]))
                self._models[rank].update()
        torch.stack(losses).tolist()

    def facts(self, batch_size: int, weights: Sequence[AdapterWeights]) -> list[JobFacts]:
        facts = []
        for rank, rows, adapter in zip(self._workload.ranks, self._workload.rows(batch_size), weights, strict=True):
            job = self._models[rank]
            job.load(adapter)
            loss = job.backward([self._examples[row] for row in rows])
            facts.append(JobFacts(loss=float(loss), gradients=job.take_gradients()))
        return facts


class _PeftJob:
    """A PEFT adapter of one rank on the shared base, and its optimizer."""

    def __init__(self, base: PreTrainedModel, rank: int) -> None:
        self._model = peft_model(base, rank)
        self._parameters = {name: value for name, value in self._model.named_parameters() if value.requires_grad}
        self._optimizer = torch.optim.AdamW(
            list(self._parameters.values()), lr=LEARNING_RATE, weight_decay=0.0, fused=True
        )

    def backward(self, examples: Sequence[Mapping[str, list[int]]]) -> Tensor:
        total, num_tokens = loss_sum(self._model, examples, 0)
        loss = total / num_tokens
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(list(self._parameters.values()), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def load(self, adapter: AdapterWeights) -> None:
        self._optimizer.zero_grad()
        for name, (a_KR, b_RN) in adapter.items():
            a, b = self._matrices(name)
            a.copy_(a_KR.T)
            b.copy_(b_RN.T)

    def take_gradients(self) -> AdapterWeights:
        names = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in self._parameters}
        gradients = {}
        for name in names:
            a, b = self._matrices(name)
            assert a.grad is not None
            assert b.grad is not None
            gradients[name] = (a.grad.T.cpu(), b.grad.T.cpu())
        self._optimizer.zero_grad()
        return AdapterWeights(gradients)

    def _matrices(self, name: str) -> tuple[Tensor, Tensor]:
        prefix = f"base_model.model.{name}"
        a, b = (self._parameters[f"{prefix}.lora_{side}.default.weight"] for side in "AB")
        return a, b


class Stacked:
    """All jobs in one pass, with the products of one of the batched baselines."""

    def __init__(self, base: PreTrainedModel, workload: Workload, products: Products) -> None:
        self._backbone = Backbone(share(base), None, "random")
        self._workload = workload
        configs = [job.config for job in workload.jobs(1)]
        self._scales = [adapter_scale(config) for config in configs]
        self._adapters = StackedAdapters(
            self._backbone.model,
            [module.name for module in linear_modules(self._backbone.model)],
            workload.ranks,
            [config.learning_rate for config in configs],
            products,
        )

    def backward(self, batch_size: int) -> list[float]:
        return _batched_backward(
            self._backbone, self._workload, batch_size, lambda batch: self._adapters.use(self._tokens(batch))
        )

    def step(self, batch_size: int) -> None:
        self.backward(batch_size)
        self._adapters.update()

    def facts(self, batch_size: int, weights: Sequence[AdapterWeights]) -> list[JobFacts]:
        for job, adapter in enumerate(weights):
            self._adapters.load(job, adapter)
        self._adapters.zero_grads()
        losses = self.backward(batch_size)
        facts = [JobFacts(loss=loss, gradients=self._gradients(job)) for job, loss in enumerate(losses)]
        self._adapters.zero_grads()
        return facts

    def _tokens(self, batch: TokenBatch) -> JobTokens:
        scales = tuple(self._scales[job] for job in batch.slots)
        return JobTokens(jobs=batch.slots, lengths=batch.job_tokens, scales=scales)

    def _gradients(self, job: int) -> AdapterWeights:
        return AdapterWeights(
            {
                name: (
                    stack.da_QK[stack.rows[job]].T.to("cpu", copy=True),
                    stack.db_QN[stack.rows[job]].to("cpu", copy=True),
                )
                for name, stack in self._adapters.stacks.items()
            }
        )


class Ours:
    """ALTO as it is installed: its trainer, bank and optimizer, on the backend that it chooses.

    Args:
        ranks: If there are several, the base is sharded over them, and each has equally many adapters.
    """

    def __init__(
        self, base: PreTrainedModel, workload: Workload, *, torch_compile: bool = False, ranks: Ranks | None = None
    ) -> None:
        self._workload = workload
        self._ranks = ranks or Ranks()
        mesh = self._ranks.mesh(base.device)
        model = share(base) if mesh is None else copy.deepcopy(base)
        if mesh is not None:
            shard(model, mesh)
            find_roots(model)
        self._backbone = Backbone(model, None, "random", torch_compile=torch_compile)
        self._runs: dict[int, list[JobState]] = {}
        micro_batches = MicroBatches(workload.max_tokens_per_pass, lambda event: None, can_retry=mesh is None)
        num_slots = len(workload.ranks) // self._ranks.size
        size = BankSize.of([job.planned for job in self.jobs(1)], self._backbone, num_slots=num_slots)
        self._trainer = build_trainer(self._backbone, size, micro_batches, self._ranks)
        for job, local_slot in self._here(1):
            self._trainer.admit(job, local_slot)

    def jobs(self, batch_size: int) -> list[JobState]:
        """Return the jobs, in their slots, before their first step."""
        if batch_size not in self._runs:
            task = self._workload.task(batch_size)
            jobs = initial_states(TaskContext.of(task, self._backbone, self._workload.data, self._ranks))
            for slot, job in enumerate(jobs):
                job.slot = slot
            self._runs[batch_size] = jobs
        return self._runs[batch_size]

    def backward(self, batch_size: int) -> list[float]:
        return [float(loss) for loss in self._trainer.backward(self.jobs(batch_size)).tolist()]

    def step(self, batch_size: int) -> None:
        self._trainer.step(self.jobs(batch_size))

    def epoch(self, batch_size: int) -> None:
        """Train all rows once with all jobs together."""
        jobs = self.jobs(batch_size)
        for step in range(self._workload.num_steps(batch_size)):
            for job in jobs:
                job.step = step
            self._trainer.step(jobs)
        for job in jobs:
            job.step = 0

    def facts(self, batch_size: int, weights: Sequence[AdapterWeights]) -> list[JobFacts]:
        return list(self.facts_here(batch_size, weights).values())

    def facts_here(self, batch_size: int, weights: Sequence[AdapterWeights]) -> dict[int, JobFacts]:
        """Return losses and gradients with these adapters, by job, for the jobs of this rank."""
        bank, here = self._trainer.bank, list(self._here(batch_size))
        for job, local_slot in here:
            self._trainer.admit(job, local_slot, weights[job.slot])
        losses = self.backward(batch_size)
        found = {
            job.slot: JobFacts(loss=losses[job.slot], gradients=bank.read(local_slot, bank.grads_ZP))
            for job, local_slot in here
        }
        bank.grads_ZP.zero_()
        return found

    def _here(self, batch_size: int) -> Iterator[tuple[JobState, int]]:
        """Return the jobs of this rank, and their slots in its bank."""
        for job in self.jobs(batch_size):
            local_slot = self._trainer.passes.local_slot(job)
            if local_slot is not None:
                yield job, local_slot


VARIANTS: Mapping[str, Callable[[PreTrainedModel, Workload], Variant]] = {
    "frozen": Frozen,
    "sequential": Sequential,
    "loop": lambda base, workload: Stacked(base, workload, AfterBase(loop)),
    "lorafusion": lambda base, workload: Stacked(base, workload, lorafusion),
    "grouped_mm": lambda base, workload: Stacked(base, workload, AfterBase(grouped_mm)),
    "ours": Ours,
    "compiled": lambda base, workload: Ours(base, workload, torch_compile=True),
}


def usable_variants(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Return all variants except those that PyTorch cannot run on this device."""
    optional = {"grouped_mm": grouped_mm, "lorafusion": lorafusion}
    return tuple(name for name in VARIANTS if name not in optional or optional[name].is_supported(device, dtype))


def build(name: str, base: PreTrainedModel, workload: Workload) -> Variant:
    """Return the variant on the weights of ``base``, which stays unchanged."""
    return VARIANTS[name](base, workload)


def _batched_backward(
    backbone: Backbone, workload: Workload, batch_size: int, use: Callable[[TokenBatch], Any]
) -> list[float]:
    slots, losses = [], []
    for batch in workload.batches(batch_size, backbone.device):
        with use(batch):
            losses_J = job_losses(backbone, batch, [Learners(find_objective("sft"), ())])
            losses_J.sum().backward()
        slots += batch.slots
        losses.append(losses_J.detach())
    sums = [0.0] * len(workload.ranks)  # a job may have rows in several passes
    for slot, loss in zip(slots, torch.cat(losses).tolist(), strict=True):
        sums[slot] += loss
    return sums
