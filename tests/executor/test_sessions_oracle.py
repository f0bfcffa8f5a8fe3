"""Isolation across tasks: from equal state, a job's step in a shared bank equals a step of Hugging Face PEFT with
torch's AdamW alone: for SFT with the model's own loss, for DPO and ORPO with TRL's losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from oracle import SoloJob, SoloPairs, StepFacts, flat, make_dpo_trainer, reference_model
from resident_jobs import DATA, PAIRS, assert_same_step, make_model, make_task
from shared_executor import OTHER, SETTINGS, SharedExecutor
from torch import Tensor

from alto.data import TaskData
from alto.executor import JobState
from alto.lora import AdapterWeights, OptimizerState
from alto.spec import Task

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

NUM_TURNS = 12


class SoloOdds(SoloJob):
    """One job on pairs with TRL's ``ORPOTrainer``, which computes odds ratios from average log-probabilities; only
    replies are trained."""

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        from trl.experimental.orpo import ORPOTrainer

        labels = batch.pop("labels")
        log_p = ORPOTrainer.get_batch_logps(self.model(**batch).logits, labels, average_log_prob=True)
        chosen, rejected = log_p.chunk(2)
        trainer = SimpleNamespace(beta=self.config.objective.beta, accelerator=SimpleNamespace(device=log_p.device))
        odds = ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0]
        return -(chosen + odds).mean()


def tasks() -> dict[str, tuple[Task, TaskData]]:
    jobs = [{"lr": 2e-4, "r": 4, "batch_size": 4, "seed": 1}, {"lr": 1e-4, "r": 16, "batch_size": 3, "seed": 2}]
    some = [{"lr": 5e-4, "r": 8, "batch_size": 2, "target_modules": ["q_proj", "v_proj"], "max_grad_norm": 0.05}]
    found = {
        "ash": (make_task(jobs, **SETTINGS), DATA),
        "birch": (make_task(some, **SETTINGS), OTHER),
        "cedar": (make_task(jobs, method="dpo", beta=0.3, **SETTINGS), PAIRS),
        "dogwood": (make_task(jobs, method="orpo", beta=0.5, **SETTINGS), PAIRS),
    }
    return {name: (task.replace(name=name), data) for name, (task, data) in found.items()}


@dataclass(frozen=True, kw_only=True)
class Step:
    """The state before one step of one job, and its results."""

    task: str
    config: Any
    weights: AdapterWeights
    optimizer: OptimizerState
    facts: StepFacts


class Observer:
    """Records every step of the executor."""

    def __init__(self, shared: SharedExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[Step] = []
        self._shared = shared
        self._before: dict[str, tuple[AdapterWeights, OptimizerState]] = {}
        self._gradients: dict[str, Mapping[str, Tensor]] = {}
        trainer = shared.executor.bank.trainer
        backward, update = trainer.backward, trainer.update

        def observed_backward(jobs: list[JobState]) -> Tensor:
            self._before = {self._key(job): self._state(job) for job in jobs}
            self._losses = backward(jobs)
            bank = trainer.bank
            self._gradients = {self._key(job): flat(bank.read(job.slot, bank.grads_ZP)) for job in jobs}
            return self._losses

        def observed_update(jobs: list[JobState]) -> Tensor:
            norms = update(jobs)
            for job, loss, norm in zip(jobs, self._losses.tolist(), norms.tolist(), strict=True):
                self._keep(job, loss, norm)
            return norms

        monkeypatch.setattr(trainer, "backward", observed_backward)
        monkeypatch.setattr(trainer, "update", observed_update)

    def _keep(self, job: JobState, loss: float, norm: float) -> None:
        weights, optimizer = self._before[self._key(job)]
        before, after = flat(weights), flat(self._state(job)[0])
        facts = StepFacts(
            loss=loss,
            grad_norm=norm,
            gradients=self._gradients[self._key(job)],
            updates={name: after[name] - before[name] for name in after},
        )
        task = self._key(job).split("/")[0]
        self.steps.append(Step(task=task, config=job.config, weights=weights, optimizer=optimizer, facts=facts))

    def _key(self, job: JobState) -> str:
        (name,) = (
            name for name, session in self._shared.executor.sessions.items() if job in session.state.jobs.values()
        )
        return f"{name}/{job.id}"

    def _state(self, job: JobState) -> tuple[AdapterWeights, OptimizerState]:
        trainer = self._shared.executor.bank.trainer
        return trainer.bank.read(job.slot), trainer.optimizer.read(job.slot)


def solo_of(step: Step, trl: Any) -> SoloJob:
    base, data = make_model("llama"), tasks()[step.task][1].train
    match step.task:
        case "cedar":
            return SoloPairs(base, data, step.config, trl=trl, reference=reference_model(base))
        case "dogwood":
            return SoloOdds(base, data, step.config)
    return SoloJob(base, data, step.config)


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_dpo_trainer(tmp_path_factory.mktemp("trl"))


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """All steps after the last of four tasks has joined, one after the other."""
    with SharedExecutor(tmp_path) as shared:
        for name, (task, data) in tasks().items():
            shared.attach(name, task, data)
            shared.turn(2)
        observer = Observer(shared, monkeypatch)
        shared.turn(NUM_TURNS)
    return observer.steps


def test_from_equal_state_a_step_beside_other_tasks_is_one_of_peft_alone(steps: list[Step], trl: Any) -> None:
    assert {(step.task, step.config.seed) for step in steps} >= {
        (task, seed) for task in ("ash", "cedar", "dogwood") for seed in (1, 2)
    }
    for step in steps:
        solo = solo_of(step, trl)
        solo.load(step.weights, step.optimizer)
        assert_same_step(step.facts, solo.train_step())


@pytest.mark.parametrize("task", ["ash", "cedar", "dogwood"])
def test_a_step_of_other_rows_or_another_loss_is_found_out(task: str, steps: list[Step], trl: Any) -> None:
    step = next(step for step in steps if step.task == task)
    changes = {"seed": 3} if task == "ash" else {"beta": step.config.objective.beta * 1.01}
    solo = solo_of(replace(step, config=step.config.replace(**changes)), trl)
    solo.load(step.weights, step.optimizer)
    with pytest.raises(AssertionError):
        assert_same_step(step.facts, solo.train_step())
