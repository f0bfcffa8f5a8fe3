"""The bank: initial weights, row copies, padding that stays zero; and its exact size with its optimizers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optional import needs_bitsandbytes
from peft import LoraConfig, get_peft_model
from torch import Tensor

from alto.kernels import TokenSchedule, grouped_lora_linear, torch_backend
from alto.lora import (
    AdapterBank,
    AdapterShape,
    AdapterWeights,
    BankLayout,
    BankOptimizer,
    ExtraTensor,
    SlotUpdate,
    TargetModule,
    bank_bytes,
)
from alto.lora.linear import FrozenWeight
from alto.lora.row_optimizers import EightBitAdamW
from alto.spec import JobConfig
from alto.spec.lr_schedules import OptimizerName

MODULES = (
    TargetModule(name="layers.0.q_proj", in_features=6, out_features=8),
    TargetModule(name="layers.0.up_proj", in_features=6, out_features=5),
    TargetModule(name="layers.1.q_proj", in_features=6, out_features=8),
)


def make_bank(max_rank: int = 4, num_slots: int = 3, modules: tuple[TargetModule, ...] = MODULES) -> AdapterBank:
    return AdapterBank(BankLayout(modules=modules, max_rank=max_rank), num_slots)


def shape(rank: int = 3, *targets: int) -> AdapterShape:
    return AdapterShape(rank=rank, targets=tuple(MODULES[index] for index in targets) or MODULES)


def assert_equal(found: AdapterWeights, expected: AdapterWeights) -> None:
    assert list(found) == list(expected)
    for name, pair in expected.items():
        assert all(torch.equal(left, right) for left, right in zip(found[name], pair, strict=True))


def initialised(bank: AdapterBank, slot: int, seed: int, adapter: AdapterShape) -> AdapterWeights:
    bank.occupy(slot, adapter)
    bank.initialise(slot, seed)
    return bank.read(slot)


@pytest.mark.parametrize("bank", [make_bank(3, 1), make_bank(16, 5)], ids=["tight", "roomy"])
def test_initial_weights_depend_on_seed_and_shape_alone(bank: AdapterBank) -> None:
    reference = initialised(make_bank(), 2, 7, shape())
    torch.manual_seed(123)
    assert_equal(initialised(bank, bank.num_slots - 1, 7, shape()), reference)
    other = initialised(bank, 0, 8, shape())
    assert not torch.equal(other[MODULES[0].name][0], reference[MODULES[0].name][0])


def test_modules_of_other_jobs_do_not_change_initial_weights() -> None:
    adapter = shape(3, 0, 2)
    tight = make_bank(modules=(MODULES[0], MODULES[2]))
    assert_equal(initialised(make_bank(), 0, 7, adapter), initialised(tight, 0, 7, adapter))


@pytest.mark.parametrize(("init", "peft_init"), [("default", True), ("gaussian", "gaussian")])
@pytest.mark.parametrize("rank", [4, 16])
def test_initial_weights_are_pefts_in_distribution(init: str, peft_init: bool | str, rank: int) -> None:
    module = TargetModule(name="big", in_features=4000, out_features=20)
    bank = make_bank(16, 1, (module,))
    bank.occupy(0, AdapterShape(rank=rank, targets=(module,)))
    bank.initialise(0, 0, init)
    a, b = bank.read(0)["big"]
    base = torch.nn.Sequential(OrderedDict(big=torch.nn.Linear(4000, 20)))
    torch.manual_seed(0)
    peft = get_peft_model(base, LoraConfig(r=rank, target_modules=["big"], init_lora_weights=peft_init))
    layer = peft.get_submodule("base_model.model.big")
    expected = layer.lora_A["default"].weight.detach()
    assert a.shape == expected.T.shape
    assert float(a.std()) == pytest.approx(float(expected.std()), rel=0.03)
    assert float(a.mean()) == pytest.approx(0.0, abs=0.03 * float(expected.std()))
    # The largest value distinguishes a uniform distribution from a normal one.
    assert float(a.abs().max() / a.std()) == pytest.approx(float(expected.abs().max() / expected.std()), rel=0.2)
    assert not b.any()
    assert not layer.lora_B["default"].weight.any()


def test_orthogonal_starts_are_pefts_draw_for_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = (
        TargetModule(name="big", in_features=40, out_features=20),
        TargetModule(name="small", in_features=9, out_features=30),
    )
    bank = make_bank(16, 1, modules)
    bank.occupy(0, AdapterShape(rank=8, targets=modules, own_ranks=(8, 2)))
    bank.initialise(0, 3, "orthogonal")
    generator, draw = torch.Generator().manual_seed(3), torch.randn
    monkeypatch.setattr(torch, "randn", lambda *sizes: draw(*sizes, generator=generator))
    base = torch.nn.Sequential(OrderedDict(big=torch.nn.Linear(40, 20), small=torch.nn.Linear(9, 30)))
    config = LoraConfig(r=8, rank_pattern={"small": 2}, target_modules=["big", "small"], init_lora_weights="orthogonal")
    peft = get_peft_model(base, config)
    for name, (a_KR, b_RN) in bank.read(0).items():
        layer = peft.get_submodule(f"base_model.model.{name}")
        assert torch.equal(a_KR.T, layer.lora_A["default"].weight)
        assert torch.equal(b_RN.T, layer.lora_B["default"].weight)
        assert a_KR.any()
        assert b_RN.any()
        assert float((a_KR @ b_RN).norm()) < 1e-6 * float(a_KR.norm() * b_RN.norm())


def test_initialising_leaves_the_global_generator_and_other_slots_alone() -> None:
    bank = make_bank()
    initialised(bank, 0, 1, shape())
    row, state = bank.params_ZP[0].clone(), torch.get_rng_state()
    initialised(bank, 1, 2, shape(4))
    assert torch.equal(bank.params_ZP[0], row)
    assert torch.equal(torch.get_rng_state(), state)


@given(rank=st.integers(1, 4), targets=st.sets(st.integers(0, 2), min_size=1), slots=st.permutations([0, 1, 2]))
def test_read_and_write_round_trip_between_banks(rank: int, targets: set[int], slots: list[int]) -> None:
    adapter, source, sink = shape(rank, *sorted(targets)), make_bank(4), make_bank(9)
    source.occupy(slots[0], adapter)
    source.write(
        slots[0],
        {
            module.name: (torch.randn(module.in_features, rank), torch.randn(rank, module.out_features))
            for module in adapter.targets
        },
    )
    weights = source.read(slots[0])
    assert sum(a.numel() + b.numel() for a, b in weights.values()) == adapter.num_parameters
    sink.occupy(slots[1], adapter)
    sink.write(slots[1], weights)
    assert_equal(sink.read(slots[1]), weights)
    assert int((sink.params_ZP != 0).sum()) == adapter.num_parameters
    assert not sink.params_ZP[[slots[0], slots[2]]].any()


def test_what_is_read_is_a_copy() -> None:
    bank = make_bank()
    weights = initialised(bank, 0, 1, shape())
    kept = {name: (a.clone(), b.clone()) for name, (a, b) in weights.items()}
    bank.params_ZP.fill_(5.0)
    assert_equal(weights, kept)


def test_a_reused_slot_remembers_nothing() -> None:
    bank = make_bank()
    bank.occupy(1, shape(4))
    bank.params_ZP[1], bank.grads_ZP[1] = 3.0, 4.0
    operands = [bank.operands(index, index) for index in range(3)]
    bank.release(1)
    assert not any(group.slots for group in operands)
    bank.occupy(1, shape(2, 1))
    assert not bank.params_ZP[1].any()
    assert not bank.grads_ZP[1].any()
    assert [list(group.slots) for group in operands] == [[], [1], []]


def test_operands_see_who_comes_and_goes_whenever_they_were_handed_out() -> None:
    bank = make_bank()
    early = bank.operands(0, 0)
    bank.occupy(2, shape(3))
    bank.params_ZP[2] = 1.0
    for operands in (early, bank.operands(0, 0)):
        assert list(operands.slots) == [2]
        assert operands.slots[2].a_KQ.shape == (6, 3)
        assert operands.slots[2].a_KQ.all()
    bank.release(2)
    assert not early.slots


def test_training_reaches_every_parameter_and_nothing_behind_them() -> None:
    bank = make_bank(max_rank=7)
    shapes = (shape(3), shape(7, 0, 1), shape(1, 2))
    for slot, adapter in enumerate(shapes):
        initialised(bank, slot, slot, adapter)
    start = bank.params_ZP.clone()
    groups = [bank.operands(index, index) for index in range(len(MODULES))]
    optimizer, config = BankOptimizer(bank, ["adamw_torch"]), JobConfig(weight_decay=0.1, learning_rate=0.05)
    generator = torch.Generator().manual_seed(0)
    schedule = TokenSchedule.build([2, 0, 1], [3, 5, 2], [2.0, 1.0, 4.0])
    for _ in range(6):
        for module, operands in zip(MODULES, groups, strict=True):
            x_TK = torch.randn(10, module.in_features, generator=generator)
            base = torch.nn.Linear(module.in_features, module.out_features, bias=False).requires_grad_(False)
            base.weight.normal_(generator=generator)
            (y_TN,) = grouped_lora_linear(x_TK, bank.anchor, [FrozenWeight(base)], operands, schedule, torch_backend)
            y_TN.square().sum().backward()
        updates = [SlotUpdate(slot=slot, config=config, learning_rate=0.05) for slot in range(3)]
        optimizer.step(updates, optimizer.gradient_norms(range(3)))
    for rows_ZP in (bank.params_ZP, optimizer.exp_avg_ZP, optimizer.exp_avg_sq_ZP):
        for slot, adapter in enumerate(shapes):
            assert int(rows_ZP[slot].ne(0).sum()) == adapter.num_parameters
            assert rows_ZP[slot, : adapter.num_parameters].all()
    assert not torch.equal(start, bank.params_ZP)
    bank.complete_gradients(range(3))
    assert not bank.grads_ZP.any(), "a step forgets its gradients"


def test_gradients_that_a_step_has_not_written_are_set_to_zero() -> None:
    bank = make_bank()
    for slot in (0, 1, 2):
        bank.occupy(slot, shape(2))
        bank.grads_ZP[slot] = 3.0  # left by an earlier step
    groups = [bank.operands(index, index) for index in range(len(MODULES))]
    groups[1].adds_gradients([0])
    bank.end_gradients([1])
    groups[1].adds_gradients([1])
    bank.complete_gradients([0, 1])
    for slot in (0, 1):
        for module, *pair in bank.matrices(bank.grads_ZP, slot):
            assert [bool(gradient.any()) for gradient in pair] == [module == MODULES[1]] * 2
    assert (bank.grads_ZP[2] == 3.0).all()
    bank.end_gradients([0])
    bank.complete_gradients([0])
    assert not any(gradient.any() for _, *pair in bank.matrices(bank.grads_ZP, 0) for gradient in pair)


def test_adapters_that_are_not_trained_have_no_memory_for_gradients() -> None:
    bank = AdapterBank(BankLayout(modules=MODULES, max_rank=4), 2, has_grads=False)
    assert (bank.grads_ZP.device.type, bank.grads_ZP.shape) == ("meta", bank.params_ZP.shape)
    assert_equal(initialised(bank, 1, 0, shape()), initialised(make_bank(), 1, 0, shape()))


UNEVEN = tuple(
    TargetModule(name=name, in_features=k, out_features=n)
    for name, k, n in (("small", 9, 20), ("wide", 300, 64), ("tall", 70, 513))
)
LAYOUT = BankLayout(modules=UNEVEN, max_rank=16)
EXTRAS = (
    ExtraTensor(name="wide.bias", shape=(64,), has_decay=False),
    ExtraTensor(name="tall.lora_magnitude_vector", shape=(513,)),
)
LAYOUTS = {"plain": LAYOUT, "extras": replace(LAYOUT, extras=EXTRAS)}
NUM_SLOTS = 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "optims",
    [
        ("adamw_torch",),
        pytest.param(("adamw_8bit",), marks=needs_bitsandbytes),
        pytest.param(("adamw_torch", "adamw_8bit"), marks=needs_bitsandbytes),
    ],
    ids="+".join,
)
@pytest.mark.parametrize("working", [None, torch.bfloat16], ids=["no copies", "copies"])
@pytest.mark.parametrize("state", [None, torch.float32, torch.bfloat16], ids=["usual", "float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_it_is_what_the_tensors_take(
    layout: BankLayout,
    state: torch.dtype | None,
    working: torch.dtype | None,
    optims: tuple[OptimizerName, ...],
    dtype: torch.dtype,
) -> None:
    bank = AdapterBank(layout, NUM_SLOTS, dtype=dtype, initial=initial(layout))
    bank.keep_copies(working)
    optimizer = BankOptimizer(bank, optims, state)
    for slot in range(NUM_SLOTS):
        bank.occupy(slot, AdapterShape(rank=layout.max_rank, targets=UNEVEN, extras=layout.extras))
        optimizer.reset(slot, optims[-1])
    tensors = [bank.params_ZP, bank.grads_ZP, optimizer.exp_avg_ZP, optimizer.exp_avg_sq_ZP]
    tensors += [] if bank.working_ZP is None else [bank.working_ZP]
    for of_slot in (own for own in optimizer._own.values() if isinstance(own, EightBitAdamW)):
        tensors += of_slot._parameters.values()
        tensors += [part for state in of_slot._optimizer.state.values() for part in state.values() if _is_tensor(part)]
    distinct = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.numel()}
    assert bank_bytes(layout, NUM_SLOTS, optims, dtype, working, state) == sum(distinct.values())


def test_bfloat16_moments_take_fourteen_bytes_of_a_parameter_where_float32_ones_take_eighteen() -> None:
    sizes = [
        bank_bytes(LAYOUT, 1, {"adamw_torch"}, torch.float32, torch.bfloat16, state) / LAYOUT.row_size
        for state in (None, torch.float32, torch.bfloat16)
    ]
    assert sizes == [18, 18, 14]


@pytest.mark.parametrize(
    ("optim", "args"),
    [
        ("sgd", {"momentum": 0.9}),
        ("rmsprop", {"momentum": 0.9, "centered": True}),
        ("adagrad", {}),
        ("adafactor", {}),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_it_is_what_the_state_of_other_optimizers_takes(
    layout: BankLayout, optim: OptimizerName, args: dict[str, float]
) -> None:
    bank = AdapterBank(layout, 1, initial=initial(layout))
    optimizer = BankOptimizer(bank, {optim})
    config = JobConfig(r=layout.max_rank, optim=optim, optim_args=args)
    bank.occupy(0, AdapterShape(rank=layout.max_rank, targets=UNEVEN, extras=layout.extras))
    optimizer.reset(0, optim)
    optimizer.step([SlotUpdate(slot=0, config=config, learning_rate=0.1)], optimizer.gradient_norms([0]))
    parts = {name: part for name, part in optimizer.read(0).tensors.items() if not name.endswith(".step")}
    state = sum(part.nbytes for part in parts.values())
    assert bank_bytes(layout, 1, (optim,)) == bank.params_ZP.nbytes + bank.grads_ZP.nbytes + state


def initial(layout: BankLayout) -> dict[str, Tensor]:
    return {extra.name: torch.ones(extra.shape) for extra in layout.extras}


def _is_tensor(part: object) -> bool:
    return isinstance(part, Tensor)
