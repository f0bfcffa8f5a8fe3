"""Places of adapters in a row of the bank."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from alto.lora import AdapterBank, AdapterShape, BankLayout, TargetModule


def targets_of(sizes: list[tuple[int, int]]) -> tuple[TargetModule, ...]:
    return tuple(TargetModule(name=f"m{i}", in_features=k, out_features=n) for i, (k, n) in enumerate(sizes))


@given(
    sizes=st.lists(st.tuples(st.just(5), st.integers(1, 6)), min_size=1, max_size=5),
    targeted=st.lists(st.booleans(), min_size=5, max_size=5),
    rank=st.integers(1, 4),
    shared=st.booleans(),
)
def test_an_adapter_fills_its_row_from_the_start_without_gap_or_overlap(
    sizes: list[tuple[int, int]], targeted: list[bool], rank: int, shared: bool
) -> None:
    modules = targets_of(sizes)
    shape = AdapterShape(rank=rank, targets=tuple(m for m, wanted in zip(modules, targeted, strict=False) if wanted))
    layout = BankLayout(modules=modules, max_rank=4, shared_inputs=(("m0", "m2", "m4"),) if shared else ())
    bank = AdapterBank(layout, 2)
    bank.occupy(1, shape)
    places = bank.places(1)
    for index, (_, a, b) in enumerate(bank.matrices(bank.params_ZP, 1)):
        assert (a.shape, b.shape) == ((5, rank), (rank, shape.targets[index].out_features))
        a += 1.0
        b += 2.0
    # A gap would leave a zero, an overlap a three.
    assert (places.parts.a_end, places.end) == (5 * rank * len(shape.targets), shape.num_parameters)
    assert (bank.params_ZP[1, : places.parts.a_end] == 1.0).all()
    assert (bank.params_ZP[1, places.parts.a_end : places.end] == 2.0).all()
    assert not bank.params_ZP[1, places.end :].any()
    assert not bank.params_ZP[0].any()


@given(own=st.sets(st.integers(0, 4), min_size=1), others=st.sets(st.integers(0, 4)), max_rank=st.integers(3, 9))
@example(own={3, 4}, others={2}, max_rank=3)  # the group of 4 has a member before 3, which is another adapter's
def test_the_place_of_an_adapter_does_not_depend_on_other_adapters(
    own: set[int], others: set[int], max_rank: int
) -> None:
    modules = targets_of([(5, 3), (5, 2), (4, 6), (5, 1), (4, 4)])
    shape = AdapterShape(rank=3, targets=tuple(modules[i] for i in sorted(own)))
    shared = (("m0", "m1", "m3"), ("m2", "m4"))

    def numbered(present: set[int], rank: int) -> list[tuple[str, list[float], list[float]]]:
        layout = BankLayout(modules=tuple(modules[i] for i in sorted(present)), max_rank=rank, shared_inputs=shared)
        bank = AdapterBank(layout, 1)
        bank.occupy(0, shape)
        bank.params_ZP[0] = torch.arange(layout.row_size)
        return [(m.name, a.flatten().tolist(), b.flatten().tolist()) for m, a, b in bank.matrices(bank.params_ZP, 0)]

    assert numbered(own | others, max_rank) == numbered(own, 3)


def test_all_a_come_before_all_b_and_members_of_a_group_side_by_side() -> None:
    modules = targets_of([(3, 2), (3, 4), (5, 1)])
    layout = BankLayout(modules=modules, max_rank=4, shared_inputs=(("m0", "m1"),))
    assert layout.groups == (modules[:2], modules[2:])
    places = layout.places(AdapterShape(rank=2, targets=modules))
    assert [(place.ranks, place.a_start, place.b_starts) for place in places.groups] == [
        ((2, 2), 0, (22, 26)),
        ((2,), 12, (34,)),
    ]
    assert (places.parts.a_end, places.end) == (22, 36)


def test_rows_begin_where_vectors_may() -> None:
    assert BankLayout(modules=targets_of([(3, 2)]), max_rank=1).row_size == 16
    assert BankLayout(modules=targets_of([(8, 8)]), max_rank=3).row_size == 48


def test_matrices_come_in_the_order_of_the_model() -> None:
    modules = targets_of([(3, 2), (5, 4), (3, 1)])
    bank = AdapterBank(BankLayout(modules=modules, max_rank=1, shared_inputs=(("m0", "m2"),)), 1)
    bank.occupy(0, AdapterShape(rank=1, targets=modules))
    assert [module.name for module, _, _ in bank.matrices(bank.params_ZP, 0)] == ["m0", "m1", "m2"]
