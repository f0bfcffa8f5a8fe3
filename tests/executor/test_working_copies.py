"""The bfloat16 copies of adapters that products read are equal to the weights after every change."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from resident_jobs import Bank, make_model, make_task

from alto.executor.auxiliary_terms import References
from alto.lora import AdapterWeights

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

CONFIGS: list[dict[str, object]] = [
    {"lr": 1e-2, "r": 4, "batch_size": 1, "seed": 1, "lora_dropout": 0.3, "target_modules": ["q_proj", "v_proj"]},
    {"lr": 1e-2, "r": 2, "batch_size": 1, "seed": 2, "target_modules": ["o_proj"], "optim": "rmsprop"},
    {"lr": 1e-2, "r": 2, "batch_size": 1, "seed": 3, "target_modules": ["down_proj"], "use_dora": True},
]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALTO_KERNELS", "triton")


class InitialAdapter:
    """The initial adapter of a job, as far as it is read."""

    def __init__(self, weights: AdapterWeights) -> None:
        self.weights = weights


def make_bank() -> Bank:
    bank = Bank(make_model("llama").bfloat16(), make_task(CONFIGS))
    assert_copied(bank)
    return bank


def assert_copied(bank: Bank) -> None:
    found = bank.trainer.bank
    assert found.working_ZP is not None
    # Triton's interpreter truncates where its compiler rounds.
    cut_ZP = (found.params_ZP.view(torch.int32) & -65536).view(torch.float32).bfloat16()
    assert ((found.working_ZP == found.params_ZP.bfloat16()) | (found.working_ZP == cut_ZP)).all()


def step(bank: Bank) -> None:
    bank.trainer.step(bank.jobs)
    for job in bank.jobs:
        job.step += 1


def test_steps_of_every_optimizer_and_slots_that_are_given_away() -> None:
    bank = make_bank()
    before = bank.trainer.bank.params_ZP.clone()
    for _ in range(2):
        step(bank)
        assert_copied(bank)
    assert (bank.trainer.bank.params_ZP != before)[: len(bank.jobs)].any(1).all()
    job = bank.jobs[0]
    weights, state = bank.trainer.bank.read(0), bank.trainer.optimizer.read(0)
    bank.trainer.bank.release(0)
    bank.trainer.admit(job, 0, weights, state)
    assert_copied(bank)
    bank.trainer.bank.release(0)
    bank.trainer.admit(job, 0)
    assert_copied(bank)


def test_passes_of_what_jobs_begin_with() -> None:
    """KTO's divergence from an initial adapter needs a pass with that adapter in the jobs' slots."""
    bank = make_bank()
    step(bank)
    before = bank.trainer.bank.params_ZP.clone()
    begun = InitialAdapter(bank.trainer.bank.read(1))
    for value in begun.weights.values():
        value[1].fill_(3.0)
    with References(bank.trainer.passes).start_weights({1: begun}):
        assert (bank.trainer.bank.params_ZP == 3.0).any()
        assert_copied(bank)
    assert torch.equal(bank.trainer.bank.params_ZP, before)
    assert_copied(bank)


def test_products_read_them() -> None:
    bank, spoilt = make_bank(), make_bank()
    assert spoilt.trainer.bank.working_ZP is not None
    spoilt.trainer.bank.working_ZP.mul_(2.0)
    losses = []
    for one in (bank, spoilt):
        step(one)  # before it every B is zero
        losses.append(one.trainer.step(one.jobs))
    assert losses[0] != losses[1]


def test_a_base_in_float32_has_none() -> None:
    assert Bank(make_model("llama"), make_task(CONFIGS[:1])).trainer.bank.working_ZP is None
