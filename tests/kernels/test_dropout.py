"""Dropout masks: a function of the job's seed, its step and the module, and of nothing else."""

from __future__ import annotations

import pytest
import torch

from alto.kernels import DropoutKey, TokenSchedule
from alto.kernels.dropout import apply_dropout, dropout_factor

KEY = DropoutKey(probability=0.3, seed=11, step=4)
CPU = torch.device("cpu")


def factor(key: DropoutKey = KEY, module: int = 2, num_tokens: int = 40) -> torch.Tensor:
    return dropout_factor(key, module, num_tokens, 25, CPU)


def test_kept_values_are_scaled_so_that_the_mean_stays() -> None:
    drawn = dropout_factor(KEY, 0, 400, 250, CPU)
    assert drawn.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert float((drawn == 0).float().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(drawn.mean()) == pytest.approx(1.0, abs=0.01)


def test_the_same_key_gives_the_same_mask() -> None:
    assert torch.equal(factor(), factor())


@pytest.mark.parametrize(
    "other",
    [
        factor(KEY._replace(seed=12)),
        factor(KEY._replace(step=5)),
        factor(module=3),
        factor(KEY._replace(seed=4, step=11)),
    ],
    ids=["seed", "step", "module", "seed and step swapped"],
)
def test_seed_step_and_module_each_give_another_mask(other: torch.Tensor) -> None:
    agreement = float(((factor() == 0) == (other == 0)).float().mean())
    assert agreement == pytest.approx(0.7**2 + 0.3**2, abs=0.06), "masks are not independent"


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    factor()
    assert torch.equal(before, torch.get_rng_state())


def test_company_slot_and_offset_do_not_matter() -> None:
    x_TK = torch.rand(9, 25, generator=torch.Generator().manual_seed(0)) + 1.0
    alone = apply_dropout(x_TK, TokenSchedule.build([0], [9], [1.0], [KEY]), 2)
    company = torch.cat([torch.ones(3, 25), torch.ones(5, 25), x_TK])
    schedule = TokenSchedule.build([4, 2, 7], [3, 5, 9], [1.0] * 3, [KEY._replace(seed=1), None, KEY])
    together = apply_dropout(company, schedule, 2)
    assert torch.equal(together[8:], alone)
    assert torch.equal(alone, x_TK * dropout_factor(KEY, 2, 9, 25, CPU))
    assert torch.equal(together[3:8], company[3:8]), "a job without dropout was masked"
    assert not torch.equal(together[:3], company[:3])


def test_the_input_itself_is_kept() -> None:
    x_TK = torch.ones(9, 25)
    dropped = apply_dropout(x_TK, TokenSchedule.build([0], [9], [1.0], [KEY]), 2)
    assert torch.equal(x_TK, torch.ones(9, 25))
    assert not torch.equal(dropped, x_TK)
    assert apply_dropout(x_TK, TokenSchedule.build([0], [9], [1.0]), 2) is x_TK
