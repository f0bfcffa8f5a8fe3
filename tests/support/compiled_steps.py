"""Compiles, as a program without Triton's interpreter, the kernels of a bank for a GPU that is not there, then takes
steps whose launches do nothing; prints what was compiled when, as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # read when the kernels are imported

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[2]))

from alto.kernels import DropoutKey, TokenSchedule, backend, choose_backend, triton_config
from alto.lora import AdapterBank, AdapterShape, BankLayout, BankOptimizer, SlotUpdate, TargetModule, compile_kernels
from alto.spec import JobConfig
from benchmarks.kernels.stub_driver import StubDriver

MODULES = tuple(
    TargetModule(name=name, in_features=num_in, out_features=num_out)
    for name, num_in, num_out in (("q", 32, 48), ("k", 32, 16), ("o", 48, 32), ("up", 32, 96))
)
SHAPES = [AdapterShape(rank=16, targets=MODULES), AdapterShape(rank=8, targets=MODULES[1:3])]


def main(*, has_dropout: bool) -> None:
    os.environ["ALTO_KERNELS"] = "triton"
    backend._check_triton = lambda: None
    driver = StubDriver()
    triton.runtime.driver.set_active(driver)
    bank = AdapterBank(BankLayout(modules=MODULES, max_rank=16, rank_step=8, shared_inputs=(("q", "k"),)), 2)
    for group in range(len(bank.layout.groups)):
        bank.operands(group, group)
    optimizer = BankOptimizer(bank, ["adamw_torch"])
    progress = list(compile_kernels(bank, optimizer, torch.bfloat16, has_dropout=has_dropout, has_adamw=True))
    again = list(compile_kernels(bank, optimizer, torch.bfloat16, has_dropout=has_dropout, has_adamw=True))
    num_launched, known = driver.num_launches, set(triton_config._compiled)
    for slot, shape in enumerate(SHAPES):
        bank.occupy(slot, shape)
    for lengths in ((70, 3), (5, 200)):
        take_step(bank, optimizer, TokenSchedule.build([1, 0], lengths, [2.0, 1.0]))
    if has_dropout:
        take_step(bank, optimizer, TokenSchedule.build([1, 0], (6, 7), [2.0, 1.0], [None, DropoutKey(0.1, 5, 9)]))
    later = [f"{key[0].fn.__name__}{key[4:]}" for key in set(triton_config._compiled) - known]
    print(json.dumps({"progress": progress, "again": again, "num_launched": num_launched, "later": sorted(later)}))


def take_step(bank: AdapterBank, optimizer: BankOptimizer, schedule: TokenSchedule) -> None:
    ops = choose_backend()
    for operands in bank.operands_of_linear():
        x_TK = torch.zeros(schedule.num_tokens, operands.in_features, dtype=torch.bfloat16)
        ys = [torch.zeros(schedule.num_tokens, width, dtype=torch.bfloat16) for width in operands.out_features]
        s_TQ = ops.grouped_shrink(x_TK, operands, schedule)
        ops.grouped_expand(s_TQ, operands, ys, schedule)
        ds_TQ = ops.grouped_backward_input(ys, operands, torch.empty_like(x_TK), schedule)
        ops.grouped_backward_weight(x_TK, s_TQ, ys, ds_TQ, operands, schedule)
    updates = [SlotUpdate(slot=slot, config=JobConfig(), learning_rate=1e-3) for slot in (0, 1)]
    optimizer.step(updates, optimizer.gradient_norms([0, 1]))


if __name__ == "__main__":
    main(has_dropout=sys.argv[1] == "dropout")
