"""What the contract tests in ``test_ops.py`` leave open for kernels that work in tiles: segments of many blocks, ranks
of many tiles, many slots, every dtype a base or bank comes in, memory nobody wrote, and bits that must not change.

Truth is the reference in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_backends import TRITON
from torch import Tensor

from alto.kernels import TokenSchedule, choose_backend

REFERENCE = choose_backend("reference")
DTYPES = pytest.mark.parametrize(
    ("wide", "bank", "limit"),
    [
        (torch.bfloat16, torch.float32, 8e-3),
        (torch.float16, torch.float32, 1e-3),
        (torch.bfloat16, torch.bfloat16, 1.2e-2),
        (torch.float16, torch.float16, 2e-3),
        (torch.float32, torch.float32, 1e-6),
        (torch.float32, torch.bfloat16, 6e-3),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)


class Results(NamedTuple):
    """What the ops of one module leave behind; of the narrow tensors only the columns that they define."""

    s_TR: Tensor
    y_TN: Tensor
    ds_TR: Tensor
    dx_TK: Tensor
    da_ZKR: Tensor
    db_ZRN: Tensor


class Module:
    """Operands of one module, drawn in float64 from few bits, so that every dtype holds them exactly."""

    def __init__(
        self, counts: Sequence[int], ranks: Sequence[int], *, k: int, n: int, max_rank: int, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randint(-8, 9, shape, generator=generator).double() / 8

        num_slots, num_tokens = len(ranks), sum(counts)
        slots = torch.randperm(num_slots, generator=generator).tolist()
        scales = [0.25 * (1 + slot % 5) for slot in slots]
        self.ranks, self.max_rank = ranks, max_rank
        self.schedule = TokenSchedule.build(slots, counts, scales)
        self.x_TK, self.dy_TN = draw(num_tokens, k), draw(num_tokens, n)
        self.y_TN, self.dx_TK = draw(num_tokens, n), draw(num_tokens, k)
        own = torch.arange(max_rank)[None, :] < torch.tensor(ranks)[:, None]
        self.a_ZKR, self.b_ZRN = draw(num_slots, k, max_rank), draw(num_slots, max_rank, n)
        self.da_ZKR, self.db_ZRN = draw(num_slots, k, max_rank), draw(num_slots, max_rank, n)
        for matrices in (self.a_ZKR, self.da_ZKR):
            matrices *= own[:, None, :]
        for matrices in (self.b_ZRN, self.db_ZRN):
            matrices *= own[:, :, None]
        token_slots = [slot for slot, start, end in self.schedule.segments for _ in range(start, end)]
        self.own_TR = own[token_slots]

    def run(self, ops: ModuleType, wide: torch.dtype = torch.float64, bank: torch.dtype = torch.float64) -> Results:
        """Forward and backward; ``wide`` and ``bank`` are the dtypes of the base's and of the bank's tensors."""
        x_TK, dy_TN, y_TN, dx_TK = (t.to(wide, copy=True) for t in (self.x_TK, self.dy_TN, self.y_TN, self.dx_TK))
        a_ZKR, b_ZRN, da_ZKR, db_ZRN = (
            t.to(bank, copy=True) for t in (self.a_ZKR, self.b_ZRN, self.da_ZKR, self.db_ZRN)
        )
        s_TR = ops.grouped_shrink(x_TK, a_ZKR, self.schedule, self.ranks)
        ops.fused_expand_add(s_TR, b_ZRN, y_TN, self.schedule, self.ranks)
        ds_TR = ops.grouped_backward_input(dy_TN, a_ZKR, b_ZRN, dx_TK, self.schedule, self.ranks)
        ops.grouped_backward_weight(x_TK, s_TR, dy_TN, ds_TR, da_ZKR, db_ZRN, self.schedule, self.ranks)
        s_TR, ds_TR = (narrow.masked_fill(~self.own_TR, 0.0) for narrow in (s_TR, ds_TR))
        return Results(s_TR, y_TN, ds_TR, dx_TK, da_ZKR, db_ZRN)


def distances(found: Results, expected: Results) -> list[float]:
    """Relative distance of every result, NaN where a NaN got in."""
    return [
        float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-300))
        for one, other in zip(found, expected, strict=True)
    ]


def assert_close(found: Results, expected: Results, limit: float) -> None:
    far = {name: far for name, far in zip(Results._fields, distances(found, expected), strict=True) if not far <= limit}
    assert not far, f"further than {limit} from the reference: {far}"


@st.composite
def modules(draw: st.DrawFn) -> Module:
    num_slots = draw(st.integers(1, 4))
    counts = draw(st.lists(st.sampled_from([0, 1, 63, 64, 65, 130]), min_size=num_slots, max_size=num_slots))
    if not any(counts):
        counts[0] = 1
    ranks = draw(st.lists(st.sampled_from([0, 1, 3, 16, 33, 128]), min_size=num_slots, max_size=num_slots))
    width = st.sampled_from([1, 7, 64, 70])
    return Module(counts, ranks, k=draw(width), n=draw(width), max_rank=128, seed=draw(st.integers(0, 99)))


@TRITON
@settings(max_examples=10, deadline=None)
@given(module=modules())
def test_any_lengths_and_mixed_ranks(ops: ModuleType, module: Module) -> None:
    assert_close(module.run(ops), module.run(REFERENCE), 1e-13)


@TRITON
@pytest.mark.parametrize("max_rank", [1, 8, 24, 64, 200, 256])
def test_every_largest_rank_of_a_bank(ops: ModuleType, max_rank: int) -> None:
    ranks = [max_rank, max_rank // 2, 1, max_rank - 1]
    module = Module([70, 5, 2, 1], ranks, k=40, n=70, max_rank=max_rank)
    assert_close(module.run(ops), module.run(REFERENCE), 1e-13)


@TRITON
def test_256_slots(ops: ModuleType) -> None:
    counts = [slot % 3 if slot % 8 == 0 or slot > 250 else 0 for slot in range(256)]
    module = Module(counts, [(0, 1, 3, 16)[slot % 4] for slot in range(256)], k=9, n=5, max_rank=16)
    assert len(module.schedule.slots) > 20
    assert max(module.schedule.slots) > 240
    assert_close(module.run(ops), module.run(REFERENCE), 1e-13)


@TRITON
def test_memory_nobody_wrote_is_neither_read_nor_written(ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, allocated = Tensor.new_empty, []

    def new_empty(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        tensor = plain(self, *args, **kwargs)
        if tensor.is_floating_point() and tensor.numel():
            allocated.append(tensor.fill_(float("nan")))
        return tensor

    module = Module([70, 0, 5, 3], [3, 16, 0, 33], k=20, n=24, max_rank=64)
    expected = module.run(REFERENCE)
    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    assert_close(module.run(ops), expected, 1e-13)
    assert len(allocated) == 2, "s and ds are allocated in another way now; poison that"
    assert all(narrow.cpu()[~module.own_TR].isnan().all() for narrow in allocated), "columns past a rank were written"


@TRITON
def test_tensors_of_any_stride(ops: ModuleType) -> None:
    module = Module([66, 3], [3, 16], k=10, n=12, max_rank=16)
    expected = module.run(REFERENCE)
    for name in ("x_TK", "dy_TN", "y_TN", "dx_TK"):
        tensor = getattr(module, name)
        wider = torch.full((tensor.shape[0], tensor.shape[1] + 3), float("nan"), dtype=tensor.dtype)
        wider[:, 1:-2] = tensor
        setattr(module, name, wider[:, 1:-2] if name in ("x_TK", "y_TN") else tensor.T.contiguous().T)
    strides = [getattr(module, name).to(torch.float64, copy=True).stride() for name in ("dy_TN", "dx_TK")]
    assert all(stride[0] == 1 for stride in strides), "the copies that the ops see should be transposed too"
    assert_close(module.run(ops), expected, 1e-13)


@TRITON
def test_same_bits_every_time_and_in_any_company(ops: ModuleType) -> None:
    """Float32, so that another order of summation would show."""
    together = Module([70, 5, 66, 3], [16, 3, 33, 128], k=70, n=80, max_rank=128)
    first, again = (together.run(ops, torch.float32, torch.float32) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    for (slot, start, end), scale in zip(together.schedule.segments, together.schedule.scales, strict=True):
        alone = Module([0], [0], k=1, n=1, max_rank=1)
        vars(alone).update(vars(together))
        alone.schedule = TokenSchedule.build([slot], [end - start], [scale])
        for name in ("x_TK", "dy_TN", "y_TN", "dx_TK", "own_TR"):
            setattr(alone, name, getattr(together, name)[start:end])
        found = alone.run(ops, torch.float32, torch.float32)
        for name in ("s_TR", "y_TN", "ds_TR", "dx_TK"):
            assert torch.equal(getattr(found, name), getattr(first, name)[start:end])
        for name in ("da_ZKR", "db_ZRN"):
            assert torch.equal(getattr(found, name)[slot], getattr(first, name)[slot])


@TRITON
@DTYPES
def test_every_dtype_of_base_and_bank(ops: ModuleType, wide: torch.dtype, bank: torch.dtype, limit: float) -> None:
    if wide == bank == torch.bfloat16 and not torch.cuda.is_available():
        pytest.skip("Triton's interpreter multiplies bfloat16 by its bits")
    module = Module([66, 0, 1, 30, 7], [3, 16, 0, 64, 128], k=48, n=80, max_rank=128)
    expected, found = module.run(REFERENCE), module.run(ops, wide, bank)
    assert {found.s_TR.dtype, found.ds_TR.dtype, found.da_ZKR.dtype, found.db_ZRN.dtype} == {bank}
    assert {found.y_TN.dtype, found.dx_TK.dtype} == {wide}
    assert_close(found, expected, limit)
    for mistake in mistakes(module, wide, bank):
        assert min(distances(mistake, expected)[1:]) > 2 * limit, "the limit is too wide to tell a mistake"


def mistakes(module: Module, wide: torch.dtype, bank: torch.dtype) -> list[Results]:
    """Zeros; the work of the two largest slots swapped; scales off by a tenth."""
    right, schedule = module.run(REFERENCE, wide, bank), module.schedule
    zeros = Results(*(torch.zeros_like(result) for result in right))
    swapped = [*schedule.slots[1:], schedule.slots[0]]
    module.schedule = TokenSchedule.build(swapped, schedule.lengths, schedule.scales)
    of_swapped = module.run(REFERENCE, wide, bank)
    module.schedule = TokenSchedule.build(schedule.slots, schedule.lengths, [1.1 * scale for scale in schedule.scales])
    of_wrong_scale = module.run(REFERENCE, wide, bank)
    module.schedule = schedule
    return [zeros, of_swapped, of_wrong_scale]
