"""``bank_bytes`` says what the tensors of a bank and its optimizers take, to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from optional import needs_bitsandbytes
from torch import Tensor

from alto.lora import (
    AdapterBank,
    AdapterShape,
    BankLayout,
    ExtraTensor,
    SlotAdamW,
    SlotUpdate,
    TargetModule,
    bank_bytes,
)
from alto.lora.row_optimizers import EightBitAdamW
from alto.spec import JobConfig
from alto.spec.lr_schedules import OptimizerName

MODULES = tuple(
    TargetModule(name=name, in_features=k, out_features=n)
    for name, k, n in (("small", 9, 20), ("wide", 300, 64), ("tall", 70, 513))
)
LAYOUT = BankLayout(modules=MODULES, max_rank=16)
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
    optimizer = SlotAdamW(bank, optims, state)
    for slot in range(NUM_SLOTS):
        bank.occupy(slot, AdapterShape(rank=layout.max_rank, targets=MODULES, extras=layout.extras))
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
    optimizer = SlotAdamW(bank, {optim})
    config = JobConfig(r=layout.max_rank, optim=optim, optim_args=args)
    bank.occupy(0, AdapterShape(rank=layout.max_rank, targets=MODULES, extras=layout.extras))
    optimizer.reset(0, optim)
    optimizer.step([SlotUpdate(slot=0, config=config, learning_rate=0.1)], optimizer.gradient_norms([0]))
    parts = {name: part for name, part in optimizer.read(0).tensors.items() if not name.endswith(".step")}
    state = sum(part.nbytes for part in parts.values())
    assert bank_bytes(layout, 1, (optim,)) == bank.params_ZP.nbytes + bank.grads_ZP.nbytes + state


def initial(layout: BankLayout) -> dict[str, Tensor]:
    return {extra.name: torch.ones(extra.shape) for extra in layout.extras}


def _is_tensor(part: object) -> bool:
    return isinstance(part, Tensor)
