"""Law 1 on stacked experts: a job beside others equals the job alone, whichever experts their tokens go to.

The oracle is PEFT's ``target_parameters`` with torch's AdamW and the losses of TRL's trainers
(``tests/support/oracle_mixture.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")

import torch
from oracle import StepFacts
from oracle_mixture import (
    EXPERTS,
    TrlDpo,
    TrlSft,
    facts_in_peft,
    make_mixture,
    make_sft_trainer,
    make_trl_dpo,
    step_alone,
    trained_bank,
)
from resident_jobs import DATA, PAIRS, Bank, assert_same_step, make_task

from alto.data import TaskData
from alto.spec import Task

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_EXPERTS = {"mixtral": "num_local_experts", "gpt-oss": "num_local_experts", "olmoe": "num_experts"}
SLOTS = [3, 0, 4, 1]
JOBS: list[dict[str, object]] = [
    {"r": 1, "batch_size": 1, "weight_decay": 0.1, "seed": 1},
    {"r": 6, "batch_size": 2, "gradient_accumulation_steps": 3, "max_grad_norm": None, "seed": 2},
    {"r": 3, "batch_size": 4, "lora_alpha": 24, "max_grad_norm": 0.05, "seed": 3},
    {"r": 8, "batch_size": 3, "target_parameters": EXPERTS[1:], "seed": 4},
]
"""Ranks, scales, batches and trained parameters that differ."""


def task_of(jobs: list[dict[str, object]], **settings: Any) -> Task:
    common = {
        "lr": 1e-3,
        "target_modules": ["q_proj"],
        "target_parameters": EXPERTS,
        "gradient_accumulation_steps": 1,
        "weight_decay": 0.0,
        "router_aux_loss_coef": 0.0,
    }
    return make_task([common | job for job in jobs], **settings)


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> TrlSft:
    return make_sft_trainer(tmp_path_factory.mktemp("sft"))


@pytest.fixture(scope="module")
def dpo(tmp_path_factory: pytest.TempPathFactory) -> TrlDpo:
    return make_trl_dpo(tmp_path_factory.mktemp("dpo"))


def assert_steps_are_trls(
    bank: Bank, name: str, trl: TrlSft | TrlDpo, folder: Path, data: TaskData, **changes: Any
) -> dict[str, StepFacts]:
    """One step of all jobs from equal state; what ALTO found."""
    base = make_mixture(name, **changes)
    weights = {job.id: bank.trainer.bank.read(job.slot) for job in bank.jobs}
    found = bank.step()
    for job in bank.jobs:
        rows, config = job.order.rows_of_step(0), job.config

        def loss_of(model: Any, rows: Any = rows, config: Any = config) -> torch.Tensor:
            if isinstance(trl, TrlSft):
                return trl.loss(model, data.train, rows, config.per_device_train_batch_size, 0.0)
            return trl.loss(model, base, data.train, rows, config.objective.beta, 0.0)

        expected = step_alone(base, config, weights[job.id], folder / job.id, loss_of)
        assert_same_step(facts_in_peft(found[job.id]), expected)
    return found


def untouched_experts(facts: StepFacts) -> list[list[int]]:
    """For every layer, the experts whose matrices have no gradient at all."""
    return [
        [expert for expert, of_expert in enumerate(gradient) if not of_expert.any()]
        for name, gradient in sorted(facts.gradients.items())
        if name.endswith("experts.down_proj.A")
    ]


@pytest.mark.parametrize("name", NUM_EXPERTS)
def test_experts_that_get_no_token_of_a_job(name: str, sft: TrlSft, tmp_path: Path) -> None:
    """Others send tokens to them, and their matrices have no gradient."""
    many = {NUM_EXPERTS[name]: 24}
    bank = trained_bank(name, task_of(JOBS), SLOTS, **many)
    found = assert_steps_are_trls(bank, name, sft, tmp_path, DATA, **many)
    untouched = [untouched_experts(facts) for facts in found.values()]
    fewest = [min(len(of_layer) for of_layer in layers) for layers in untouched]
    assert fewest[0] > 0, "the smallest job sends tokens to all experts, so nothing was shown"
    for layer in range(2):
        sets = [set(layers[layer]) for layers in untouched]
        assert sets[0] - set.intersection(*sets), "no other job sends tokens to those experts"
    first = next(iter(found.values()))
    for name_of_matrix, update in first.updates.items():
        if name_of_matrix.endswith("experts.down_proj.B"):
            layer = int(name_of_matrix.split(".")[2])
            decay = 1e-3 * 0.1 * 0.2
            assert float(update[untouched[0][layer]].abs().max()) < decay, "only weight decay moves them"


@pytest.mark.parametrize("name", NUM_EXPERTS)
def test_tokens_of_all_jobs_go_to_the_same_experts(name: str, sft: TrlSft, tmp_path: Path) -> None:
    every = {"num_experts_per_tok": 4}
    bank = trained_bank(name, task_of(JOBS), SLOTS, **every)
    found = assert_steps_are_trls(bank, name, sft, tmp_path, DATA, **every)
    assert all(untouched_experts(facts) == [[], []] for facts in found.values())


@pytest.mark.parametrize("name", NUM_EXPERTS)
def test_pairs(name: str, dpo: TrlDpo, tmp_path: Path) -> None:
    jobs = [
        {**job, "gradient_accumulation_steps": 1, "loss_type": "sigmoid", "beta": 0.2 * number}
        for number, job in enumerate(JOBS, start=1)
    ]
    bank = trained_bank(name, task_of(jobs, method="dpo"), SLOTS, data=PAIRS)
    assert_steps_are_trls(bank, name, dpo, tmp_path, PAIRS)


@pytest.mark.parametrize(("method", "data"), [("sft", DATA), ("dpo", PAIRS)])
def test_a_step_in_micro_batches_that_split_a_batch_is_the_same_step(method: str, data: TaskData) -> None:
    jobs = JOBS
    if method == "dpo":
        jobs = [{**job, "gradient_accumulation_steps": 1, "beta": 0.3} for job in JOBS]
    whole, split = (
        trained_bank("mixtral", task_of(jobs, method=method, max_tokens_per_pass=tokens), SLOTS, data=data)
        for tokens in (10_000, 45)
    )
    assert max(job.next_step_tokens for job in whole.jobs) > 45
    expected, found = whole.step(), split.step()
    for job in whole.jobs:
        assert_same_step(found[job.id], expected[job.id])


@pytest.mark.parametrize("fault", ["matrices of another expert", "another scale"])
def test_the_comparison_fails_for(fault: str, sft: TrlSft, tmp_path: Path) -> None:
    bank = trained_bank("mixtral", task_of(JOBS), SLOTS)
    job = bank.jobs[1]
    config, weights, rows = job.config, bank.trainer.bank.read(job.slot), job.order.rows_of_step(0)
    if fault == "matrices of another expert":
        for target, _, b_ERN in bank.trainer.bank.matrices(bank.trainer.bank.params_ZP, job.slot):
            if target.num_experts:
                b_ERN.copy_(b_ERN.roll(1, 0))
    else:
        config = config.replace(lora_alpha=config.lora_alpha * 1.01)
    found = facts_in_peft(bank.step()[job.id])
    expected = step_alone(
        make_mixture("mixtral"),
        config,
        weights,
        tmp_path,
        lambda model: sft.loss(model, DATA.train, rows, config.per_device_train_batch_size, 0.0),
    )
    with pytest.raises(AssertionError):
        assert_same_step(found, expected)
