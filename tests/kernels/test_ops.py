"""Every op of every backend against a dense formula written without a loop over slots, in float64.

The dense side gives each token its own matrices (``a_ZMKR[slot of token]``) and contracts with einsum. Everything that
an op must not read holds NaN: the bank around the matrices, narrow columns past a slot's own, memory beside the tokens.
Each comparison is shown to fail for zeros, swapped slots, swapped members, a wrong scale and another mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Literal, NamedTuple

import pytest
import torch
from adapter_groups import Group
from budgets import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_backends import BACKENDS
from torch import Tensor
from torch.nn.functional import one_hot

from alto.kernels import DropoutKey, GradientSteps, GroupGradients, LoraOperands, TokenSchedule
from alto.kernels.dropout import dropout_factor

MANY = settings(max_examples=examples(40))  # interpreted kernels are slow
TOLERANCE = 1e-11
NAN = float("nan")
CPU = torch.device("cpu")

Strides = Literal["contiguous", "sliced", "transposed"]


class Results(NamedTuple):
    """Results of a group's ops: narrow tensors as ``[T, M, R]``, the gradients of adapters as rows of the bank."""

    s_TMR: Tensor
    ys: list[Tensor]
    ds_TMR: Tensor
    dx_TK: Tensor
    grads_ZP: Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """A group and the tokens of a pass; ``strides`` is the memory layout of the tokens."""

    group: Group
    schedule: TokenSchedule
    x_TK: Tensor
    dys: list[Tensor]
    ys: list[Tensor]
    dx_TK: Tensor
    strides: Strides = "contiguous"

    @property
    def operands(self) -> LoraOperands:
        return self.group.operands

    @property
    def token_slots(self) -> Tensor:
        return torch.tensor([slot for slot, start, end in self.schedule.segments for _ in range(start, end)])

    @property
    def token_scales(self) -> Tensor:
        pairs = zip(self.schedule.lengths, self.schedule.scales, strict=True)
        return torch.tensor([scale for length, scale in pairs for _ in range(length)], dtype=torch.float64)

    def mask(self) -> Tensor:
        """Return the dropout factor of every token and feature, ``[T, K]``."""
        pairs = zip(self.schedule.lengths, self.schedule.dropout, strict=True)
        k = self.x_TK.shape[1]
        return torch.cat(
            [
                torch.ones(length, k) if key is None else dropout_factor(key, self.operands.number, length, k, CPU)
                for length, key in pairs
            ]
        ).double()

    def given(self, tensor: Tensor) -> Tensor:
        """Return a copy of a token tensor in the case's memory layout."""
        if self.strides == "transposed":
            return tensor.T.clone(memory_format=torch.contiguous_format).T
        if self.strides == "sliced":
            wider = tensor.new_full((tensor.shape[0] + 1, tensor.shape[1] + 3), NAN)
            wider[1:, 1:-2] = tensor
            return wider[1:, 1:-2]
        return tensor.clone(memory_format=torch.contiguous_format)

    def narrow(self, s_TMR: Tensor) -> Tensor:
        """Return ``s_TMR`` in the ops' layout, with NaN past every slot's own columns."""
        return self.group.packed(s_TMR, self.token_slots, NAN)

    def assert_narrow(self, found_TQ: Tensor, expected_TMR: Tensor) -> None:
        """Check that ``found_TQ`` is right in every slot's own columns; past them an op may leave anything."""
        expected_TQ = self.narrow(expected_TMR)
        assert found_TQ.shape == (self.schedule.num_tokens, self.operands.max_width)
        assert_same(torch.where(expected_TQ.isnan(), NAN, found_TQ), expected_TQ)

    def expected(self) -> Results:
        slots_T, scales_T1 = self.token_slots, self.token_scales[:, None]
        a_ZMKR, bs = self.group.dense(self.operands.params_ZP)
        da_ZMKR, dbs = self.group.dense(self.operands.grads_ZP)
        dropped_TK = self.x_TK * self.mask()
        ratios_TM1 = torch.tensor(self.group.ratios_ZM, dtype=torch.float64)[slots_T][..., None]
        s_TMR = ratios_TM1 * torch.einsum("tk,tmkr->tmr", dropped_TK, a_ZMKR[slots_T])
        ds_TMR = ratios_TM1 * torch.stack(
            [torch.einsum("tn,trn->tr", dy, b[slots_T]) for dy, b in zip(self.dys, bs, strict=True)], 1
        )
        ys = [
            scales_T1 * torch.einsum("tr,trn->tn", s_TMR[:, member], b_ZRN[slots_T]) for member, b_ZRN in enumerate(bs)
        ]
        dx_TK = self.mask() * scales_T1 * torch.einsum("tmr,tmkr->tk", ds_TMR, a_ZMKR[slots_T])
        scaled_TZ = scales_T1 * one_hot(slots_T, len(self.group.ranks_ZM))
        da_ZMKR += torch.einsum("tz,tk,tmr->zmkr", scaled_TZ, dropped_TK, ds_TMR)
        for member, dy_TN in enumerate(self.dys):
            dbs[member] += torch.einsum("tz,tr,tn->zrn", scaled_TZ, s_TMR[:, member], dy_TN)
        return Results(s_TMR, ys, ds_TMR, dx_TK, self.group.put(self.operands.grads_ZP, da_ZMKR, dbs))


def make_case(
    ranks_ZM: Sequence[Sequence[int]],
    slots: Sequence[int],
    counts: Sequence[int],
    scales: Sequence[float],
    *,
    keys: Sequence[DropoutKey | None] | None = None,
    k: int = 7,
    ns: Sequence[int],
    seed: int = 0,
    strides: Strides = "contiguous",
    ratios_ZM: Sequence[Sequence[float]] | None = None,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    schedule = TokenSchedule.build(slots, counts, scales, keys)

    def draw(width: int) -> Tensor:
        return torch.randint(-8, 9, (schedule.num_tokens, width), generator=generator).double() / 8

    return Case(
        group=Group(ranks_ZM, in_features=k, out_features=ns, seed=seed, ratios_ZM=ratios_ZM),
        schedule=schedule,
        x_TK=draw(k),
        dys=[draw(n) for n in ns],
        ys=[torch.full((schedule.num_tokens, n), NAN, dtype=torch.float64) for n in ns],
        dx_TK=torch.full((schedule.num_tokens, k), NAN, dtype=torch.float64),
        strides=strides,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_slots, num_members = draw(st.integers(1, 4)), draw(st.integers(1, 4))

    def each(of: Sequence[object], number: int) -> list[object]:
        return draw(st.lists(st.sampled_from(of), min_size=number, max_size=number))

    usual = each([0, 1, 3, 16, 128], num_slots)
    ranks_ZM = [[draw(st.sampled_from([rank, rank, rank, 0, 5])) for _ in range(num_members)] for rank in usual]
    ratios_ZM = [each([1.0, 1.0, 1.75, 0.5], num_members) for _ in range(num_slots)]
    slots = draw(st.permutations(range(num_slots)))[: draw(st.integers(1, num_slots))]
    counts = each([0, 1, 2, 3, 7, 13], len(slots))
    if not any(counts):
        counts[0] = 1
    keys = [None, None, DropoutKey(0.5, 3, 1), DropoutKey(0.1, 2**40, 7)]
    return make_case(
        ranks_ZM,
        slots,
        counts,
        each([0.25, 1.0, 2.0, 3.5], len(slots)),
        keys=each(keys, len(slots)),
        k=draw(st.sampled_from([1, 5, 8, 17])),
        ns=each([1, 5, 8, 17], num_members),
        seed=draw(st.integers(0, 99)),
        strides=draw(st.sampled_from(["contiguous", "sliced", "transposed"])),
        ratios_ZM=ratios_ZM,
    )


def many_slots() -> Case:
    """Return a case of 256 slots of every rank; a few dozen have tokens, the first and the last among them."""
    ranks = [(3, 0, 1, 16)[slot % 4] for slot in range(256)]
    ranks_ZM = [[rank, rank * (slot % 3 > 0)] for slot, rank in enumerate(ranks)]
    slots = [255, *range(0, 250, 7), 254]
    counts = [1 + slot % 3 for slot in slots]
    return make_case(ranks_ZM, slots, counts, [0.25 * (1 + slot % 5) for slot in slots], k=9, ns=[5, 6])


def mixed_case() -> Case:
    """Return a case of ranks 0, 1, 3, 16 and 128 in one pass, with and without dropout, some on a part of the members;
    ranks and scales differ between members."""
    return make_case(
        [[3, 5, 3], [16, 0, 16], [128, 128, 0], [0, 0, 0], [1, 1, 1]],
        [2, 0, 3, 4, 1],
        [5, 1, 3, 9, 7],
        [1.0, 2.0, 0.5, 3.5, 0.25],
        keys=[DropoutKey(0.3, 1, 2), None, None, DropoutKey(0.5, 3, 4), None],
        k=9,
        ns=[6, 6, 6],
        ratios_ZM=[[1.0, 1.0, 1.0], [1.5, 1.0, 0.25], [1.0, 2.0, 1.0], [1.0, 1.0, 1.0], [0.75, 1.0, 3.0]],
    )


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


class TestEveryOp:
    """Each op alone, with inputs from the dense formula."""

    @BACKENDS
    @MANY
    @given(case=cases())
    def test_grouped_shrink(self, ops: ModuleType, case: Case) -> None:
        found = ops.grouped_shrink(case.given(case.x_TK), case.operands, case.schedule)
        case.assert_narrow(found, case.expected().s_TMR)

    @BACKENDS
    @MANY
    @given(case=cases())
    def test_grouped_expand(self, ops: ModuleType, case: Case) -> None:
        expected = case.expected()
        ys = [case.given(y_TN) for y_TN in case.ys]
        ops.grouped_expand(case.narrow(expected.s_TMR), case.operands, ys, case.schedule)
        for found, y_TN in zip(ys, expected.ys, strict=True):
            assert_same(found, y_TN)

    @BACKENDS
    @MANY
    @given(case=cases(), is_asked=st.booleans())
    def test_grouped_backward_input(self, ops: ModuleType, case: Case, is_asked: bool) -> None:
        expected = case.expected()
        dx_TK = case.given(case.dx_TK) if is_asked else None
        dys = [case.given(dy_TN) for dy_TN in case.dys]
        found = ops.grouped_backward_input(dys, case.operands, dx_TK, case.schedule)
        case.assert_narrow(found, expected.ds_TMR)
        if dx_TK is not None:
            assert_same(dx_TK, expected.dx_TK)

    @BACKENDS
    @MANY
    @given(case=cases())
    def test_grouped_backward_weight(self, ops: ModuleType, case: Case) -> None:
        expected = case.expected()
        s_TQ, ds_TQ = case.narrow(expected.s_TMR), case.narrow(expected.ds_TMR)
        dys = [case.given(dy_TN) for dy_TN in case.dys]
        ops.grouped_backward_weight(case.given(case.x_TK), s_TQ, dys, ds_TQ, case.operands, case.schedule)
        assert_same(case.operands.grads_ZP, expected.grads_ZP)


@BACKENDS
def test_the_first_product_of_a_step_overwrites_and_later_ones_are_added(ops: ModuleType) -> None:
    case = mixed_case()
    expected, params_ZP, grads_ZP = case.expected(), case.operands.params_ZP, case.operands.grads_ZP
    steps = GradientSteps(len(case.group.ranks_ZM))
    operands = case.group.operands_with_adapters(params_ZP, grads_ZP)
    operands.gradients = GroupGradients(steps)

    def accumulate() -> None:
        s_TQ, ds_TQ = case.narrow(expected.s_TMR), case.narrow(expected.ds_TMR)
        ops.grouped_backward_weight(case.x_TK, s_TQ, case.dys, ds_TQ, operands, case.schedule)

    operands.adds_gradients([0, 2])  # gradients of this step; the others keep those of an earlier step
    before = gradients_of(operands)
    for slot, own in operands.slots.items():
        for gradient in (own.da_KQ, *own.dbs) if slot not in (0, 2) else ():
            gradient.fill_(NAN)
    accumulate()
    first = gradients_of(operands)
    added = case.group.operands_with_adapters(params_ZP, expected.grads_ZP)
    for slot, found, old, wanted in zip(sorted(operands.slots), first, before, gradients_of(added), strict=True):
        for one, was, sum_of_both in zip(found, old, wanted, strict=True):
            assert_same(one, sum_of_both if slot in (0, 2) else sum_of_both - was)
    accumulate()
    for slot, twice, once, old in zip(sorted(operands.slots), gradients_of(operands), first, before, strict=True):
        for two, one, was in zip(twice, once, old, strict=True):
            assert_same(two, 2 * one - was if slot in (0, 2) else 2 * one)
    steps.end([0, 1])
    assert operands.adds_gradients([0, 1, 2, 4]) == (False, False, True, True)
    assert operands.adds_gradients([0, 1, 2, 4]) == (True,) * 4


def gradients_of(operands: LoraOperands) -> list[tuple[Tensor, ...]]:
    return [(own.da_KQ.clone(), *map(Tensor.clone, own.dbs)) for _, own in sorted(operands.slots.items())]


class Found(NamedTuple):
    """Results of a forward and a backward pass in which each op gets the results of the one before."""

    s_TQ: Tensor
    ds_TQ: Tensor
    ys: list[Tensor]
    dx_TK: Tensor
    grads_ZP: Tensor

    @property
    def of_tokens(self) -> list[Tensor]:
        return [*self.ys, self.dx_TK]


def run(ops: ModuleType, case: Case, *, base: torch.dtype = torch.float64, bank: torch.dtype = torch.float64) -> Found:
    """Run all ops of a group on copies; ``base`` is the dtype of the tokens."""
    params_ZP, grads_ZP = (rows_ZP.to(bank, copy=True) for rows_ZP in (case.operands.params_ZP, case.operands.grads_ZP))
    operands = case.group.operands_with_adapters(params_ZP, grads_ZP)
    x_TK, dx_TK = (case.given(tensor.to(base)) for tensor in (case.x_TK, case.dx_TK))
    ys, dys = ([case.given(tensor.to(base)) for tensor in tensors] for tensors in (case.ys, case.dys))
    s_TQ = ops.grouped_shrink(x_TK, operands, case.schedule)
    ops.grouped_expand(s_TQ, operands, ys, case.schedule)
    ds_TQ = ops.grouped_backward_input(dys, operands, dx_TK, case.schedule)
    ops.grouped_backward_weight(x_TK, s_TQ, dys, ds_TQ, operands, case.schedule)
    assert torch.equal(params_ZP.nan_to_num(), case.operands.params_ZP.to(bank).nan_to_num()), "parameters were written"
    return Found(s_TQ, ds_TQ, ys, dx_TK, grads_ZP)


def distances(case: Case, found: Found) -> list[float]:
    """Return the distances of outputs, input gradient and adapter gradients from the dense formula, relative in
    norm."""
    expected = case.expected()
    pairs = zip((*found.of_tokens, found.grads_ZP), (*expected.ys, expected.dx_TK, expected.grads_ZP), strict=True)
    return [float((one.double() - other).norm() / other.norm()) for one, other in pairs]


@BACKENDS
def test_256_slots(ops: ModuleType) -> None:
    case = many_slots()
    assert max(distances(case, run(ops, case))) < TOLERANCE


@BACKENDS
def test_a_pass_without_tokens_changes_nothing(ops: ModuleType) -> None:
    case = make_case([[3], [3]], [0, 1], [0, 0], [1.0, 1.0], ns=[5])
    found = run(ops, case)
    assert found.s_TQ.shape == found.ds_TQ.shape == (0, 3)
    assert torch.equal(found.grads_ZP, case.operands.grads_ZP)


@BACKENDS
def test_memory_beside_the_tokens_is_not_written(ops: ModuleType) -> None:
    """A write there would replace a NaN, a read would spread it."""
    for tensor in run(ops, replace(mixed_case(), strides="sliced")).of_tokens:
        wider = tensor._base
        assert wider is not None
        assert int(wider.isnan().sum()) == wider.numel() - tensor.numel()


@BACKENDS
@pytest.mark.parametrize("slot", [2, 4, 1], ids=["widest", "with dropout", "on a part"])
def test_nan_in_one_slot_leaves_every_bit_of_the_others(ops: ModuleType, slot: int) -> None:
    case, poisoned = mixed_case(), mixed_case()
    _, start, end = next(segment for segment in case.schedule.segments if segment.slot == slot)
    poisoned.operands.params_ZP[slot] = NAN
    for tensor in (poisoned.x_TK, *poisoned.dys):
        tensor[start:end] = NAN
    clean, found = run(ops, case), run(ops, poisoned)
    assert found.grads_ZP[slot].isnan().any(), "nothing was poisoned"
    others = [other for other in case.schedule.slots if other != slot]
    assert torch.equal(found.grads_ZP[others], clean.grads_ZP[others])
    tokens = [*range(start), *range(end, case.schedule.num_tokens)]
    for one, other in zip(found.of_tokens, clean.of_tokens, strict=True):
        assert torch.equal(one[tokens], other[tokens])


@BACKENDS
@pytest.mark.parametrize(
    ("base", "bank", "limit"),
    [
        (torch.bfloat16, torch.float32, 1e-2),
        (torch.float16, torch.float32, 1e-3),
        (torch.float32, torch.float32, 1e-6),
        (torch.bfloat16, torch.bfloat16, 1.5e-2),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_every_dtype_of_base_and_bank(ops: ModuleType, base: torch.dtype, bank: torch.dtype, limit: float) -> None:
    case = mixed_case()
    found = run(ops, case, base=base, bank=bank)
    assert found.grads_ZP.dtype == bank
    assert found.s_TQ.dtype == found.ds_TQ.dtype
    assert found.s_TQ.dtype in (base, bank)
    assert {tensor.dtype for tensor in found.of_tokens} == {base}
    assert max(distances(case, found)) < limit


def rotated(members: list[Tensor], first: int) -> list[Tensor]:
    return members[first:] + members[:first]


class TestTheComparisonBites:
    """Every mistake changes a result by more than the widest tolerance above."""

    FAR = 2e-2

    @BACKENDS
    @pytest.mark.parametrize("mistake", ["swapped slots", "swapped members", "wrong scale", "another mask"])
    def test_a_mistake_is_far(self, ops: ModuleType, mistake: str) -> None:
        case = mixed_case()
        slots, scales, keys = case.schedule.slots, case.schedule.scales, case.schedule.dropout
        if mistake == "swapped slots":
            slots = slots[::-1]
        if mistake == "wrong scale":
            scales = [1.1 * scale for scale in scales]
        if mistake == "another mask":
            keys = [key and key._replace(step=key.step + 1) for key in keys]
        first = 1 if mistake == "swapped members" else 0
        schedule = TokenSchedule.build(slots, case.schedule.lengths, scales, keys)
        found = run(ops, replace(case, schedule=schedule, ys=rotated(case.ys, first), dys=rotated(case.dys, first)))
        found = found._replace(ys=rotated(found.ys, -first))
        assert min(distances(mixed_case(), found)) > self.FAR

    def test_zeros_and_untouched_gradients_are_far(self) -> None:
        case = mixed_case()
        zeros = Found(
            *[torch.empty(0)] * 2,
            ys=[torch.zeros_like(y_TN) for y_TN in case.ys],
            dx_TK=torch.zeros_like(case.dx_TK),
            grads_ZP=torch.zeros_like(case.operands.grads_ZP),
        )
        nothing = zeros._replace(grads_ZP=case.operands.grads_ZP)
        assert min(distances(case, nothing) + distances(case, zeros)) > self.FAR
