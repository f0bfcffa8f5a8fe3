"""Checks by a rank that trains jobs together with other ranks: its own jobs are compared with PEFT alone. All ranks
call the same checks."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from moe_models import build_mixture
from oracle import SoloJob, StepFacts, flat
from oracle_kto import LABELLED
from resident_jobs import (
    DATA,
    PAIRS,
    STABLE,
    VOCABULARY,
    Bank,
    assert_same_step,
    make_model,
    make_task,
    make_trainer,
    start_of,
)
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.backbone.sharding import find_roots, shard
from alto.data import TaskData
from alto.errors import TaskInterruptedError, UnsupportedError
from alto.executor import (
    Hooks,
    JobState,
    MicroBatches,
    Ranks,
    ResumeState,
    RunInputs,
    TaskContext,
    TaskSession,
    initial_states,
    recover,
    run_alone,
    with_references,
)
from alto.lora import saved_settings
from alto.runs import Journal, RunDir, SilentJournal
from alto.spec import Task, load_task

CPU = torch.device("cpu")
_QWEN3 = partial(make_model, "qwen3")

PREFERENCES: list[dict[str, object]] = [
    {"loss_type": "sigmoid", "beta": 0.1, "lr": 5e-4, "r": 4, "batch_size": 4, "seed": 1},
    {"loss_type": "ipo", "beta": 0.5, "lr": 2e-4, "r": 16, "batch_size": 8, "seed": 2},
    {"loss_type": "sigmoid", "beta": 1.0, "lr": 2e-4, "r": 8, "batch_size": 1, "seed": 3},
]


LABELS: list[dict[str, object]] = [
    {"loss_type": "kto", "beta": 0.5, "lr": 5e-3, "r": 4, "batch_size": 4, "seed": 1},
    {"loss_type": "kto", "beta": 1.0, "lr": 5e-3, "r": 16, "batch_size": 7, "seed": 2},
    {"loss_type": "apo_zero_unpaired", "beta": 1.0, "lr": 2e-4, "r": 8, "batch_size": 3, "seed": 3},
]

BALANCED: list[dict[str, object]] = [
    {"target_modules": ["q_proj"], "lr": 5e-4, "r": 4, "batch_size": 8, "router_aux_loss_coef": 2.0, "seed": 1},
    {"target_modules": ["q_proj"], "lr": 2e-4, "r": 8, "batch_size": 5, "router_aux_loss_coef": 0.5, "seed": 2},
    {"target_modules": ["q_proj"], "lr": 5e-4, "r": 2, "batch_size": 1, "router_aux_loss_coef": 0.0, "seed": 3},
]


def joined() -> Ranks:
    torch.set_num_threads(1)
    return Ranks(dist.get_rank(), dist.get_world_size())


def sharded(model: PreTrainedModel, ranks: Ranks) -> PreTrainedModel:
    mesh = ranks.mesh(CPU)
    if mesh is not None:
        shard(model, mesh)
        find_roots(model)
    return model


class Slots:
    """Jobs assigned to the banks of all ranks, or to the same local slots of all; they begin with the adapter that
    ``init_adapter`` of the task names, if it names one."""

    def __init__(
        self, model: PreTrainedModel, task: Task, ranks: Ranks, *, is_data_parallel: bool = False, data: TaskData = DATA
    ) -> None:
        backbone = Backbone(model, None, "unused")  # type: ignore[arg-type]
        micro_batches = MicroBatches(task.max_tokens_per_pass or 300, lambda event: None, can_retry=ranks.is_alone)
        start = start_of(task, backbone)
        context = with_references(TaskContext.of(task, backbone, data, ranks, start=start), micro_batches)
        self.data = context.data
        self.ranks = ranks
        self.jobs = initial_states(context)
        per_rank = len(self.jobs) if is_data_parallel else -(-len(self.jobs) // ranks.size)
        self.trainer = make_trainer(context, per_rank)
        for index, job in enumerate(self.jobs):
            job.is_data_parallel = is_data_parallel
            job.slot = index if is_data_parallel else (index % ranks.size) * per_rank + index // ranks.size
            if (local_slot := self.trainer.passes.local_slot(job)) is None:
                continue
            if start is None:
                self.trainer.admit(job, local_slot)
            else:
                self.trainer.admit(job, local_slot, start.weights)

    @property
    def training(self) -> list[JobState]:
        return [job for job in self.jobs if job.step < job.total_steps]

    def here(self, jobs: list[JobState]) -> list[tuple[JobState, int]]:
        return [(job, local_slot) for job in jobs if (local_slot := self.trainer.passes.local_slot(job)) is not None]

    def step(self) -> dict[str, StepFacts]:
        """Take one step of all ranks, and return its results for the jobs of this one."""
        jobs, trainer, bank = self.training, self.trainer, self.trainer.bank
        here = self.here(jobs)
        before = {job.id: flat(bank.read(local_slot)) for job, local_slot in here}
        losses = dict(zip([job.id for job in jobs], trainer.read(trainer.backward(jobs)), strict=True))
        gradients = {job.id: flat(bank.read(local_slot, bank.grads_ZP)) for job, local_slot in here}
        norms = trainer.update(jobs).tolist()
        facts = {}
        for (job, local_slot), norm in zip(here, norms, strict=True):
            after = flat(bank.read(local_slot))
            updates = {name: after[name] - before[job.id][name] for name in after}
            facts[job.id] = StepFacts(loss=losses[job.id], grad_norm=norm, gradients=gradients[job.id], updates=updates)
        for job in jobs:
            job.step += 1
        return facts


FROM_SAVED: list[dict[str, object]] = [
    {"lr": 1e-3, "batch_size": 2, "seed": 1},
    {"lr": 5e-4, "batch_size": 5, "weight_decay": 0.1, "seed": 2},
    {"lr": 1e-3, "batch_size": 4, "max_grad_norm": None, "seed": 3},
]


def first_steps_from_a_saved_adapter_are_those_of_peft_alone(folder: str) -> None:
    """Check first steps from the trainable adapter that PEFT loads from ``folder``: once job by job, once with jobs
    that train on all ranks. The second step is taken from equal state."""
    base, ranks, saved = make_model("llama"), joined(), Path(folder)
    configs = [config | saved_settings(saved) for config in FROM_SAVED]
    for is_data_parallel in (False, True):
        task = make_task(configs, init_adapter=folder)
        slots = Slots(sharded(make_model("llama"), ranks), task, ranks, is_data_parallel=is_data_parallel)
        alone = {job.id: SoloJob(base, DATA.train, job.config, saved=saved) for job in slots.jobs}
        num_checked = 0
        for step in range(2):
            if step:
                for job, local_slot in slots.here(slots.jobs):
                    bank, optimizer = slots.trainer.bank, slots.trainer.optimizer
                    alone[job.id].load(bank.read(local_slot), optimizer.read(local_slot))
            for job, facts in slots.step().items():
                assert_same_step(facts, alone[job].train_step())
                num_checked += 1
        assert num_checked >= 2 * (len(configs) if is_data_parallel else len(configs) // ranks.size)


def steps_are_those_of_peft_alone(name: str) -> None:
    """Check steps from equal state: once job by job, once with jobs that train on all ranks."""
    base, ranks = make_model(name), joined()
    for is_data_parallel, configs in ((False, STABLE), (True, STABLE[2:4])):
        slots = Slots(sharded(make_model(name), ranks), make_task(configs), ranks, is_data_parallel=is_data_parallel)
        checked = 0
        for step in range(10):
            states = {
                job.id: (slots.trainer.bank.read(local_slot), slots.trainer.optimizer.read(local_slot))
                for job, local_slot in slots.here(slots.training)
            }
            found = slots.step()
            if step not in (0, 4, 9):
                continue
            for job in slots.jobs:
                if job.id in found:
                    alone = SoloJob(base, DATA.train, job.config)
                    alone.load(*states[job.id])
                    assert_same_step(found[job.id], alone.train_step())
                    checked += 1
        assert checked >= 2 * len(configs) / (1 if is_data_parallel else ranks.size)


def steps_on_pairs_are_those_of_one_process(folder: str, saved: str | None = None) -> None:
    _steps_are_those_of_one_process(folder, "dpo", PREFERENCES, PAIRS, saved)


def steps_on_labelled_replies_are_those_of_one_process(folder: str, saved: str | None = None) -> None:
    _steps_are_those_of_one_process(folder, "kto", LABELS, LABELLED, saved)


def an_adapter_on_embeddings_is_refused(saved: str) -> None:
    task, ranks = make_task([saved_settings(Path(saved))], init_adapter=saved), joined()
    with pytest.raises(UnsupportedError, match=r"found its embeddings, .* trained on one GPU only; .*num_gpus: 1"):
        Slots(sharded(make_model("llama"), ranks), task, ranks)


def _assert_two_steps_are_those_of(alone: Bank, slots: Slots) -> None:
    """Check two steps, each from equal state."""
    for _ in range(2):
        for job, local_slot in slots.here(slots.jobs):
            mine = next(other for other in alone.jobs if other.id == job.id)
            slots.trainer.bank.write(local_slot, alone.trainer.bank.read(mine.slot))
            slots.trainer.optimizer.write(local_slot, job.config.optim, alone.trainer.optimizer.read(mine.slot))
        found, expected = slots.step(), alone.step()
        assert found
        for name, facts in found.items():
            assert_same_step(facts, expected[name])


def _steps_are_those_of_one_process(
    folder: str, method: str, jobs: list[dict[str, object]], data: TaskData, saved: str | None
) -> None:
    """Check steps once job by job, once with jobs that train on all ranks, with references that an earlier task has
    computed; from the adapter in the folder ``saved``, if that is given."""
    ranks = joined()
    start: dict[str, object] = {} if saved is None else {"init_adapter": saved}
    for is_data_parallel, configs in ((False, jobs), (True, jobs[:2])):
        configs = configs if saved is None else [config | saved_settings(Path(saved)) for config in configs]
        task = make_task(configs, method=method, max_tokens_per_pass=150, **start)
        os.environ["ALTO_CACHE"] = f"{folder}-{ranks.rank}"  # not the shared cache, which it is compared with
        alone = Bank(make_model("llama"), task, data=data, saved=None if saved is None else Path(saved))
        os.environ["ALTO_CACHE"] = folder
        slots = Slots(sharded(make_model("llama"), ranks), task, ranks, is_data_parallel=is_data_parallel, data=data)
        for split in ("train", "validation"):
            found, expected = (getattr(known, split).references for known in (slots.data, alone.data))
            assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
        assert not ranks.is_first or len(list(Path(folder).glob("references/*.json"))) == 2
        _assert_two_steps_are_those_of(alone, slots)
        worths = zip(slots.trainer.evaluate(slots.jobs), alone.trainer.evaluate(alone.jobs), strict=True)
        for worth, expected_worth in worths:
            assert math.isclose(worth.loss, expected_worth.loss, rel_tol=1e-4)
            for name, value in expected_worth.metrics.items():
                assert math.isclose(worth.metrics[name], value, rel_tol=1e-2, abs_tol=1e-4), name


def steps_of_a_mixture_are_those_of_one_process() -> None:
    """Check steps with the load-balancing loss of routers: once job by job, once with jobs that train on all ranks."""
    ranks = joined()
    for is_data_parallel, configs in ((False, BALANCED), (True, BALANCED[:2])):
        task = make_task(configs, max_tokens_per_pass=100)
        alone = Bank(build_mixture("mixtral", vocab_size=VOCABULARY), task)
        model = sharded(build_mixture("mixtral", vocab_size=VOCABULARY), ranks)
        slots = Slots(model, task, ranks, is_data_parallel=is_data_parallel)
        _assert_two_steps_are_those_of(alone, slots)


def a_job_that_goes_nan_changes_no_other_by_one_bit() -> None:
    ranks = joined()

    def trained(poisoned: str | None) -> dict[str, list[torch.Tensor]]:
        slots = Slots(sharded(make_model("llama"), ranks), make_task(STABLE), ranks)
        for job, local_slot in slots.here(slots.jobs):
            if job.id == poisoned:
                slots.trainer.bank.params_ZP[local_slot, 0] = float("nan")
        for _ in range(3):
            slots.step()
        return {
            job.id: list(flat(slots.trainer.bank.read(local_slot)).values())
            for job, local_slot in slots.here(slots.jobs)
        }

    clean, beside_nan = trained(None), trained("job-003")
    for job, matrices in clean.items():
        same = [torch.equal(a, b) for a, b in zip(matrices, beside_nan[job], strict=True)]
        assert all(same) == (job != "job-003"), job


def lose_the_lock(folder: str) -> None:
    """Train the task of the run in ``folder`` for three turns, during the last of which the lock is removed; then stop
    and save."""
    run_dir, ranks, turns = RunDir.open(folder), joined(), itertools.count(1)

    def is_asked_to_stop() -> bool:
        if next(turns) < 3:
            return False
        (run_dir.root / "run.lock").unlink()
        return True

    with run_dir.locked() if ranks.is_first else contextlib.nullcontext():
        train(folder, is_asked_to_stop=is_asked_to_stop, run_dir=run_dir)


def train(
    folder: str,
    interrupt_after: int | None = None,
    *,
    is_asked_to_stop: Callable[[], bool] | None = None,
    run_dir: RunDir | None = None,
    model: Callable[[], PreTrainedModel] = _QWEN3,
) -> None:
    """Train the task of the run in ``folder``, from its beginning or its last checkpoint, to its end or for a number of
    turns."""
    run_dir, ranks = run_dir or RunDir.open(folder), joined()
    resume_state = ranks.broadcast(recover(run_dir) if ranks.is_first else ResumeState(), ResumeState)
    task = load_task(run_dir.task_file)
    backbone = Backbone(sharded(model(), ranks), None, "unused")  # type: ignore[arg-type]
    turns = itertools.count()
    journal: Journal = SilentJournal()
    if ranks.is_first:
        journal = Journal(run_dir.journal_file, past=resume_state.entries, check=run_dir.check_lock)
    stops = contextlib.nullcontext() if interrupt_after is None else contextlib.suppress(TaskInterruptedError)
    with journal, stops:
        context = TaskContext.of(task, backbone, DATA, ranks, start=start_of(task, backbone))
        hooks = Hooks(
            is_interrupted=is_asked_to_stop or (lambda: interrupt_after is not None and next(turns) >= interrupt_after)
        )
        run_alone(TaskSession(context, journal, RunInputs(run_dir=run_dir, resume_state=resume_state), hooks))
