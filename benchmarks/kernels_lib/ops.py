"""The grouped ops one by one, at the shapes of a model, against the time that their bytes and FLOPs must take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from alto.kernels import TokenSchedule, reference
from alto.lora import AdapterBank, AdapterShape, BankLayout, TargetModule
from kernels_lib.gate import relative_distance
from kernels_lib.measure import DeviceLimits, time_op

__all__ = ["OpCase", "op_failures", "op_rows"]

_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCase:
    """One linear module with an adapter for each job; ``lengths`` and ``ranks`` are the tokens and rank of each job."""

    in_features: int
    out_features: int
    lengths: tuple[int, ...]
    ranks: tuple[int, ...]


class _Operands:
    """Random tensors for a case: the same values every time, tokens rounded to ``dtype``; with ``exact`` in float64."""

    def __init__(self, case: OpCase, device: torch.device, dtype: torch.dtype, *, exact: bool) -> None:
        generator = torch.Generator(device).manual_seed(0)
        num_tokens = sum(case.lengths)

        def tokens(width: int) -> Tensor:
            drawn = torch.randn(num_tokens, width, generator=generator, device=device).to(dtype)
            return drawn.double() if exact else drawn

        self.x_TK, self.y_TN, self.dx_TK, self.dy_TN = (
            tokens(width) for width in (case.in_features, case.out_features) * 2
        )
        module = TargetModule(name="module", in_features=case.in_features, out_features=case.out_features)
        bank_dtype = torch.float64 if exact else torch.float32
        bank = AdapterBank(
            BankLayout(modules=(module,), max_rank=max(case.ranks)), len(case.ranks), device=device, dtype=bank_dtype
        )
        for slot, rank in enumerate(case.ranks):
            bank.occupy(slot, AdapterShape(rank=rank, targets=(module,)))
            a_KR = torch.randn(module.in_features, rank, generator=generator, device=device)
            b_RN = torch.randn(rank, module.out_features, generator=generator, device=device)
            bank.write(slot, {module.name: (a_KR * module.in_features**-0.5, b_RN * rank**-0.5)})
        self.bank = bank
        self.lora = bank.operands(0, 0)
        self.schedule = TokenSchedule.build(range(len(case.ranks)), case.lengths, [2.0] * len(case.ranks))

    def calls(self, ops: ModuleType) -> Mapping[str, Callable[[], Any]]:
        """Every op on these tensors; in-place results add up from call to call."""
        lora, schedule = self.lora, self.schedule
        s_TR = ops.grouped_shrink(self.x_TK, lora.a_ZKR, schedule, lora.ranks)
        ds_TR = ops.grouped_backward_input(self.dy_TN, lora.a_ZKR, lora.b_ZRN, None, schedule, lora.ranks)
        return {
            "grouped_shrink": lambda: ops.grouped_shrink(self.x_TK, lora.a_ZKR, schedule, lora.ranks),
            "fused_expand_add": lambda: ops.fused_expand_add(s_TR, lora.b_ZRN, self.y_TN, schedule, lora.ranks),
            "grouped_backward_input": lambda: ops.grouped_backward_input(
                self.dy_TN, lora.a_ZKR, lora.b_ZRN, self.dx_TK, schedule, lora.ranks
            ),
            "grouped_backward_weight": lambda: ops.grouped_backward_weight(
                self.x_TK, s_TR, self.dy_TN, ds_TR, lora.da_ZKR, lora.db_ZRN, schedule, lora.ranks
            ),
        }

    def results(self, ops: ModuleType) -> Iterator[tuple[str, Sequence[Tensor]]]:
        """What every op gives, padding left out."""
        calls = self.calls(ops)
        yield "grouped_shrink", self._own_columns(calls["grouped_shrink"]())
        calls["fused_expand_add"]()
        yield "fused_expand_add", [self.y_TN]
        yield "grouped_backward_input", [*self._own_columns(calls["grouped_backward_input"]()), self.dx_TK]
        calls["grouped_backward_weight"]()
        slots = range(len(self.lora.ranks))
        yield (
            "grouped_backward_weight",
            [matrix for slot in slots for _, *both in self.bank.matrices(self.bank.grads_ZP, slot) for matrix in both],
        )

    def _own_columns(self, s_TR: Tensor) -> list[Tensor]:
        return [s_TR[start:end, : self.lora.ranks[slot]] for slot, start, end in self.schedule.segments]


def op_failures(case: OpCase, ops: ModuleType, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Which ops are further from the float64 reference than they may be, a sentence each."""
    found = _Operands(case, device, dtype, exact=False).results(ops)
    expected = _Operands(case, device, dtype, exact=True).results(reference)
    failures = []
    for (name, one), (_, other) in zip(found, expected, strict=True):
        distance, limit = relative_distance(one, other), _TOLERANCES[dtype]
        if not distance <= limit:
            failures.append(
                f"{name} at {case.in_features} × {case.out_features}: {distance:.1e} from the float64 reference, "
                f"tolerance {limit:.0e}"
            )
    return failures


def op_rows(
    case: OpCase, ops: ModuleType, device: torch.device, dtype: torch.dtype, limits: DeviceLimits
) -> Iterator[dict[str, Any]]:
    """Time, floor and share of the floor of every op, a row each."""
    work = _work(case, dtype)
    for name, call in _Operands(case, device, dtype, exact=False).calls(ops).items():
        num_bytes, num_flops = work[name]
        found = time_op(call, device)
        floor_s = limits.floor_s(num_bytes, num_flops)
        yield {
            "op": name,
            "in_features": case.in_features,
            "out_features": case.out_features,
            "tokens": sum(case.lengths),
            "jobs": len(case.ranks),
            "median_us": found.median * 1e6,
            "min_us": found.minimum * 1e6,
            "max_us": found.maximum * 1e6,
            "floor_us": floor_s * 1e6,
            "floor_is": "bytes" if floor_s == num_bytes / limits.bytes_per_s else "flops",
            "share_of_floor": floor_s / found.median,
        }


def _work(case: OpCase, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """Bytes that each op must move, each tensor once, and FLOPs that it must do; adapters are float32."""
    tokens, token_bytes, weight_bytes = sum(case.lengths), dtype.itemsize, torch.float32.itemsize
    x, y = (tokens * width * token_bytes for width in (case.in_features, case.out_features))
    s = sum(length * rank for length, rank in zip(case.lengths, case.ranks, strict=True))
    ranks = sum(rank for length, rank in zip(case.lengths, case.ranks, strict=True) if length)
    a, b = (ranks * width * weight_bytes for width in (case.in_features, case.out_features))
    s_bytes, through_a, through_b = s * weight_bytes, 2.0 * s * case.in_features, 2.0 * s * case.out_features
    return {
        "grouped_shrink": (x + a + s_bytes, through_a),
        "fused_expand_add": (2 * y + b + s_bytes, through_b),
        "grouped_backward_input": (y + 2 * x + a + b + s_bytes, through_a + through_b),
        "grouped_backward_weight": (x + y + 2 * s_bytes + 2 * (a + b), through_a + through_b),
    }
