"""Every op of every backend against a dense formula written without slots' loops, in float64.

The dense side gives each token its own matrices (``a_ZKR[slot of token]``) and contracts with einsum. Its padding
columns hold NaN wherever an op must not read, and each comparison is shown to fail for zeros, swapped slots and a
wrong scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_backends import BACKENDS
from torch import Tensor

from alto.kernels import TokenSchedule

UNHURRIED = settings(deadline=None)  # interpreted kernels take their time
MAX_RANK = 16
TOLERANCE = 1e-12


@dataclass(frozen=True, kw_only=True)
class Case:
    """Operands of one module; ``a``, ``b`` and their gradients are slices of wider rows, as in the bank."""

    schedule: TokenSchedule
    ranks: Sequence[int]
    x_TK: Tensor
    dy_TN: Tensor
    y_TN: Tensor
    dx_TK: Tensor
    a_ZKR: Tensor
    b_ZRN: Tensor
    da_ZKR: Tensor
    db_ZRN: Tensor

    @property
    def token_slots(self) -> Tensor:
        return torch.cat([torch.full((end - start,), slot) for slot, start, end in self.schedule.segments])

    @property
    def token_scales(self) -> Tensor:
        pairs = zip(self.schedule.segments, self.schedule.scales, strict=True)
        return torch.cat([torch.full((end - start,), scale, dtype=torch.float64) for (_, start, end), scale in pairs])

    @property
    def rank_mask(self) -> Tensor:
        """One in the columns that a slot's own rank has."""
        return (torch.arange(MAX_RANK)[None, :] < torch.tensor(self.ranks)[:, None]).double()


def make_case(
    slots: Sequence[int],
    counts: Sequence[int],
    ranks: Sequence[int],
    scales: Sequence[float],
    k: int,
    n: int,
    seed: int,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    num_slots = len(ranks)
    schedule = TokenSchedule.build(slots, counts, scales)
    rank_mask = (torch.arange(MAX_RANK)[None, :] < torch.tensor(ranks)[:, None]).double()

    def views() -> tuple[Tensor, Tensor]:
        # Three numbers before, five between and seven after, so that no stride is what a tight tensor has.
        rows = draw(num_slots, 3 + k * MAX_RANK + 5 + MAX_RANK * n + 7)
        a = rows[:, 3 : 3 + k * MAX_RANK].unflatten(1, (k, MAX_RANK))
        b = rows[:, 8 + k * MAX_RANK : 8 + k * MAX_RANK + MAX_RANK * n].unflatten(1, (MAX_RANK, n))
        a *= rank_mask[:, None, :]
        b *= rank_mask[:, :, None]
        return a, b

    a_ZKR, b_ZRN = views()
    da_ZKR, db_ZRN = views()
    tokens = schedule.num_tokens
    return Case(
        schedule=schedule,
        ranks=ranks,
        x_TK=draw(tokens, k),
        dy_TN=draw(tokens, n),
        y_TN=draw(tokens, n),
        dx_TK=draw(tokens, k),
        a_ZKR=a_ZKR,
        b_ZRN=b_ZRN,
        da_ZKR=da_ZKR,
        db_ZRN=db_ZRN,
    )


def poisoned(s_TR: Tensor, case: Case) -> Tensor:
    """``s_TR`` with NaN in all columns past each token's own rank."""
    return s_TR.masked_fill(case.rank_mask[case.token_slots] == 0, float("nan"))


def cleaned(s_TR: Tensor, case: Case) -> Tensor:
    return s_TR.masked_fill(case.rank_mask[case.token_slots] == 0, 0.0)


def dense_shrink(case: Case) -> Tensor:
    return torch.einsum("tk,tkr->tr", case.x_TK, case.a_ZKR[case.token_slots])


def dense_ds(case: Case) -> Tensor:
    return case.token_scales[:, None] * torch.einsum("tn,trn->tr", case.dy_TN, case.b_ZRN[case.token_slots])


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-300)) if expected.numel() else 0.0


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_slots = draw(st.integers(1, 4))
    slots = draw(st.permutations(range(num_slots)).map(lambda order: order[: draw(st.integers(1, num_slots))]))
    counts = draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 13]), min_size=len(slots), max_size=len(slots)))
    if not any(counts):
        counts[0] = 1
    ranks = draw(st.lists(st.sampled_from([0, 1, 3, 16]), min_size=num_slots, max_size=num_slots))
    scales = draw(st.lists(st.sampled_from([0.25, 1.0, 2.0, 3.5]), min_size=len(slots), max_size=len(slots)))
    width = st.sampled_from([1, 5, 8, 17])
    return make_case(slots, counts, ranks, scales, draw(width), draw(width), draw(st.integers(0, 99)))


@BACKENDS
@UNHURRIED
@given(case=cases())
def test_shrink(ops: ModuleType, case: Case) -> None:
    found = ops.grouped_shrink(case.x_TK, case.a_ZKR, case.schedule, case.ranks)
    assert_same(cleaned(found, case), dense_shrink(case))


@BACKENDS
@UNHURRIED
@given(case=cases())
def test_expand_adds_in_place_and_never_reads_past_the_rank(ops: ModuleType, case: Case) -> None:
    s_TR = dense_shrink(case)
    expected = case.y_TN + case.token_scales[:, None] * torch.einsum("tr,trn->tn", s_TR, case.b_ZRN[case.token_slots])
    y_TN = case.y_TN.clone()
    returned = ops.fused_expand_add(poisoned(s_TR, case), case.b_ZRN, y_TN, case.schedule, case.ranks)
    assert returned is y_TN
    assert_same(y_TN, expected)


@BACKENDS
@UNHURRIED
@given(case=cases())
def test_backward_input(ops: ModuleType, case: Case) -> None:
    dx_TK = case.dx_TK.clone()
    found = ops.grouped_backward_input(case.dy_TN, case.a_ZKR, case.b_ZRN, dx_TK, case.schedule, case.ranks)
    expected = dense_ds(case)
    assert_same(cleaned(found, case), expected)
    assert_same(dx_TK, case.dx_TK + torch.einsum("tr,tkr->tk", expected, case.a_ZKR[case.token_slots]))


@BACKENDS
@UNHURRIED
@given(case=cases())
def test_backward_input_without_anyone_who_asks_for_it(ops: ModuleType, case: Case) -> None:
    found = ops.grouped_backward_input(case.dy_TN, case.a_ZKR, case.b_ZRN, None, case.schedule, case.ranks)
    assert_same(cleaned(found, case), dense_ds(case))


@BACKENDS
@UNHURRIED
@given(case=cases())
def test_backward_weight_accumulates_and_never_reads_past_the_rank(ops: ModuleType, case: Case) -> None:
    s_TR, ds_TR = dense_shrink(case), dense_ds(case)
    one_hot_TZ = torch.nn.functional.one_hot(case.token_slots, len(case.ranks)).double()
    expected_a = case.da_ZKR + torch.einsum("tz,tk,tr->zkr", one_hot_TZ, case.x_TK, ds_TR)
    scaled_TN = case.token_scales[:, None] * case.dy_TN
    expected_b = case.db_ZRN + torch.einsum("tz,tr,tn->zrn", one_hot_TZ, s_TR, scaled_TN)
    da_ZKR, db_ZRN = case.da_ZKR.clone(), case.db_ZRN.clone()
    ops.grouped_backward_weight(
        case.x_TK,
        poisoned(s_TR, case),
        case.dy_TN,
        poisoned(ds_TR, case),
        da_ZKR,
        db_ZRN,
        case.schedule,
        case.ranks,
    )
    assert_same(da_ZKR, expected_a)
    assert_same(db_ZRN, expected_b)
    assert not da_ZKR[(case.rank_mask == 0)[:, None, :].expand_as(da_ZKR)].any(), "padding columns got a gradient"
    assert not db_ZRN[(case.rank_mask == 0)[:, :, None].expand_as(db_ZRN)].any(), "padding rows got a gradient"


@BACKENDS
def test_gradients_land_in_rows_of_a_wider_tensor(ops: ModuleType) -> None:
    case = make_case([1, 0], [3, 5], [2, 7], [1.0, 2.0], 6, 4, seed=0)
    assert not case.da_ZKR.is_contiguous()
    da, db = case.da_ZKR.clone(), case.db_ZRN.clone()
    arguments = (case.x_TK, dense_shrink(case), case.dy_TN, dense_ds(case))
    ops.grouped_backward_weight(*arguments, da, db, case.schedule, case.ranks)
    ops.grouped_backward_weight(*arguments, case.da_ZKR, case.db_ZRN, case.schedule, case.ranks)
    assert_same(case.da_ZKR, da)
    assert_same(case.db_ZRN, db)


@BACKENDS
def test_no_tokens_at_all(ops: ModuleType) -> None:
    case = make_case([0, 1], [2, 1], [3, 3], [1.0, 1.0], 4, 5, seed=0)
    empty = TokenSchedule.build([0, 1], [0, 0], [1.0, 1.0])
    assert ops.grouped_shrink(case.x_TK[:0], case.a_ZKR, empty, case.ranks).shape == (0, MAX_RANK)
    s_TR = case.x_TK.new_empty(0, MAX_RANK)
    assert ops.fused_expand_add(s_TR, case.b_ZRN, case.y_TN[:0], empty, case.ranks).shape == (0, 5)


@BACKENDS
@pytest.mark.parametrize("where", ["x", "a", "b", "dy"])
def test_nan_in_one_slot_leaves_every_bit_of_the_others(ops: ModuleType, where: str) -> None:
    def run(poison: bool) -> list[Tensor]:
        case = make_case([2, 0, 1], [5, 3, 4], [3, 16, 1], [1.0, 2.0, 0.5], 7, 5, seed=4)
        victim, (_, start, end) = 0, case.schedule.segments[1]
        if poison:
            target = {"x": case.x_TK, "dy": case.dy_TN, "a": case.a_ZKR, "b": case.b_ZRN}[where]
            target[victim if where in "ab" else slice(start, end)] = float("nan")
        s_TR = ops.grouped_shrink(case.x_TK, case.a_ZKR, case.schedule, case.ranks)
        y_TN = ops.fused_expand_add(s_TR, case.b_ZRN, case.y_TN, case.schedule, case.ranks)
        ds_TR = ops.grouped_backward_input(case.dy_TN, case.a_ZKR, case.b_ZRN, case.dx_TK, case.schedule, case.ranks)
        ops.grouped_backward_weight(
            case.x_TK, s_TR, case.dy_TN, ds_TR, case.da_ZKR, case.db_ZRN, case.schedule, case.ranks
        )
        tokens = torch.cat([torch.arange(0, start), torch.arange(end, case.schedule.num_tokens)])
        results = [y_TN, case.dx_TK, case.da_ZKR, case.db_ZRN]
        assert not poison or any(result.isnan().any() for result in results)
        others = [1, 2]
        return [y_TN[tokens], case.dx_TK[tokens], case.da_ZKR[others], case.db_ZRN[others]]

    assert all(torch.equal(clean, beside_nan) for clean, beside_nan in zip(run(False), run(True), strict=True))


@BACKENDS
@pytest.mark.parametrize("base", [torch.bfloat16, torch.float32])
def test_a_float32_bank_serves_a_base_of_lower_precision(ops: ModuleType, base: torch.dtype) -> None:
    case = make_case([0, 1], [5, 4], [3, 16], [1.0, 2.0], 8, 6, seed=1)
    a_ZKR, b_ZRN = case.a_ZKR.float(), case.b_ZRN.float()
    x_TK, y_TN = case.x_TK.to(base), case.y_TN.to(base)
    s_TR = ops.grouped_shrink(x_TK, a_ZKR, case.schedule, case.ranks)
    ops.fused_expand_add(s_TR, b_ZRN, y_TN, case.schedule, case.ranks)
    dx_TK = case.dx_TK.to(base)
    ds_TR = ops.grouped_backward_input(case.dy_TN.to(base), a_ZKR, b_ZRN, dx_TK, case.schedule, case.ranks)
    assert (s_TR.dtype, ds_TR.dtype, y_TN.dtype, dx_TK.dtype) == (torch.float32, torch.float32, base, base)
    limit = 1e-2 if base == torch.bfloat16 else 1e-6
    expected_y = case.y_TN + case.token_scales[:, None] * torch.einsum(
        "tr,trn->tn", dense_shrink(case), case.b_ZRN[case.token_slots]
    )
    expected_dx = case.dx_TK + torch.einsum("tr,tkr->tk", dense_ds(case), case.a_ZKR[case.token_slots])
    assert distance(y_TN.double(), expected_y) < limit
    assert distance(dx_TK.double(), expected_dx) < limit


class TestTheComparisonBites:
    """Zeros, swapped slots and a wrong scale are far outside the tolerance of every comparison above."""

    case = make_case([0, 1, 2], [5, 1, 7], [3, 1, 16], [1.0, 2.0, 3.5], 8, 5, seed=2)

    def results(self, ops: ModuleType, change: Callable[[Case], Case] | None = None) -> list[Tensor]:
        case = change(self.case) if change else self.case
        y_TN, dx_TK = torch.zeros_like(case.y_TN), torch.zeros_like(case.dx_TK)
        da_ZKR, db_ZRN = torch.zeros_like(case.da_ZKR), torch.zeros_like(case.db_ZRN)
        s_TR = cleaned(ops.grouped_shrink(case.x_TK, case.a_ZKR, case.schedule, case.ranks), case)
        ops.fused_expand_add(s_TR, case.b_ZRN, y_TN, case.schedule, case.ranks)
        ds_TR = ops.grouped_backward_input(case.dy_TN, case.a_ZKR, case.b_ZRN, dx_TK, case.schedule, case.ranks)
        ops.grouped_backward_weight(case.x_TK, s_TR, case.dy_TN, ds_TR, da_ZKR, db_ZRN, case.schedule, case.ranks)
        return [y_TN, dx_TK, da_ZKR, db_ZRN]

    @BACKENDS
    def test_zeros_fail(self, ops: ModuleType) -> None:
        for expected in self.results(ops):
            assert distance(torch.zeros_like(expected), expected) > 0.1
            with pytest.raises(AssertionError):
                assert_same(torch.zeros_like(expected), expected)

    @BACKENDS
    @pytest.mark.parametrize("mistake", ["swapped slots", "wrong scale"])
    def test_mistakes_fail(self, ops: ModuleType, mistake: str) -> None:
        def change(case: Case) -> Case:
            scales = [1.0, 2.0, 3.5] if mistake == "swapped slots" else [1.0, 2.0, 3.5001]
            slots = [2, 1, 0] if mistake == "swapped slots" else [0, 1, 2]
            schedule = TokenSchedule.build(slots, [5, 1, 7], scales)
            return Case(**(vars(case) | {"schedule": schedule}))

        for expected, found in zip(self.results(ops), self.results(ops, change), strict=True):
            with pytest.raises(AssertionError):
                assert_same(found, expected)
