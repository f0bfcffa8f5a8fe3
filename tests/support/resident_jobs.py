"""Jobs together in a bank of small random models, step by step, and the comparison of a step with PEFT's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import StepFacts, flat, relative_distance
from preference_pairs import make_pairs
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from alto.backbone import Backbone
from alto.data import EncodedDataset, JobRows, TaskData, collate
from alto.executor import (
    BankSize,
    InitAdapter,
    JobState,
    MicroBatches,
    TaskContext,
    Trainer,
    build_trainer,
    initial_states,
    stages,
)
from alto.executor.micro_batches import MemoryEvent, OnMemoryEvent
from alto.lora import AdapterWeights, OptimizerState
from alto.objectives import reference_sums
from alto.spec import Task

VOCABULARY = 160
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "gemma": (GemmaForCausalLM, GemmaConfig),
}
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4

STABLE = [
    {"lr": 1e-4, "r": 4, "batch_size": 1, "seed": 1},
    {"lr": 2e-4, "r": 8, "batch_size": 2, "lora_alpha": 8, "seed": 2},
    {"lr": 5e-4, "r": 16, "batch_size": 4, "weight_decay": 0.1, "seed": 3},
    {"lr": 1e-3, "r": 32, "batch_size": 8, "lr_scheduler_type": "cosine", "seed": 4},
    {"lr": 2e-4, "r": 64, "batch_size": 3, "max_grad_norm": None, "seed": 5},
    {"lr": 1e-3, "r": 16, "batch_size": 8, "lr_scheduler_type": "constant", "seed": 6},
    {"lr": 5e-4, "r": 8, "batch_size": 5, "target_modules": ["q_proj", "v_proj"], "seed": 7},
    {"lr": 1e-3, "r": 4, "batch_size": 2, "max_grad_norm": 0.05, "warmup_steps": 4, "seed": 8},
]


def make_model(name: str) -> PreTrainedModel:
    torch.manual_seed(7)
    model_class, config_class = MODELS[name]
    return model_class(config_class(**COMMON)).eval()


def make_dataset(num_rows: int, seed: int) -> EncodedDataset:
    """Return rows of 5 to 40 tokens from a noisy counting language, of which the second half is trained."""
    generator = torch.Generator().manual_seed(seed)
    input_ids, targets = [], []
    for _ in range(num_rows):
        length = int(torch.randint(5, 41, (), generator=generator))
        start = int(torch.randint(2, VOCABULARY, (), generator=generator))
        stride = int(torch.randint(1, 4, (), generator=generator))
        ids = 2 + (start + stride * torch.arange(length)) % (VOCABULARY - 2)
        target = torch.full_like(ids, -100)
        target[length // 2 : -1] = ids[length // 2 + 1 :]
        input_ids.append(ids)
        targets.append(target)
    return EncodedDataset(input_ids=tuple(input_ids), targets=tuple(targets))


DATA = TaskData(train=make_dataset(28, seed=1), validation=make_dataset(6, seed=2))
PAIRS = TaskData(train=make_pairs(28, seed=1), validation=make_pairs(6, seed=2))


def make_task(configs: list[dict[str, object]], **settings: object) -> Task:
    """Return a task with exactly these jobs; the last states of all jobs are kept for comparison."""
    filled = [{"lora_alpha": "2*r", "target_modules": "all-linear"} | config for config in configs]
    keys = {key for config in filled for key in config}
    defaults = {
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "use_rslora": False,
        "init_lora_weights": "default",
        "loraplus_lr_ratio": 1.0,
        "optim": "adamw_torch",
        "bias": "none",
        "use_dora": False,
        "lora_dropout": 0.0,
        "rank_pattern": {},
        "alpha_pattern": {},
        "label_smoothing": 0.0,
    }
    paired = {key: [config.get(key, defaults.get(key)) for config in filled] for key in sorted(keys)}
    values = {"model": "unused", "dataset": "unused.jsonl", "keep": "all"}
    values |= {"num_train_epochs": 2, "max_tokens_per_pass": 300}
    fixed = {key: value for key, value in (values | settings).items() if key not in paired}
    return Task(**fixed, search_space={"paired": paired})


def start_of(task: Task, backbone: Backbone) -> InitAdapter | None:
    """Return the adapter in the folder that ``init_adapter`` of ``task`` names; None if there is none."""
    if task.init_adapter is None:
        return None
    return InitAdapter.read(Path(task.init_adapter), backbone, model="unused")


@torch.no_grad()
def with_references(backbone: Backbone, data: TaskData) -> TaskData:
    """Return ``data`` with the log-probs of every reply under ``backbone``."""

    def answered(pairs: EncodedDataset) -> EncodedDataset:
        batch = collate([JobRows(pairs, 0, tuple(range(len(pairs))))], backbone.device)
        sums, tails = reference_sums(backbone, batch)
        return replace(pairs, references=sums.cpu(), reference_tails=tails.cpu())

    return replace(data, train=answered(data.train), validation=answered(data.validation))


def make_trainer(context: TaskContext, num_slots: int, on_memory_event: OnMemoryEvent = lambda event: None) -> Trainer:
    """Return a trainer for the jobs of a task, with this number of slots per rank."""
    task, ranks = context.task, context.ranks
    assert task.max_tokens_per_pass is not None
    micro_batches = MicroBatches(task.max_tokens_per_pass, on_memory_event, can_retry=ranks.is_alone)
    size = BankSize.of(
        context.jobs,
        context.backbone,
        num_slots=num_slots,
        adapter_dtype=task.adapter_dtype,
        optim_state_dtype=task.optim_state_dtype,
    )
    return build_trainer(context.backbone, size, micro_batches, ranks)


class Bank:
    """All jobs of a task admitted to a trainer, job ``i`` to slot ``slots[i]``; they begin with the adapter in
    ``saved``, if it is given.

    Attributes:
        backbone: The base that they share.
        data: Their training data, with reference log-probs if the objective needs them.
        memory_events: Events of the trainer about memory that ran out.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        task: Task,
        slots: list[int] | None = None,
        data: TaskData = DATA,
        saved: Path | None = None,
        rewards: Any = None,
    ) -> None:
        self.backbone = backbone = Backbone(model, None, "unused")
        start = None if saved is None else InitAdapter.read(saved, backbone, model="unused")
        context = replace(TaskContext.of(task, backbone, data, start=start), rewards=rewards)
        if context.objective.needs_reference:
            if start is None:
                context = replace(context, data=with_references(backbone, data))
            else:
                context = stages.with_references(context, MicroBatches(100, lambda event: None))
        self.data = context.data
        self.jobs = initial_states(context)
        self.memory_events: list[MemoryEvent] = []
        self.trainer = make_trainer(context, len(self.jobs) + 1, self.memory_events.append)
        for job, slot in zip(self.jobs, slots or range(len(self.jobs)), strict=True):
            job.slot = slot
            if start is None:
                self.trainer.admit(job, slot)
            else:
                self.trainer.admit(job, slot, start.weights)

    @property
    def training(self) -> list[JobState]:
        return [job for job in self.jobs if job.step < job.total_steps]

    def step(self) -> dict[str, StepFacts]:
        """Take one step of every job that still trains, and return all its results."""
        jobs, trainer = self.training, self.trainer
        before = {job.id: flat(trainer.bank.read(job.slot)) for job in jobs}
        losses = trainer.backward(jobs).tolist()
        gradients = {job.id: self._gradients(job) for job in jobs}
        norms = trainer.update(jobs).tolist()
        facts = {}
        for job, loss, norm in zip(jobs, losses, norms, strict=True):
            after = flat(trainer.bank.read(job.slot))
            updates = {name: after[name] - before[job.id][name] for name in after}
            facts[job.id] = StepFacts(loss=loss, grad_norm=norm, gradients=gradients[job.id], updates=updates)
            job.step += 1
        return facts

    def _gradients(self, job: JobState) -> dict[str, torch.Tensor]:
        bank = self.trainer.bank
        return flat(bank.read(job.slot, bank.grads_ZP))


def state_of(bank: Bank, job: JobState) -> tuple[AdapterWeights, OptimizerState]:
    return bank.trainer.bank.read(job.slot), bank.trainer.optimizer.read(job.slot)


def assert_same_step(found: StepFacts, expected: StepFacts, *, rounding: float = 1e-5) -> None:
    """Check that both have the same loss, gradients and updates.

    Args:
        rounding: Share of the largest gradient of a tensor below which a gradient may be only rounding.
    """
    assert found.loss == pytest.approx(expected.loss, rel=LOSS_TOLERANCE)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=NORM_TOLERANCE)
    assert relative_distance(found.gradients, expected.gradients) <= NORM_TOLERANCE
    masks = {name: above_rounding(found, expected, name, rounding) for name in expected.gradients}
    assert sum(int(mask.sum()) for mask in masks.values()) >= 0.9 * sum(mask.numel() for mask in masks.values())
    updates = [{name: step.updates[name] * mask for name, mask in masks.items()} for step in (found, expected)]
    assert relative_distance(*updates) <= NORM_TOLERANCE


def above_rounding(found: StepFacts, expected: StepFacts, name: str, rounding: float = 1e-5) -> torch.Tensor:
    """Return the entries of a matrix whose gradient is more than rounding (or zero in both).

    Adam divides by the root of the gradient's square, so an entry that is only rounding moves as far as any other.
    About one such entry in a million is enough to move a whole update by 1e-4 in norm.
    """
    gradient = expected.gradients[name].abs()
    return (gradient > rounding * gradient.max()) | ((gradient == 0) & (found.gradients[name] == 0))
