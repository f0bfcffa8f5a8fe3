"""No step reads gradients that an earlier step left: with rows split over passes, resting jobs, or several
optimizers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from resident_jobs import Bank, make_model, make_task

from alto.lora import AdapterBank

CONFIGS: list[dict[str, object]] = [
    {"lr": 1e-3, "r": 4, "batch_size": 3, "seed": 1, "lora_dropout": 0.3},
    {"lr": 5e-4, "r": 8, "batch_size": 4, "seed": 2, "target_modules": ["q_proj", "down_proj"]},
    {"lr": 2e-4, "r": 2, "batch_size": 5, "seed": 3, "optim": "rmsprop"},
    {"lr": 2e-4, "r": 2, "batch_size": 2, "seed": 4, "use_dora": True},
    {"lr": 1e-3, "r": 4, "batch_size": 2, "seed": 5, "target_modules": ["embed_tokens", "lm_head", "v_proj"]},
]
RESTING = [(), (1,), (0, 3), (), (4,)]
"""Indices of the resting jobs, by step."""


def train(max_tokens: int) -> tuple[list[float], torch.Tensor]:
    """Return all losses, and the weights after some steps."""
    bank = Bank(make_model("llama"), make_task(CONFIGS, max_tokens_per_pass=max_tokens))
    losses = []
    for resting in RESTING:
        jobs = [job for index, job in enumerate(bank.jobs) if index not in resting]
        losses += bank.trainer.step(jobs)
        for job in jobs:
            job.step += 1
    return losses, bank.trainer.bank.params_ZP.clone()


@pytest.mark.parametrize("max_tokens", [10**6, 60], ids=["one pass", "several passes"])
def test_nothing_is_read_of_an_earlier_step(max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(max_tokens)
    end_gradients, num_spoilt = AdapterBank.end_gradients, 0

    def spoil(bank: AdapterBank, slots: Sequence[int]) -> None:
        nonlocal num_spoilt
        end_gradients(bank, slots)
        for slot in slots:
            is_trained = not bank.is_free(slot)
            if is_trained and not bank.is_cleared(slot):
                bank.grads_ZP[slot] = float("nan")
                num_spoilt += 1

    monkeypatch.setattr(AdapterBank, "end_gradients", spoil)
    losses, params_ZP = train(max_tokens)
    assert num_spoilt == 13, "three jobs of five overwrite their gradients"
    assert losses == expected[0]
    assert torch.equal(params_ZP, expected[1])
    assert params_ZP.isfinite().all()
