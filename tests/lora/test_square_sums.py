"""Norms of gradients from the sums of squares that kernels write, against the gradients themselves, in passes of
several micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from kernel_backends import TRITON
from torch import Tensor

from alto.kernels import TokenSchedule, choose_backend, torch_backend
from alto.lora import AdapterBank, AdapterShape, BankLayout, TargetModule
from alto.lora.layout import ExtraTensor
from alto.lora.optimizer import BankOptimizer

REFERENCE = choose_backend("reference")
MODULES = tuple(
    TargetModule(name=name, in_features=width, out_features=height)
    for name, width, height in (("q", 70, 130), ("k", 70, 5), ("v", 70, 64), ("o", 130, 70), ("up", 64, 64))
)
BIAS = ExtraTensor(name="up.bias", shape=(64,))
SHAPES = (
    AdapterShape(rank=65, targets=MODULES),
    AdapterShape(rank=3, targets=MODULES[1:4]),
    AdapterShape(rank=16, targets=MODULES, own_ranks=(16, 1, 7, 16, 2)),
    AdapterShape(rank=8, targets=MODULES, extras=(BIAS,)),
)


class World:
    """A bank of four adapters, in float64 where a program takes 64 ranks."""

    def __init__(
        self,
        ops: ModuleType,
        shapes: Sequence[AdapterShape],
        dtype: torch.dtype = torch.float64,
        layout: BankLayout | None = None,
    ) -> None:
        layout = layout or BankLayout(modules=MODULES, max_rank=65, shared_inputs=(("q", "k", "v"),), extras=(BIAS,))
        self.base = torch.float64 if dtype == torch.float64 else torch.float32
        self.bank = AdapterBank(
            layout,
            len(SHAPES),
            dtype=dtype,
            initial=dict.fromkeys([extra.name for extra in layout.extras], torch.zeros(64)),
        )
        self.bank.ops = ops
        self.bank.keep_square_sums(ops.gradient_tiles(self.base, dtype))
        assert self.bank.square_sums is not None
        # Unwritten sums must not be read.
        self.bank.square_sums.sums_ZC.fill_(float("nan"))
        self.groups = [self.bank.operands(index, index) for index in range(len(layout.groups))]
        for slot, shape in enumerate(shapes):
            self.bank.occupy(slot, shape)
            self.bank.initialise(slot, slot)
            for _, _, b_RN in self.bank.matrices(self.bank.params_ZP, slot):
                b_RN.normal_(generator=torch.Generator().manual_seed(slot))
            self.bank.grads_ZP[slot, : self.bank.places(slot).end] = float("nan") if not shape.extras else 0.0

    def train(self, tokens: dict[int, int], groups: Sequence[int] = (0, 1, 2), seed: int = 0) -> None:
        """Run a backward pass of random tokens, which for each slot do not depend on the other slots."""
        schedule = TokenSchedule.build([*tokens], [*tokens.values()], [1.0 + slot for slot in tokens])
        for index in groups:
            operands = self.groups[index]

            def draw(width: int) -> Tensor:
                drawn = [
                    torch.randn(
                        count, width, generator=torch.Generator().manual_seed(10_000 * seed + 1000 * slot + width)
                    ).double()
                    for slot, count in tokens.items()
                ]
                return torch.cat(drawn).to(self.base)

            x_TK, dys = draw(operands.in_features), [draw(width) for width in operands.out_features]
            s_TQ = self.bank.ops.grouped_shrink(x_TK, operands, schedule)
            ds_TQ = self.bank.ops.grouped_backward_input(dys, operands, None, schedule)
            self.bank.ops.grouped_backward_weight(x_TK, s_TQ, dys, ds_TQ, operands, schedule)

    def norms(self, slots: Sequence[int]) -> Tensor:
        return BankOptimizer(self.bank, ()).gradient_norms(slots)

    def expected(self, slots: Sequence[int]) -> Tensor:
        return REFERENCE.row_norms(self.bank.grads_ZP, slots, [self.bank.places(slot).end for slot in slots])


def summed(world: World) -> list[int]:
    assert world.bank.square_sums is not None
    return [slot for slot in range(len(SHAPES)) if slot in world.bank.square_sums.complete]


@TRITON
def test_norms_after_micro_batches_are_those_of_the_last_gradients(ops: ModuleType) -> None:
    world = World(ops, SHAPES)
    for step in range(2):
        world.train({0: 70, 2: 5, 1: 1}, seed=step)
        world.train({3: 2, 2: 66}, seed=step + 2)
        world.bank.complete_gradients([0, 1, 2, 3])
        assert summed(world) == [0, 1, 2], "no kernel writes sums for a bias"
        slots = [2, 3, 0, 1]
        torch.testing.assert_close(world.norms(slots), world.expected(slots), rtol=1e-12, atol=0.0)
        torch.testing.assert_close(world.norms([1, 0]), world.expected([1, 0]), rtol=1e-12, atol=0.0)
        world.bank.end_gradients([0, 1, 2])
        world.bank.grads_ZP[3].zero_()
        world.bank.end_gradients([3])
        assert summed(world) == []


@TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_other_jobs(ops: ModuleType, dtype: torch.dtype) -> None:
    together, alone = World(ops, SHAPES, dtype), World(ops, SHAPES[:3], dtype)
    for world, tokens in ((together, {3: 4, 0: 70, 1: 9, 2: 5}), (alone, {2: 5})):
        world.train(tokens)
        world.bank.complete_gradients([*tokens])
    torch.testing.assert_close(together.norms([0, 1, 2]), together.expected([0, 1, 2]), rtol=1e-5, atol=0.0)
    assert torch.equal(together.norms([1, 3, 2])[2:], alone.norms([2]))


@TRITON
def test_the_order_of_sums_does_not_depend_on_what_other_jobs_may_target(ops: ModuleType) -> None:
    _, own, *_ = SHAPES
    layout = BankLayout(modules=own.targets, max_rank=3, shared_inputs=(("k", "v"),))
    among_others = World(ops, SHAPES, torch.float32)
    by_itself = World(ops, [AdapterShape(rank=1, targets=own.targets), own], torch.float32, layout)
    found = []
    for world in (among_others, by_itself):
        world.train({1: 70}, range(2))
        sums = world.bank.square_sums
        assert sums is not None
        assert sums.num_sums(world.bank.places(1).groups) == sum([2, 1, 1, 3, 2])  # of A, k and v, and of A and o
        found.append(sums.sums_ZC[1, :9])
    assert torch.equal(*found)


@TRITON
def test_a_module_that_no_pass_has_run_counts_as_zero(ops: ModuleType) -> None:
    world = World(ops, SHAPES)
    world.train({0: 3, 1: 5})
    world.train({2: 4}, groups=[0, 2])
    world.bank.complete_gradients([0, 1, 2])
    assert summed(world) == [0, 1]
    torch.testing.assert_close(world.norms([0, 1, 2]), world.expected([0, 1, 2]), rtol=1e-12, atol=0.0)


@TRITON
def test_gradients_that_others_have_changed_are_read(ops: ModuleType) -> None:
    world = World(ops, SHAPES)
    world.train({0: 3, 1: 5})
    world.bank.complete_gradients([0, 1])
    world.bank.grads_ZP[1] *= 3.0  # as a sum over ranks does
    world.bank.forget_square_sums([1])
    torch.testing.assert_close(world.norms([0, 1]), world.expected([0, 1]), rtol=1e-12, atol=0.0)


@TRITON
def test_a_restarted_step_forgets_its_first_passes(ops: ModuleType) -> None:
    world = World(ops, SHAPES)
    world.train({0: 3, 1: 5})
    world.bank.clear_gradients([0, 1])
    world.train({0: 3}, groups=[0])
    world.bank.complete_gradients([0, 1])
    assert summed(world) == []
    torch.testing.assert_close(world.norms([0, 1]), world.expected([0, 1]), rtol=1e-12, atol=0.0)
    assert float(world.norms([1])) == 0.0


def test_other_backends_keep_none() -> None:
    bank = AdapterBank(BankLayout(modules=MODULES, max_rank=4), 1)
    for ops in (REFERENCE, torch_backend):
        bank.keep_square_sums(ops.gradient_tiles(torch.bfloat16, torch.float32))
        assert bank.square_sums is None
    sums_ZC = torch.arange(12.0).view(3, 4)
    assert REFERENCE.summed_norms(sums_ZC, [2, 0], [2, 3]).tolist() == pytest.approx([17**0.5, 3**0.5])


@TRITON
def test_more_sums_than_are_added_at_once(ops: ModuleType) -> None:
    sums_ZC = torch.rand(3, 10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = ops.summed_norms(sums_ZC, [2, 0], [9_999, 4_097])
    torch.testing.assert_close(found, REFERENCE.summed_norms(sums_ZC, [2, 0], [9_999, 4_097]), rtol=1e-13, atol=0.0)
