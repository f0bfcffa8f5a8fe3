"""Dropout masks: a hash of the job's seed, its step, the group, token and feature, and of nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from adapter_groups import Group
from hypothesis import given
from hypothesis import strategies as st
from kernel_backends import BACKENDS, lowbias32
from torch import Tensor

from alto.kernels import DropoutKey, TokenSchedule, torch_backend
from alto.kernels.dropout import dropout_factor

KEY = DropoutKey(probability=0.3, seed=11, step=4)
CPU = torch.device("cpu")


def kept(key: DropoutKey = KEY, number: int = 2, num_tokens: int = 300, num_features: int = 200) -> Tensor:
    """Return one where an element is kept, ``[T, K]`` float64."""
    return (dropout_factor(key, number, num_tokens, num_features, CPU) != 0).double()


def is_kept(key: DropoutKey, number: int, token: int, feature: int) -> bool:
    """Return whether an element is kept, by the definition: one 32-bit word after the other is hashed in, token and
    feature last."""
    mixed = 0
    for word in (key.seed % 2**32, key.seed // 2**32 % 2**32, key.step, number):
        mixed = lowbias32((mixed + word + 1) % 2**32)
    row = lowbias32((mixed + token) % 2**32)
    return lowbias32((row + feature) % 2**32) >= round(key.probability * 2**32)


@given(
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**32 - 1),
    number=st.integers(0, 2**16),
    probability=st.floats(0.01, 0.99),
)
def test_the_mask_is_the_hash_bit_by_bit(seed: int, step: int, number: int, probability: float) -> None:
    key = DropoutKey(probability, seed, step)
    factor = dropout_factor(key, number, 3, 5, CPU)
    expected = [[is_kept(key, number, token, feature) for feature in range(5)] for token in range(3)]
    assert (factor != 0).tolist() == expected
    assert factor.dtype == torch.float32
    torch.testing.assert_close(factor, torch.tensor(expected).float() / (1.0 - probability))


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_kept_is_right_overall_and_in_every_row_and_column(probability: float) -> None:
    mask_TK = kept(KEY._replace(probability=probability))
    for dims, count in (((0, 1), mask_TK.numel()), ((0,), mask_TK.shape[0]), ((1,), mask_TK.shape[1])):
        deviation = math.sqrt(probability * (1 - probability) / count)
        off = (mask_TK.mean(dims) - (1 - probability)).abs().max()
        # Among hundreds of rows, the worst of a fair draw is off by about three deviations.
        assert float(off) < 5 * deviation


def test_the_mean_stays() -> None:
    assert float(dropout_factor(KEY, 0, 400, 250, CPU).mean()) == pytest.approx(1.0, abs=0.01)


def correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


@pytest.mark.parametrize(
    "other",
    [
        {"key": KEY._replace(seed=12)},
        {"key": KEY._replace(seed=11 + 2**32)},
        {"key": KEY._replace(step=5)},
        {"key": KEY._replace(seed=4, step=11)},
        {"number": 3},
        {"key": KEY._replace(step=2), "number": 4},
    ],
    ids=["seed", "upper half of the seed", "step", "seed and step swapped", "number", "step and number swapped"],
)
def test_another_seed_step_or_number_gives_an_independent_mask(other: dict[str, object]) -> None:
    one, another = kept(), kept(**other)
    assert abs(correlation(one, another)) < 5 / math.sqrt(one.numel())
    # Nor are the rows a shifted copy of the same stream.
    for shift in range(1, 30):
        assert abs(correlation(one[shift:], another[:-shift])) < 0.03
        assert abs(correlation(one[:-shift], another[shift:])) < 0.03


def test_rows_and_columns_of_a_mask_are_independent() -> None:
    mask_TK = kept()
    for of in (mask_TK, mask_TK.T):
        matrix = torch.corrcoef(of)
        matrix.fill_diagonal_(0.0)
        # Among some twenty thousand pairs, the worst of a fair draw is off by about four and a half deviations.
        assert float(matrix.abs().max()) < 6 / math.sqrt(of.shape[1])
        assert float(matrix.square().mean()) == pytest.approx(1 / of.shape[1], rel=0.05)
    for shift in range(1, 30):
        assert abs(correlation(mask_TK[:, shift:], mask_TK[:, :-shift])) < 0.03
        # If token and feature were added, rows would be shifted copies of each other.
        assert abs(correlation(mask_TK[shift:, :-shift], mask_TK[:-shift, shift:])) < 0.03


def test_a_longer_pass_begins_with_the_mask_of_a_shorter_one() -> None:
    """The bits of a token and feature do not depend on the numbers of tokens and features."""
    assert torch.equal(kept()[:40, :25], kept(num_tokens=40, num_features=25))


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    kept()
    assert torch.equal(before, torch.get_rng_state())


def test_other_jobs_slot_and_offset_do_not_matter() -> None:
    """With ``A`` the identity, ``grouped_shrink`` returns the masked tokens themselves."""
    group = Group([[9]] * 8, in_features=9, out_features=[1], number=2)
    for matrices in group.operands.slots.values():
        matrices.a_KQ.copy_(torch.eye(9))

    def masked(slots: list[int], counts: list[int], keys: list[DropoutKey | None]) -> Tensor:
        schedule = TokenSchedule.build(slots, counts, [1.0] * len(slots), keys)
        x_TK = torch.ones(schedule.num_tokens, 9, dtype=torch.float64)
        return torch_backend.grouped_shrink(x_TK, group.operands, schedule)

    alone = masked([0], [30], [KEY])
    together = masked([4, 2, 7], [3, 5, 30], [KEY._replace(seed=1), None, KEY])
    assert torch.equal(together[8:], alone)
    assert torch.equal(alone, dropout_factor(KEY, 2, 30, 9, CPU).double())
    assert (together[3:8] == 1.0).all(), "a job without dropout was masked"
    assert torch.equal(together[:3], dropout_factor(KEY._replace(seed=1), 2, 3, 9, CPU).double())


@BACKENDS
def test_a_batch_spread_over_passes_has_the_masks_of_one(ops: Any) -> None:
    """Every op with dropout, on parts that begin at odd places and are longer than a block."""
    key, count, first = KEY._replace(probability=0.5), 150, 67
    results = []
    for parts in ([(0, count)], [(0, first), (first, count)]):
        group = Group([[4]], in_features=9, out_features=[7], number=2)
        generator = torch.Generator().manual_seed(0)
        x_TK = torch.randn(count, 9, dtype=torch.float64, generator=generator)
        dy_TN = torch.randn(count, 7, dtype=torch.float64, generator=generator)
        s, dx = [], []
        for start, end in parts:
            schedule = TokenSchedule.build([0], [end - start], [1.5], [key._replace(first_token=start)])
            x, dy, dx_part = x_TK[start:end], dy_TN[start:end], torch.zeros(end - start, 9, dtype=torch.float64)
            s_part = ops.grouped_shrink(x, group.operands, schedule)
            ds_part = ops.grouped_backward_input([dy], group.operands, dx_part, schedule)
            ops.grouped_backward_weight(x, s_part, [dy], ds_part, group.operands, schedule)
            s.append(s_part)
            dx.append(dx_part)
        results.append((torch.cat(s), torch.cat(dx), group.operands.grads_ZP))
    for whole, in_parts in zip(*results, strict=True):
        torch.testing.assert_close(in_parts, whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_does_not_matter() -> None:
    on_gpu = dropout_factor(KEY, 2, 300, 200, torch.device("cuda"))
    assert torch.equal(on_gpu.cpu(), dropout_factor(KEY, 2, 300, 200, CPU))
