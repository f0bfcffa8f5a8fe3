"""``bank_bytes`` says what the tensors of a bank and its optimizers take, to the byte."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from alto.lora import AdapterBank, AdapterShape, BankLayout, SlotAdamW, TargetModule, bank_bytes
from alto.spec.job_config import OptimizerName

MODULES = tuple(
    TargetModule(name=name, in_features=k, out_features=n)
    for name, k, n in (("small", 9, 20), ("wide", 300, 64), ("tall", 70, 513))
)
LAYOUT = BankLayout(modules=MODULES, max_rank=16)
NUM_SLOTS = 3

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes: pip install 'alto-lora[bnb]'"
)


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
def test_it_is_what_the_tensors_take(optims: tuple[OptimizerName, ...], dtype: torch.dtype) -> None:
    bank = AdapterBank(LAYOUT, NUM_SLOTS, dtype=dtype)
    optimizer = SlotAdamW(bank, optims)
    for slot in range(NUM_SLOTS):
        bank.occupy(slot, AdapterShape(rank=LAYOUT.max_rank, targets=MODULES))
        optimizer.reset(slot, optims[-1])
    tensors = [bank.params_ZP, bank.grads_ZP, optimizer.exp_avg_ZP, optimizer.exp_avg_sq_ZP]
    for of_slot in optimizer._eight_bit.values():
        tensors += of_slot._parameters.values()
        tensors += [part for state in of_slot._optimizer.state.values() for part in state.values() if _is_tensor(part)]
    distinct = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.numel()}
    assert bank_bytes(LAYOUT, NUM_SLOTS, optims, dtype) == sum(distinct.values())


def _is_tensor(part: object) -> bool:
    return isinstance(part, Tensor)
