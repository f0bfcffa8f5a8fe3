"""What a rank that trains jobs beside others checks of its own, against PEFT alone. All ranks call the same."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from oracle import SoloJob, StepFacts, flat
from resident_jobs import DATA, PAIRS, STABLE, Bank, assert_same_step, make_model, make_task
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.backbone.sharding import find_roots, shard
from alto.data import TaskData
from alto.errors import TaskInterruptedError
from alto.executor import Executor, JobRun, Ranks, ResumeState, Trainer, plan_jobs, recover
from alto.executor.micro_batches import MicroBatches
from alto.executor.references import find_references
from alto.lora import linear_modules
from alto.objectives import find_objective
from alto.runs import Journal, RunDir, SilentJournal
from alto.spec import Task, load_task

CPU = torch.device("cpu")

PREFERENCES: list[dict[str, object]] = [
    {"loss_type": "sigmoid", "beta": 0.1, "lr": 5e-4, "r": 4, "batch_size": 4, "seed": 1},
    {"loss_type": "ipo", "beta": 0.5, "lr": 2e-4, "r": 16, "batch_size": 8, "seed": 2},
    {"loss_type": "sigmoid", "beta": 1.0, "lr": 2e-4, "r": 8, "batch_size": 1, "seed": 3},
]


def joined() -> Ranks:
    torch.set_num_threads(1)
    return Ranks(dist.get_rank(), dist.get_world_size())


def sharded(name: str, ranks: Ranks) -> PreTrainedModel:
    model = make_model(name)
    mesh = ranks.mesh(CPU)
    if mesh is not None:
        shard(model, mesh)
        find_roots(model)
    return model


class Seats:
    """Jobs dealt out over the banks of all ranks, or in the same places of all."""

    def __init__(
        self, model: PreTrainedModel, task: Task, ranks: Ranks, *, is_data_parallel: bool = False, data: TaskData = DATA
    ) -> None:
        backbone = Backbone(model, None, "unused")  # type: ignore[arg-type]
        objective = find_objective(task.method)
        if objective.needs_reference:
            micro_batches = MicroBatches(task.max_tokens_per_pass or 300, lambda event: None, can_retry=ranks.is_alone)
            data = find_references(task, backbone, data, micro_batches, ranks).data
        self.data = data
        self.ranks = ranks
        self.runs = plan_jobs(task, backbone, data)
        per_rank = len(self.runs) if is_data_parallel else -(-len(self.runs) // ranks.size)
        self.trainer = Trainer(
            backbone,
            data,
            modules=linear_modules(model),
            max_rank=max(run.config.r for run in self.runs),
            num_slots=per_rank,
            max_tokens_per_pass=task.max_tokens_per_pass or 300,
            optims={run.config.optim for run in self.runs},
            objective=objective,
            ranks=ranks,
        )
        for index, run in enumerate(self.runs):
            run.is_data_parallel = is_data_parallel
            run.slot = index if is_data_parallel else (index % ranks.size) * per_rank + index // ranks.size
            if (place := self.trainer.place(run)) is not None:
                self.trainer.admit_fresh(run, place)

    @property
    def training(self) -> list[JobRun]:
        return [run for run in self.runs if run.step < run.total_steps]

    def here(self, runs: list[JobRun]) -> list[tuple[JobRun, int]]:
        return [(run, place) for run in runs if (place := self.trainer.place(run)) is not None]

    def step(self) -> dict[str, StepFacts]:
        """One step of all ranks; what it did to the jobs of this one."""
        runs, trainer, bank = self.training, self.trainer, self.trainer.bank
        here = self.here(runs)
        before = {run.id: flat(bank.read(place)) for run, place in here}
        losses = dict(zip([run.id for run in runs], trainer.read(trainer.backward(runs)), strict=True))
        gradients = {
            run.id: flat({m.name: (a.clone(), b.clone()) for m, a, b in bank.matrices(bank.grads_ZP, place)})
            for run, place in here
        }
        norms = trainer.update(runs).tolist()
        facts = {}
        for (run, place), norm in zip(here, norms, strict=True):
            after = flat(bank.read(place))
            updates = {name: after[name] - before[run.id][name] for name in after}
            facts[run.id] = StepFacts(loss=losses[run.id], grad_norm=norm, gradients=gradients[run.id], updates=updates)
        for run in runs:
            run.step += 1
        return facts


def steps_are_those_of_peft_alone(name: str) -> None:
    """From equal state; once job by job, once with jobs that are spread over all ranks."""
    base, ranks = make_model(name), joined()
    for is_data_parallel, configs in ((False, STABLE), (True, STABLE[2:4])):
        seats = Seats(sharded(name, ranks), make_task(configs), ranks, is_data_parallel=is_data_parallel)
        checked = 0
        for step in range(10):
            states = {
                run.id: (seats.trainer.bank.read(place), seats.trainer.optimizer.read(place))
                for run, place in seats.here(seats.training)
            }
            found = seats.step()
            if step not in (0, 4, 9):
                continue
            for run in seats.runs:
                if run.id in found:
                    alone = SoloJob(base, DATA.train, run.config)
                    alone.load(*states[run.id])
                    assert_same_step(found[run.id], alone.train_step())
                    checked += 1
        assert checked >= 2 * len(configs) / (1 if is_data_parallel else ranks.size)


def steps_on_pairs_are_those_of_one_process(folder: str) -> None:
    """Once job by job, once with jobs that are spread over all ranks, whose references a task before has found."""
    ranks = joined()
    os.environ["ALTO_CACHE"] = folder
    for is_data_parallel, configs in ((False, PREFERENCES), (True, PREFERENCES[:2])):
        task = make_task(configs, method="dpo", max_tokens_per_pass=150)
        alone = Bank(make_model("llama"), task, data=PAIRS)
        seats = Seats(sharded("llama", ranks), task, ranks, is_data_parallel=is_data_parallel, data=PAIRS)
        for split in ("train", "validation"):
            found, expected = (getattr(data, split).references for data in (seats.data, alone.data))
            assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
        assert not ranks.is_first or len(list(Path(folder).glob("references/*.json"))) == 2
        for _ in range(2):
            for run, place in seats.here(seats.runs):
                mine = next(other for other in alone.runs if other.id == run.id)
                seats.trainer.bank.write(place, alone.trainer.bank.read(mine.slot))
                seats.trainer.optimizer.write(place, run.config.optim, alone.trainer.optimizer.read(mine.slot))
            found, expected = seats.step(), alone.step()
            assert found
            for job, facts in found.items():
                assert_same_step(facts, expected[job])
        worths = zip(seats.trainer.evaluate(seats.runs), alone.trainer.evaluate(alone.runs), strict=True)
        for worth, expected_worth in worths:
            assert math.isclose(worth.loss, expected_worth.loss, rel_tol=1e-4)
            for name, value in expected_worth.metrics.items():
                assert math.isclose(worth.metrics[name], value, rel_tol=1e-2, abs_tol=1e-4), name


def a_job_that_goes_nan_changes_no_other_by_one_bit() -> None:
    ranks = joined()

    def trained(poisoned: str | None) -> dict[str, list[torch.Tensor]]:
        seats = Seats(sharded("llama", ranks), make_task(STABLE), ranks)
        for run, place in seats.here(seats.runs):
            if run.id == poisoned:
                seats.trainer.bank.params_ZP[place, 0] = float("nan")
        for _ in range(3):
            seats.step()
        return {run.id: list(flat(seats.trainer.bank.read(place)).values()) for run, place in seats.here(seats.runs)}

    clean, beside_nan = trained(None), trained("job-003")
    for job, matrices in clean.items():
        same = [torch.equal(a, b) for a, b in zip(matrices, beside_nan[job], strict=True)]
        assert all(same) == (job != "job-003"), job


def lose_the_lock(folder: str) -> None:
    """Train the task of the run in ``folder`` for three turns, in the last of which somebody removes its lock; then
    stop and save."""
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
) -> None:
    """The task of the run in ``folder``, from its beginning or its last checkpoint, to its end or for so many turns."""
    run_dir, ranks = run_dir or RunDir.open(folder), joined()
    past = ranks.broadcast(recover(run_dir) if ranks.is_first else ResumeState(), ResumeState)
    task = load_task(run_dir.task_file)
    backbone = Backbone(sharded("qwen3", ranks), None, "unused")  # type: ignore[arg-type]
    turns = itertools.count()
    journal: Journal = SilentJournal()
    if ranks.is_first:
        journal = Journal(run_dir.journal_file, past=past.events, check=run_dir.check_lock)
    stops = contextlib.nullcontext() if interrupt_after is None else contextlib.suppress(TaskInterruptedError)
    with journal, stops:
        Executor(
            task,
            plan_jobs(task, backbone, DATA),
            backbone,
            DATA,
            run_dir=run_dir,
            journal=journal,
            past=past,
            is_interrupted=is_asked_to_stop or (lambda: interrupt_after is not None and next(turns) >= interrupt_after),
            ranks=ranks,
        ).run()
