"""Cases that ``test_ops.py`` leaves open for kernels that work in tiles: segments of many blocks, ranks of many tiles,
unwritten memory, masks bit by bit, launches, and bits that must not change.

Truth is the reference in float64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest
import torch
from adapter_groups import Group
from budgets import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_backends import TRITON
from torch import Tensor

from alto.kernels import DropoutKey, LoraOperands, RowParts, RowStep, TokenSchedule, choose_backend
from alto.kernels.dropout import dropout_factor, kept_factor
from alto.kernels.triton_config import dy_config, shrink_config, square_sums_config, total_norms_config

REFERENCE = choose_backend("reference")
CPU = torch.device("cpu")
EXACT = 1e-13
MASKED = DropoutKey(probability=0.3, seed=2**35 + 7, step=9)


class Pass:
    """A group and the tokens of a pass, drawn in float64 with few bits, so that every dtype represents them exactly."""

    def __init__(
        self,
        counts: Sequence[int],
        ranks_ZM: Sequence[Sequence[int]],
        *,
        k: int,
        ns: Sequence[int],
        keys: Sequence[DropoutKey | None] | None = None,
        seed: int = 0,
        ratios_ZM: Sequence[Sequence[float]] | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.group = Group(ranks_ZM, in_features=k, out_features=ns, seed=seed, ratios_ZM=ratios_ZM)
        slots = torch.randperm(len(ranks_ZM), generator=generator).tolist()
        self.schedule = TokenSchedule.build(slots, counts, [0.25 * (1 + slot % 5) for slot in slots], keys)

        def draw(width: int) -> Tensor:
            return torch.randint(-8, 9, (self.schedule.num_tokens, width), generator=generator).double() / 8

        self.x_TK, self.dys = draw(k), [draw(n) for n in ns]
        # An op does not read what it writes.
        self.dx_TK, *self.ys = (torch.full_like(draw(width), float("nan")) for width in (k, *ns))

    def run(
        self,
        ops: ModuleType,
        base: torch.dtype = torch.float64,
        bank: torch.dtype = torch.float64,
        *,
        in_one: bool = False,
    ) -> dict[str, Tensor]:
        """Return the ops' results, of narrow tensors only the defined parts; ``base`` is the dtype of tokens. With
        ``in_one`` the backward pass is one op, which does not return ``ds``."""
        rows = (self.group.operands.params_ZP, self.group.operands.grads_ZP)
        operands = self.group.operands_with_adapters(*(rows_ZP.to(bank, copy=True) for rows_ZP in rows))
        x_TK, dx_TK = self.x_TK.to(base, copy=True), self.dx_TK.to(base, copy=True)
        ys, dys = ([tensor.to(base, copy=True) for tensor in tensors] for tensors in (self.ys, self.dys))
        s_TQ = ops.grouped_shrink(x_TK, operands, self.schedule)
        ops.grouped_expand(s_TQ, operands, ys, self.schedule)
        if in_one:
            ops.grouped_backward(x_TK, s_TQ, dys, operands, dx_TK, self.schedule)
            ds_TQ = torch.zeros_like(s_TQ)
        else:
            ds_TQ = ops.grouped_backward_input(dys, operands, dx_TK, self.schedule)
            ops.grouped_backward_weight(x_TK, s_TQ, dys, ds_TQ, operands, self.schedule)
        own_TQ = self.own_columns()
        found = {"s": s_TQ.masked_fill(~own_TQ, 0.0), "ds": ds_TQ.masked_fill(~own_TQ, 0.0), "dx": dx_TK}
        return found | {f"y of {member}": y_TN for member, y_TN in enumerate(ys)} | {"gradients": operands.grads_ZP}

    def own_columns(self) -> Tensor:
        """Return the columns that each token's slot has, ``[T, Q]``."""
        slots_T = torch.tensor(
            [slot for slot, start, end in self.schedule.segments for _ in range(start, end)], dtype=torch.long
        )
        members = len(self.ys)
        ones_TMR = torch.ones(len(slots_T), members, self.group.operands.max_rank)
        return self.group.packed(ones_TMR, slots_T, 0.0) == 1.0

    def alone(self, index: int) -> Pass:
        """Return a pass with the same slots and the tokens of one segment."""
        slot, start, end = self.schedule.segments[index]
        one = object.__new__(Pass)
        one.group = self.group
        one.schedule = TokenSchedule.build(
            [slot], [end - start], [self.schedule.scales[index]], [self.schedule.dropout[index]]
        )
        one.x_TK, one.dx_TK = self.x_TK[start:end], self.dx_TK[start:end]
        one.ys, one.dys = ([tensor[start:end] for tensor in tensors] for tensors in (self.ys, self.dys))
        return one


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float = EXACT) -> None:
    distances = {
        name: float((found[name].double() - right).norm() / right.norm().clamp_min(1e-300))
        for name, right in expected.items()
    }
    far = {name: distance for name, distance in distances.items() if not distance <= limit}
    assert not far, f"further than {limit} from the reference: {far}"


@st.composite
def micro_batches(draw: st.DrawFn) -> Pass:
    num_slots, num_members = draw(st.integers(1, 3)), draw(st.integers(1, 4))

    def each(of: Sequence[object], number: int) -> list[Any]:
        return draw(st.lists(st.sampled_from(of), min_size=number, max_size=number))

    counts = each([0, 1, 64, 65, 130], num_slots)
    if not any(counts):
        counts[0] = 1
    ranks_ZM = [
        [draw(st.sampled_from([rank, rank, rank, 0, 5])) for _ in range(num_members)]
        for rank in each([1, 3, 16, 33, 128], num_slots)
    ]
    ratios_ZM = [each([1.0, 1.0, 1.75, 0.5], num_members) for _ in range(num_slots)]
    widths = [1, 32, 70]
    return Pass(
        counts,
        ranks_ZM,
        k=draw(st.sampled_from(widths)),
        ns=each(widths, num_members),
        keys=each([None, MASKED], num_slots),
        seed=draw(st.integers(0, 99)),
        ratios_ZM=ratios_ZM,
    )


@TRITON
@settings(max_examples=examples(8))
@given(drawn=micro_batches())
def test_any_lengths_ranks_and_members(ops: ModuleType, drawn: Pass) -> None:
    assert_close(drawn.run(ops), drawn.run(REFERENCE))


@TRITON
@pytest.mark.parametrize("max_rank", [1, 64, 200, 256])
@pytest.mark.parametrize("num_members", [1, 3])
def test_every_largest_rank_of_a_bank(ops: ModuleType, max_rank: int, num_members: int) -> None:
    """Up to 768 columns side by side, more than one program takes. A 16-bit base takes the most."""
    ranks = [max_rank, max_rank // 2, 1]
    drawn = Pass([66, 5, 1], [[rank] * num_members for rank in ranks], k=70, ns=[40, 9, 20][:num_members])
    assert_close(drawn.run(ops, torch.float16, torch.float16), drawn.run(REFERENCE), 2e-3)


@TRITON
def test_a_member_with_more_ranks_than_a_program_takes(ops: ModuleType) -> None:
    drawn = Pass([66, 3], [[130, 130], [65, 65]], k=9, ns=[33, 7])
    config = import_module("alto.kernels.triton_config").shrink_config(130, torch.float64, torch.float64)
    assert config.constants["TILE"] < 65
    assert_close(drawn.run(ops), drawn.run(REFERENCE))


@TRITON
def test_aligned_adapters(ops: ModuleType) -> None:
    """Nearly all adapters do; most groups in these tests have odd places, so that kernels must not rely on
    alignment."""
    ns, ranks_ZM = (48, 16), [[8, 8], [16, 0], [24, 24]]
    size = 24 * (64 * 2 + sum(ns))
    generator = torch.Generator().manual_seed(0)
    params_ZP, before_ZP = (torch.randn(3, size, generator=generator, dtype=torch.float64) for _ in range(2))
    schedule = TokenSchedule.build([2, 0, 1], [70, 3, 9], [1.0, 2.0, 3.0])
    x_TK, *dys = (torch.randn(82, width, generator=generator, dtype=torch.float64) for width in (64, *ns))

    def run(backend: ModuleType) -> dict[str, Tensor]:
        operands = LoraOperands(
            number=0, in_features=64, out_features=ns, params_ZP=params_ZP, grads_ZP=before_ZP.clone(), max_rank=24
        )
        for slot, ranks in enumerate(ranks_ZM):
            sizes = [64 * sum(ranks), *(rank * n for rank, n in zip(ranks, ns, strict=True))]
            a_start, *b_starts, _ = accumulate(sizes, initial=0)
            operands.assign(slot, ranks, a_start, b_starts)
        assert operands.alignment == 8
        dx_TK, ys = torch.full_like(x_TK, float("nan")), [torch.empty_like(dy_TN) for dy_TN in dys]
        s_TQ = backend.grouped_shrink(x_TK, operands, schedule)
        backend.grouped_expand(s_TQ, operands, ys, schedule)
        ds_TQ = backend.grouped_backward_input(dys, operands, dx_TK, schedule)
        backend.grouped_backward_weight(x_TK, s_TQ, dys, ds_TQ, operands, schedule)
        return {"dx": dx_TK, "y": torch.cat(ys, 1), "gradients": operands.grads_ZP}

    assert_close(run(ops), run(REFERENCE))


def test_alignment_is_that_of_the_least_aligned_of_all_that_were_admitted() -> None:
    rows_ZP = torch.zeros(3, 1024)
    operands = LoraOperands(
        number=0, in_features=8, out_features=[16], params_ZP=rows_ZP, grads_ZP=rows_ZP, max_rank=16
    )
    assert operands.alignment == 8, "no slot is occupied"
    operands.assign(0, [16], 0, [128])
    assert operands.alignment == 8
    operands.assign(1, [4], 0, [32])
    assert operands.alignment == 4
    operands.assign(2, [8], 0, [66])
    assert operands.alignment == 2
    operands.clear(2)
    operands.clear(1)
    assert operands.alignment == 2, "kernels stay compiled"
    operands.assign(1, [16], 8, [137])
    assert operands.alignment == 1


@TRITON
def test_unwritten_memory_is_neither_read_nor_written(ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, allocated = Tensor.new_empty, []

    def new_empty(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        tensor = plain(self, *args, **kwargs)
        if tensor.is_floating_point() and tensor.numel():
            allocated.append(tensor.fill_(float("nan")))
        return tensor

    drawn = Pass([70, 0, 5, 3], [[3, 0], [16, 16], [0, 0], [0, 33]], k=20, ns=[24, 7], keys=[MASKED, None, None, None])
    expected = drawn.run(REFERENCE)
    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    assert_close(drawn.run(ops), expected)
    assert len(allocated) == 2, "s and ds are allocated in another way now; poison that"
    own_TQ = drawn.own_columns()
    for narrow in allocated:
        assert narrow[:, : own_TQ.shape[1]].cpu()[~own_TQ].isnan().all(), "columns past a slot's own were written"
        assert narrow[:, own_TQ.shape[1] :].isnan().all(), "the padding of rows was written"


@TRITON
def test_the_backward_pass_in_one_op_has_the_bits_of_two(ops: ModuleType) -> None:
    drawn = Pass([70, 0, 5, 130], [[3, 0, 9], [16, 16, 0], [0, 0, 0], [0, 70, 2]], k=20, ns=[24, 7, 70])
    two, one = drawn.run(ops, torch.float32, torch.float32), drawn.run(ops, torch.float32, torch.float32, in_one=True)
    assert_close(two, drawn.run(REFERENCE), 1e-6)
    del two["ds"], one["ds"]
    assert all(torch.equal(tensor, one[name]) for name, tensor in two.items())


@TRITON
def test_same_bits_every_time_and_beside_any_jobs(ops: ModuleType) -> None:
    """Float32, so that another order of summation would show."""
    ranks_ZM = [[16, 16, 16], [3, 0, 3], [33, 33, 0], [50, 50, 50]]
    together = Pass([70, 5, 2, 3], ranks_ZM, k=40, ns=[70, 9, 9], keys=[MASKED, None, None, MASKED])
    first, again = (together.run(ops, torch.float32, torch.float32) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    for index, (slot, start, end) in enumerate(together.schedule.segments):
        alone = together.alone(index).run(ops, torch.float32, torch.float32)
        assert torch.equal(alone.pop("gradients")[slot], first["gradients"][slot])
        assert all(torch.equal(tensor, first[name][start:end]) for name, tensor in alone.items())


class TestParts:
    """Long sums are cut into parts, each with its own program."""

    RANKS_ZM = ((16, 16, 16), (3, 0, 3), (33, 33, 0), (0, 50, 50))

    @pytest.fixture(autouse=True)
    def short_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("alto.kernels.triton_config.SPLIT", 64)
        monkeypatch.setattr("alto.kernels.triton_backend.SPLIT", 64)
        for config in (shrink_config, dy_config):  # each caches its results
            monkeypatch.setattr(f"alto.kernels.triton_backend.{config.__name__}", config.__wrapped__)

    def drawn(self) -> Pass:
        """Return a pass in which one member has three parts, one exactly the columns of one part, one fewer."""
        return Pass([70, 5, 0, 66], self.RANKS_ZM, k=200, ns=[130, 64, 9], keys=[MASKED, None, None, MASKED])

    @TRITON
    def test_they_add_up(self, ops: ModuleType) -> None:
        drawn = self.drawn()
        for in_one in (False, True):  # counters are zero again for the next launch
            assert_close(drawn.run(ops, in_one=in_one), drawn.run(REFERENCE, in_one=in_one))
        for zeros in import_module("alto.kernels.triton_backend")._zeros.values():
            assert not zeros.any()

    @TRITON
    def test_tokens_of_more_than_one_chunk(self, ops: ModuleType) -> None:
        drawn = Pass([300, 2], [[3, 65], [1, 0]], k=9, ns=[70, 7], keys=[MASKED, None])
        assert_close(drawn.run(ops, in_one=True), drawn.run(REFERENCE, in_one=True))

    @TRITON
    def test_many_tiles_of_ranks(self, ops: ModuleType) -> None:
        drawn = Pass([66, 3], [[130, 130], [65, 65]], k=130, ns=[70, 7])
        assert_close(drawn.run(ops), drawn.run(REFERENCE))

    @TRITON
    def test_bits_do_not_depend_on_other_jobs(self, ops: ModuleType) -> None:
        together = self.drawn()
        first = together.run(ops, torch.float32, torch.float32)
        for index, (slot, start, end) in enumerate(together.schedule.segments):
            alone = together.alone(index).run(ops, torch.float32, torch.float32)
            assert torch.equal(alone.pop("gradients")[slot], first["gradients"][slot])
            assert all(torch.equal(tensor, first[name][start:end]) for name, tensor in alone.items())

    @TRITON
    def test_unwritten_planes_are_not_read(self, ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = Tensor.new_empty

        def new_empty(self: Tensor, *args: object, **kwargs: object) -> Tensor:
            tensor = plain(self, *args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        drawn = self.drawn()
        expected = drawn.run(REFERENCE)
        monkeypatch.setattr(Tensor, "new_empty", new_empty)
        assert_close(drawn.run(ops), expected)


class TestDropout:
    """The masks of ``dropout_factor``, bit by bit, in every kernel that applies one."""

    K, COUNTS = 70, [3, 130]

    def make(self, rank: int) -> tuple[Group, TokenSchedule, Tensor]:
        """Return a group of one member with one slot after a neighbour, so that its tokens do not begin at zero."""
        group = Group([[rank], [rank]], in_features=self.K, out_features=[1], number=12)
        for matrices in (*group.operands.slots.values(),):
            matrices.a_KQ.zero_()
            matrices.da_KQ.zero_()
        keys = [MASKED._replace(probability=0.5), MASKED]
        schedule = TokenSchedule.build([1, 0], self.COUNTS, [1.0, 2.0], keys)
        expected = [
            dropout_factor(key, 12, count, self.K, CPU).double() for key, count in zip(keys, self.COUNTS, strict=True)
        ]
        return group, schedule, torch.cat(expected)

    @TRITON
    def test_masks_of_shrink(self, ops: ModuleType) -> None:
        group, schedule, expected_TK = self.make(self.K)
        for matrices in group.operands.slots.values():
            matrices.a_KQ.copy_(torch.eye(self.K))
        assert torch.equal(ops.grouped_shrink(torch.ones_like(expected_TK), group.operands, schedule), expected_TK)

    @TRITON
    def test_masks_of_dx(self, ops: ModuleType) -> None:
        group, schedule, expected_TK = self.make(1)
        for matrices in group.operands.slots.values():
            matrices.a_KQ.fill_(1.0)
            matrices.bs[0].fill_(1.0)
        dx_TK = torch.zeros_like(expected_TK)
        ops.grouped_backward_input([torch.ones_like(dx_TK[:, :1])], group.operands, dx_TK, schedule)
        expected_TK[3:] *= 2.0
        assert torch.equal(dx_TK, expected_TK)

    @TRITON
    def test_masks_of_da(self, ops: ModuleType) -> None:
        group, schedule, expected_TK = self.make(130)
        # Every token has its own column.
        ds_TQ = torch.cat([torch.eye(3, 130), torch.eye(130)]).double()
        tokens = (torch.ones_like(expected_TK), ds_TQ, [torch.ones_like(expected_TK[:, :1])], ds_TQ)
        ops.grouped_backward_weight(*tokens, group.operands, schedule)
        assert torch.equal(group.operands.slots[1].da_KQ[:, :3].T, expected_TK[:3])
        assert torch.equal(group.operands.slots[0].da_KQ.T, 2.0 * expected_TK[3:])

    def test_both_sorts_of_element_are_there(self) -> None:
        _, _, expected_TK = self.make(1)
        assert expected_TK[3:].unique().tolist() == [0.0, kept_factor(MASKED)]


@TRITON
@pytest.mark.parametrize(
    ("num_members", "launches"), [(1, 1), (3, 1), (4, 2)], ids=["one member", "three members", "four members"]
)
def test_launches(ops: ModuleType, monkeypatch: pytest.MonkeyPatch, num_members: int, launches: int) -> None:
    """Launches per group, independent of the number of slots: one for the input, one for each three members."""
    backend, counts = choose_backend("triton"), Counter()
    for op in ("shrink", "expand", "dy", "dx", "da"):
        monkeypatch.setattr(backend, f"{op}_kernel", Counted(getattr(backend, f"{op}_kernel"), op, counts))
    drawn = Pass([70, 5, 3], [[3] * num_members] * 3, k=9, ns=[5] * num_members)
    drawn.run(ops, in_one=True)
    of_members = dict.fromkeys(["expand", "dy"], launches)
    assert counts == dict.fromkeys(["shrink", "dx", "da"], 1) | of_members
    counts.clear()
    drawn.run(ops)
    assert counts["dy"] == 2 * launches, "input and weight separately"


class Counted:
    def __init__(self, kernel: Any, name: str, counts: Counter[str]) -> None:
        self._kernel, self._name, self._counts = kernel, name, counts
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._counts[self._name] += 1
        return self._kernel[grid]


@TRITON
@pytest.mark.parametrize(
    ("base", "bank", "limit"),
    [
        (torch.bfloat16, torch.float32, 1.2e-2),
        (torch.float16, torch.float32, 1e-3),
        (torch.bfloat16, torch.bfloat16, 1.5e-2),
        (torch.float16, torch.float16, 2e-3),
        (torch.float32, torch.float32, 1e-6),
        (torch.float32, torch.bfloat16, 6e-3),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_every_dtype_of_base_and_bank(ops: ModuleType, base: torch.dtype, bank: torch.dtype, limit: float) -> None:
    ranks_ZM = [[3, 3], [16, 0], [0, 0], [64, 64], [128, 128]]
    drawn = Pass([66, 0, 1, 30, 7], ranks_ZM, k=48, ns=[80, 24], keys=[None, None, None, MASKED, None])
    found = drawn.run(ops, base, bank)
    narrow = base if base == torch.bfloat16 else bank  # in which its numbers are multiplied next
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        **dict.fromkeys(("s", "ds"), narrow),
        "gradients": bank,
        **dict.fromkeys(("dx", "y of 0", "y of 1"), base),
    }
    assert_close(found, drawn.run(REFERENCE), limit)


class TestRows:
    """The optimizer's kernels on rows of many blocks."""

    PARTS = (
        RowParts(1500, 3001, 3001, 3001),
        RowParts(1024, 1300, 1700, 2048),
        RowParts(0, 20_000, 40_007, 40_007),
        RowParts(7, 7, 7, 7),
    )

    def banks(self, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.rand(5, 40_010, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]

    def step(self, ops: ModuleType, banks: list[Tensor], rows: Sequence[int]) -> None:
        steps = [
            RowStep(
                slot=row,
                parts=self.PARTS[row],
                step=2 + row,
                rates=(0.1 * (1 + row), 0.3),
                betas=(0.9, 0.99),
                epsilon=1e-8,
                weight_decay=0.1,
                clears=row != 2,
            )
            for row in rows
        ]
        ops.bank_adamw(*banks, None, steps, torch.tensor([0.5 + row for row in rows], dtype=torch.float64))

    @TRITON
    def test_adamw(self, ops: ModuleType) -> None:
        found, expected = self.banks(torch.float64), self.banks(torch.float64)
        self.step(ops, found, [2, 0, 3, 1])
        self.step(REFERENCE, expected, [2, 0, 3, 1])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)

    @TRITON
    def test_norms_of_rows_longer_than_a_program_sums(self, ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        """There are more partial sums than one program adds at once; with the usual blocks this needs 17 million
        numbers."""
        for name, value in (("_NORM_BLOCK", 16), ("_NORM_TURNS", 2), ("NORM_SPAN", 32)):
            monkeypatch.setattr(f"alto.kernels.triton_config.{name}", value)
        monkeypatch.setattr("alto.kernels.triton_backend.NORM_SPAN", 32)
        for config in (square_sums_config, total_norms_config):  # each caches its results
            monkeypatch.setattr(f"alto.kernels.triton_backend.{config.__name__}", config.__wrapped__)
        rows_ZP = self.banks(torch.float64)[0]
        found = ops.row_norms(rows_ZP, [4, 1], [33, 3001])
        torch.testing.assert_close(found, REFERENCE.row_norms(rows_ZP, [4, 1], [33, 3001]), rtol=EXACT, atol=0.0)

    @TRITON
    def test_bits_do_not_depend_on_other_jobs(self, ops: ModuleType) -> None:
        together, alone = self.banks(torch.float32), self.banks(torch.float32)
        norms = ops.row_norms(together[1], [2, 0, 1], [40_007, 3001, 2048])
        self.step(ops, together, [2, 0, 3, 1])
        for row, norm in ((2, norms[0]), (0, norms[1]), (1, norms[2])):
            assert torch.equal(ops.row_norms(alone[1], [row], [self.PARTS[row].end])[0], norm)
            self.step(ops, alone, [row])
            assert all(torch.equal(one[row], other[row]) for one, other in zip(together, alone, strict=True))
