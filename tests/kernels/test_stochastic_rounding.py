"""Rounding of moments to bfloat16: unbiased, by a hash of seed, step and place alone, equal in every backend."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_backends import BACKENDS, lowbias32
from torch import Tensor

from alto.kernels import RowParts, RowStep, choose_backend, rounding_key
from alto.kernels.stochastic_rounding import _CHUNK, MomentRounding, random_bits, rounded

NAN, INF = float("nan"), float("inf")
CPU, REFERENCE = torch.device("cpu"), choose_backend("reference")


@given(seed=st.integers(0, 2**64 - 1), step=st.integers(1, 2**32 - 1), column=st.integers(0, 2**40))
def test_the_bits_are_the_hash_of_seed_step_and_place(seed: int, step: int, column: int) -> None:
    mixed = 0
    for word in (seed % 2**32, seed // 2**32, step, -2):
        mixed = lowbias32((mixed + word + 1) % 2**32)
    expected = lowbias32((lowbias32((mixed + column // 2**32) % 2**32) + column) % 2**32)
    assert rounding_key(seed, step) == mixed
    assert random_bits(mixed, torch.tensor([column])).tolist() == [expected]


@given(value=st.floats(width=32, allow_nan=False), bits=st.integers(0, 0xFFFF))
def test_a_number_becomes_one_of_its_two_neighbours_with_the_probability_that_keeps_the_mean(
    value: float, bits: int
) -> None:
    exact = torch.tensor([value], dtype=torch.float32)
    word = exact.view(torch.int32)
    below = (word & ~0xFFFF).view(torch.float32)
    above = ((word & ~0xFFFF) + 0x10000).view(torch.float32)
    found = rounded(exact, torch.tensor([bits])).float()
    # Of 65,536 equally likely draws, as many round away from zero as the number exceeds its neighbour nearer to zero.
    distance = int(word) & 0xFFFF
    assert torch.equal(found, above if bits >= 0x10000 - distance else below)
    assert math.copysign(1.0, float(found)) == math.copysign(1.0, value)


def test_what_bfloat16_holds_and_what_is_not_finite_stays() -> None:
    held = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-133, INF, -INF])
    for bits in (0, 1, 0x7FFF, 0xFFFF):
        found = rounded(held, torch.full((7,), bits))
        assert torch.equal(found.view(torch.int16), held.to(torch.bfloat16).view(torch.int16))
        odd_nans = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
        assert rounded(odd_nans, torch.full((3,), bits)).isnan().all()
        for_update = odd_nans.clone()
        MomentRounding(CPU).round_(for_update, odd_nans.clone(), bits)
        assert for_update.isnan().all()


def test_in_place_and_in_pieces_it_is_the_same() -> None:
    size = 2 * _CHUNK + 17
    generator = torch.Generator().manual_seed(0)
    exp_avg, exp_avg_sq = torch.randn(size, generator=generator), torch.rand(size, generator=generator)
    exp_avg[[3, _CHUNK]] = NAN
    bits = random_bits(rounding_key(7, 1), torch.arange(size))
    expected = rounded(exp_avg, bits & 0xFFFF), rounded(exp_avg_sq, bits >> 16)
    MomentRounding(CPU).round_(exp_avg, exp_avg_sq, rounding_key(7, 1))
    for found, one in zip((exp_avg, exp_avg_sq), expected, strict=True):
        assert torch.equal(found.nan_to_num(9.0), one.float().nan_to_num(9.0))


class Bank:
    """Rows of weights, float32 by default, with moments in bfloat16; every row trains on the same gradients."""

    ROW_SIZE, END = 3100, 3007

    def __init__(self, num_rows: int, dtype: torch.dtype = torch.float32, value: float = 1.0) -> None:
        self.params = torch.full((num_rows, self.ROW_SIZE), value, dtype=dtype)
        self.grads = torch.zeros_like(self.params)
        self.exp_avg = torch.zeros(num_rows, self.ROW_SIZE, dtype=torch.bfloat16)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)

    def step(
        self,
        ops: ModuleType,
        slots: list[int],
        keys: list[int] | None,
        *,
        step: int = 1,
        rate: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        rows = [
            RowStep(
                slot=slot,
                parts=RowParts(1000, 2000, 2000, self.END),
                step=step,
                rates=(rate, rate),
                betas=betas,
                epsilon=1e-8,
                weight_decay=0.0,
                clears=False,
                rounding_key=None if keys is None else keys[index],
            )
            for index, slot in enumerate(slots)
        ]
        banks = (self.params, self.grads, self.exp_avg, self.exp_avg_sq)
        ops.bank_adamw(*banks, None, rows, torch.ones(len(slots)))

    def moments(self, slot: int) -> Tensor:
        return torch.stack([self.exp_avg[slot, : self.END], self.exp_avg_sq[slot, : self.END]]).float()


GRADIENT = 1.2345
EXACT = torch.tensor([0.1 * GRADIENT, 0.001 * GRADIENT**2])
"""The moments after a first step."""


@BACKENDS
def test_the_mean_over_places_and_over_seeds_is_the_exact_number(ops: ModuleType) -> None:
    """Rounding to nearest would put every number off on the same side."""

    def furthest(seeds: list[int] | None) -> tuple[float, float]:
        """Return the relative errors of the means, over all places of a seed, and over seeds at a place, in
        deviations."""
        bank, slots = Bank(len(seeds or [0])), list(range(len(seeds or [0])))
        bank.grads[:] = GRADIENT
        bank.step(ops, slots, None if seeds is None else [rounding_key(seed, 1) for seed in seeds])
        moments_Z2P = torch.stack([bank.moments(slot) for slot in slots])
        # Two neighbours differ by at most 2^-7 of their size; the deviation of a draw is at most half of that.
        deviation = EXACT * 2.0**-8
        off_2 = (moments_Z2P.mean((0, 2)) - EXACT).abs() / deviation * math.sqrt(len(slots) * Bank.END)
        off_2P = (moments_Z2P.mean(0) - EXACT[:, None]).abs() / deviation[:, None] * math.sqrt(len(slots))
        return float(off_2.max()), float(off_2P.max())

    over_all, at_a_place = furthest(list(range(16)))
    assert over_all < 4
    assert at_a_place < 5  # at 6,014 places
    assert furthest(None)[0] > 10, "rounding to the nearest should not pass"


@BACKENDS
def test_both_moments_are_rounded_independently(ops: ModuleType) -> None:
    bank = Bank(1)
    bank.grads[:] = GRADIENT
    bank.step(ops, [0], [rounding_key(5, 1)])
    ups_2P = (bank.moments(0) > EXACT[:, None]).double()
    assert abs(float(torch.corrcoef(ups_2P)[0, 1])) < 5 / math.sqrt(Bank.END)
    for shift in range(1, 40):
        for row_P in ups_2P:
            assert abs(float(torch.corrcoef(torch.stack([row_P[shift:], row_P[:-shift]]))[0, 1])) < 0.1


@BACKENDS
def test_a_row_s_bits_follow_from_its_seed_and_step_alone(ops: ModuleType) -> None:
    gradient_P = torch.randn(Bank.ROW_SIZE, generator=torch.Generator().manual_seed(1))

    def trained(num_rows: int, slot: int, seed: int, first_step: int = 1) -> list[Tensor]:
        bank, slots = Bank(num_rows), list(range(num_rows))
        slots = slots[slot:] + slots[:slot]
        bank.grads[:] = gradient_P
        for step in (1, 2):
            keys = [rounding_key(seed if row == slot else 100 + row, first_step - 1 + step) for row in slots]
            bank.step(ops, slots, keys, step=step)
        return [bank.params[slot, : Bank.END], bank.moments(slot)]

    def same(one: list[Tensor], other: list[Tensor]) -> bool:
        return all(torch.equal(*pair) for pair in zip(one, other, strict=True))

    alone = trained(1, 0, seed=3)
    assert same(alone, trained(4, 2, seed=3))
    assert not same(alone, trained(4, 2, seed=4))
    assert not same(alone, trained(1, 0, seed=3, first_step=2))


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backends_agree_to_the_bit_where_the_arithmetic_is_exact(ops: ModuleType, dtype: torch.dtype) -> None:
    """Decays and gradients have few bits, so that no sum is rounded before the moments are."""

    def trained(backend: ModuleType, seed: int) -> Bank:
        bank, generator = Bank(2, dtype), torch.Generator().manual_seed(4)
        for step in range(1, 5):
            bank.grads[:] = torch.randint(-127, 128, bank.grads.shape, generator=generator).to(dtype) / 64
            keys = [rounding_key(seed, step), rounding_key(seed + 1, step)]
            bank.step(backend, [1, 0], keys, step=step, betas=(0.5, 0.75))
        return bank

    expected, found, otherwise = trained(REFERENCE, 8), trained(ops, 8), trained(REFERENCE, 18)
    limit = 1e-6 if dtype == torch.float32 else 4 * 2.0**-7  # Triton's interpreter truncates a bfloat16
    torch.testing.assert_close(found.params, expected.params, rtol=limit, atol=limit)
    for name in ("exp_avg", "exp_avg_sq"):
        bits, others = (getattr(bank, name)[:, : Bank.END].view(torch.int16) for bank in (expected, otherwise))
        assert torch.equal(getattr(found, name)[:, : Bank.END].view(torch.int16), bits)
        assert not getattr(found, name)[:, Bank.END :].any()
        assert float((bits != others).double().mean()) > 0.2, "there should be something to round"


@BACKENDS
def test_the_second_moment_stays_positive_and_zero_stays_zero(ops: ModuleType) -> None:
    bank = Bank(1)
    # Down to squares that float32 can barely represent.
    bank.grads[0] = torch.logspace(-22, 3, Bank.ROW_SIZE)
    bank.grads[0, ::5] = 0.0
    for step in range(1, 8):
        bank.step(ops, [0], [rounding_key(0, step)], step=step)
        assert (bank.moments(0)[1] >= 0).all()
        assert not bank.moments(0)[:, ::5].any()
        assert bank.params.isfinite().all()


@BACKENDS
def test_a_nan_stays_in_its_place(ops: ModuleType) -> None:
    clean, beside_nan = Bank(2), Bank(2)
    for bank in (clean, beside_nan):
        bank.grads[:] = GRADIENT
        if bank is beside_nan:
            bank.grads[0, 17] = NAN
        bank.step(ops, [0, 1], [rounding_key(0, 1), rounding_key(1, 1)])
    assert beside_nan.moments(0)[:, 17].isnan().all()
    for bank in (clean, beside_nan):
        bank.exp_avg[0, 17] = bank.exp_avg_sq[0, 17] = 0.0
    assert torch.equal(clean.exp_avg, beside_nan.exp_avg)
    assert torch.equal(clean.exp_avg_sq, beside_nan.exp_avg_sq)


def trained_quadratic(dtype: torch.dtype, *, at_random: bool) -> tuple[Tensor, Tensor]:
    """Return weights and second moments after 500 noisy steps towards zero, on shrinking gradients."""
    bank = Bank(1, value=0.5)
    bank.exp_avg, bank.exp_avg_sq = bank.exp_avg.to(dtype), bank.exp_avg_sq.to(dtype)
    curvature = torch.logspace(-1, 1, Bank.ROW_SIZE)
    generator = torch.Generator().manual_seed(2)
    for step in range(1, 501):
        noise = 0.05 * torch.randn(bank.params.shape, generator=generator)
        bank.grads[:] = curvature * (bank.params + noise)
        keys = [rounding_key(0, step)] if at_random else None
        bank.step(REFERENCE, [0], keys, step=step, rate=0.003)
    return bank.params[0, : Bank.END], bank.exp_avg_sq[0, : Bank.END].float()


def test_training_is_that_of_float32_moments_and_to_the_nearest_it_is_not() -> None:
    weights, squares = trained_quadratic(torch.float32, at_random=False)
    of_random, squares_of_random = trained_quadratic(torch.bfloat16, at_random=True)
    of_nearest, squares_of_nearest = trained_quadratic(torch.bfloat16, at_random=False)
    off_random, off_nearest = (float((found - weights).norm() / weights.norm()) for found in (of_random, of_nearest))
    assert off_random < 0.03 < 3 * off_random < off_nearest
    # Second moments fall with the gradients; rounded to nearest they would stay where they were.
    assert float((squares_of_random / squares).mean()) == pytest.approx(1.0, abs=0.005)
    assert float((squares_of_random / squares).std()) < 0.06
    assert float((squares_of_nearest / squares).mean()) > 1.2
