"""Noise on embeddings (``neftune_noise_alpha``): transformers' own hook with the same draws gives the same step, and
the draws depend on the job alone."""

from __future__ import annotations

import math

import pytest
import torch
from job_kinds import compare
from noise import unit_noise
from oracle import relative_distance
from resident_jobs import Bank, make_model, make_task

from alto.kernels import NoiseKey, TokenNoise

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

CPU = torch.device("cpu")
JOBS = [
    {"lr": 1e-3, "r": 8, "batch_size": 1, "neftune_noise_alpha": 5.0, "seed": 61},
    {"lr": 1e-3, "r": 8, "batch_size": 1, "neftune_noise_alpha": 15.0, "seed": 62},
    {"lr": 5e-4, "r": 4, "batch_size": 3, "neftune_noise_alpha": None, "seed": 63},
]


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_step_is_that_of_transformers_hook_with_the_same_draws(name: str) -> None:
    compare(lambda: make_model(name), Bank(make_model(name), make_task(JOBS), slots=[2, 0, 1]))


def test_the_noise_is_not_small() -> None:
    job = JOBS[0]
    banks = [Bank(make_model("llama"), make_task([job | {"neftune_noise_alpha": alpha}])) for alpha in (5.0, None)]
    found, other = (bank.step()["job-000"] for bank in banks)
    assert relative_distance(found.gradients, other.gradients) > 0.01


def test_evaluation_has_no_noise() -> None:
    banks = [Bank(make_model("llama"), make_task([JOBS[0] | {"neftune_noise_alpha": a}])) for a in (15.0, None)]
    values = [bank.trainer.evaluate(bank.jobs)[0].loss for bank in banks]
    assert values[0] == values[1]


def test_micro_batches_change_no_draw() -> None:
    """Rows of a step have the same noise whether they are computed one by one or together."""
    job = {"lr": 1e-3, "r": 8, "batch_size": 4, "neftune_noise_alpha": 10.0, "seed": 64}
    banks = [Bank(make_model("llama"), make_task([job], max_tokens_per_pass=tokens)) for tokens in (40, 1000)]
    for _ in range(2):
        one_by_one, together = (bank.step()["job-000"] for bank in banks)
        assert one_by_one.loss == pytest.approx(together.loss, rel=1e-5)
        assert relative_distance(one_by_one.gradients, together.gradients) < 1e-4


def test_draws_are_uniform_and_differ_between_seeds_steps_tokens_and_features() -> None:
    keys = NoiseKey(1.0, 7, 3)
    drawn = unit_noise(keys, [400], 96)
    assert float(drawn.abs().max()) <= 1.0
    assert float(drawn.mean()) == pytest.approx(0.0, abs=0.01)
    assert float(drawn.std()) == pytest.approx(1 / math.sqrt(3), rel=0.01)
    histogram = torch.histc(drawn, bins=20, min=-1.0, max=1.0) / drawn.numel()
    assert float((histogram - 0.05).abs().max()) < 0.005
    for other in (keys._replace(seed=8), keys._replace(step=4), keys._replace(first_token=1)):
        assert float((unit_noise(other, [400], 96) * drawn).mean()) == pytest.approx(0.0, abs=0.01)
    assert float((drawn[1:] * drawn[:-1]).mean()) == pytest.approx(0.0, abs=0.01)
    assert float((drawn[:, 1:] * drawn[:, :-1]).mean()) == pytest.approx(0.0, abs=0.01)
    assert torch.equal(unit_noise(keys._replace(first_token=1), [399], 96), drawn[1:])


def test_every_sequence_has_its_own_amplitude_and_others_keep_their_bits() -> None:
    keys = [None, NoiseKey(6.0, 1, 0), None]
    noise = TokenNoise.build(keys, [[5], [9, 25], [3]], CPU)
    assert noise is not None
    before = torch.randn(42, 16)
    added = noise.add_to(before) - before
    assert not added[:5].any()
    assert not added[39:].any()
    for first, last, limit in ((5, 14, 6.0 / math.sqrt(9 * 16)), (14, 39, 6.0 / math.sqrt(25 * 16))):
        assert 0.8 * limit < float(added[first:last].abs().max()) <= limit * (1 + 1e-5)
    assert TokenNoise.build([None], [[5]], CPU) is None
