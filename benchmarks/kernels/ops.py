"""Measures the grouped ops one by one, at the shapes of a model, and compares them with the shortest time for their
bytes and FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from alto.kernels import TokenSchedule, choose_backend, reference
from alto.lora import AdapterBank, AdapterShape, BankLayout, TargetModule
from benchmarks.kernels.gate import relative_distance
from benchmarks.kernels.measure import DeviceLimits, time_op

__all__ = ["OpCase", "op_failures", "op_rows", "op_work"]

_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCase:
    """Linear modules that read the same input, with an adapter for each job on all of them.

    Attributes:
        out_features: Out-features of every module.
        lengths, ranks: Tokens and rank of each job.
    """

    in_features: int
    out_features: tuple[int, ...]
    lengths: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def shape(self) -> str:
        """Shape ``K × N``, with the ``N`` of all modules joined by ``+``."""
        return f"{self.in_features} × {'+'.join(map(str, self.out_features))}"


class _Operands:
    """Random tensors for a case: always the same values, with tokens rounded to ``dtype``; with ``exact`` in
    float64."""

    def __init__(self, case: OpCase, device: torch.device, dtype: torch.dtype, *, exact: bool) -> None:
        generator = torch.Generator(device).manual_seed(0)
        num_tokens = sum(case.lengths)

        def tokens(width: int) -> Tensor:
            drawn = torch.randn(num_tokens, width, generator=generator, device=device).to(dtype)
            return drawn.double() if exact else drawn

        self.x_TK, self.dx_TK = tokens(case.in_features), tokens(case.in_features)
        self.ys, self.dys = ([tokens(width) for width in case.out_features] for _ in range(2))
        modules = tuple(
            TargetModule(name=str(member), in_features=case.in_features, out_features=width)
            for member, width in enumerate(case.out_features)
        )
        layout = BankLayout(
            modules=modules, max_rank=max(case.ranks), shared_inputs=(tuple(module.name for module in modules),)
        )
        bank_dtype = torch.float64 if exact else torch.float32
        self.bank = AdapterBank(layout, len(case.ranks), device=device, dtype=bank_dtype)
        self.bank.keep_copies(None if exact else choose_backend(device=device).working_dtype(dtype, bank_dtype))
        for slot, rank in enumerate(case.ranks):
            self.bank.occupy(slot, AdapterShape(rank=rank, targets=modules))
            for _, a_KR, b_RN in self.bank.matrices(self.bank.params_ZP, slot):
                a_KR.copy_(torch.randn(a_KR.shape, generator=generator, device=device) * case.in_features**-0.5)
                b_RN.copy_(torch.randn(b_RN.shape, generator=generator, device=device) * rank**-0.5)
            self.bank.copy_weights(slot)
        self.lora = self.bank.operands(0, 0)
        self.schedule = TokenSchedule.build(range(len(case.ranks)), case.lengths, [2.0] * len(case.ranks))

    def calls(self, ops: ModuleType) -> Mapping[str, Callable[[], Any]]:
        """Return every op on these tensors; gradients are those of the first pass of a step."""
        x_TK, dx_TK, ys, dys, lora, schedule = self.x_TK, self.dx_TK, self.ys, self.dys, self.lora, self.schedule
        s_TQ = ops.grouped_shrink(x_TK, lora, schedule)
        ds_TQ = ops.grouped_backward_input(dys, lora, None, schedule)

        def backward_weight() -> None:
            self.bank.end_gradients(schedule.slots)
            ops.grouped_backward_weight(x_TK, s_TQ, dys, ds_TQ, lora, schedule)

        return {
            "grouped_shrink": lambda: ops.grouped_shrink(x_TK, lora, schedule),
            "grouped_expand": lambda: ops.grouped_expand(s_TQ, lora, ys, schedule),
            "grouped_backward_input": lambda: ops.grouped_backward_input(dys, lora, dx_TK, schedule),
            "grouped_backward_weight": backward_weight,
        }

    def results(self, ops: ModuleType) -> Iterator[tuple[str, Sequence[Tensor]]]:
        """Return the result of every op; of narrow tensors only the columns that are a slot's own."""
        calls = self.calls(ops)
        yield "grouped_shrink", self._own_columns(calls["grouped_shrink"]())
        calls["grouped_expand"]()
        yield "grouped_expand", self.ys
        yield "grouped_backward_input", [*self._own_columns(calls["grouped_backward_input"]()), self.dx_TK]
        calls["grouped_backward_weight"]()
        yield "grouped_backward_weight", [self.bank.grads_ZP]

    def _own_columns(self, s_TQ: Tensor) -> list[Tensor]:
        return [s_TQ[start:end, : self.lora.slots[slot].width] for slot, start, end in self.schedule.segments]


def op_failures(case: OpCase, ops: ModuleType, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return the ops that are further from the float64 reference than allowed, one sentence each."""
    found = _Operands(case, device, dtype, exact=False).results(ops)
    expected = _Operands(case, device, dtype, exact=True).results(reference)
    failures = []
    for (name, one), (_, other) in zip(found, expected, strict=True):
        distance, limit = relative_distance(one, other), _TOLERANCES[dtype]
        if not distance <= limit:
            failures.append(f"{name} at {case.shape}: {distance:.1e} from the float64 reference, tolerance {limit:.0e}")
    return failures


def op_rows(
    case: OpCase, ops: ModuleType, device: torch.device, dtype: torch.dtype, limits: DeviceLimits
) -> Iterator[dict[str, Any]]:
    """Return a row for every op with its time, its floor and its share of the floor."""
    work = op_work(case, dtype)
    for name, call in _Operands(case, device, dtype, exact=False).calls(ops).items():
        num_bytes, num_flops = work[name]
        timed = time_op(call, device)
        found = timed.seconds
        floor_s = limits.floor_s(num_bytes, num_flops)
        yield {
            "op": name,
            "shape": case.shape,
            "tokens": sum(case.lengths),
            "jobs": len(case.ranks),
            "median_us": found.median * 1e6,
            "min_us": found.minimum * 1e6,
            "max_us": found.maximum * 1e6,
            "floor_us": floor_s * 1e6,
            "floor_is": "bytes" if floor_s == num_bytes / limits.bytes_per_s else "flops",
            "share_of_floor": floor_s / found.median,
            "timed_by": timed.by,
        }


def op_work(case: OpCase, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """Return the bytes that each op must move, with each tensor counted once, and the FLOPs that it must do.

    Gradients are float32. Adapters, as they are read, and products with them have the width of the tokens.
    """
    tokens, out_features = sum(case.lengths), sum(case.out_features)
    x, ys = (tokens * width * dtype.itemsize for width in (case.in_features, out_features))
    # Each module has the job's rank: the modules together make S as many times as wide, and read X once.
    members = len(case.out_features)
    token_ranks = sum(length * rank for length, rank in zip(case.lengths, case.ranks, strict=True))
    ranks = sum(rank for length, rank in zip(case.lengths, case.ranks, strict=True) if length)
    s = members * token_ranks * dtype.itemsize
    num_a, num_bs = members * ranks * case.in_features, ranks * out_features
    a, bs = num_a * dtype.itemsize, num_bs * dtype.itemsize
    through_a, through_b = 2.0 * members * token_ranks * case.in_features, 2.0 * token_ranks * out_features
    return {
        "grouped_shrink": (x + a + s, through_a),
        "grouped_expand": (ys + bs + s, through_b),
        "grouped_backward_input": (ys + x + a + bs + s, through_a + through_b),
        "grouped_backward_weight": (x + ys + 2 * s + (num_a + num_bs) * torch.float32.itemsize, through_a + through_b),
    }
