"""Compilation of a bank's kernels before the first step, using tensors of one token."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from alto.kernels import DropoutKey, LoraOperands, RowParts, TokenSchedule, choose_backend
from alto.lora.bank import AdapterBank
from alto.lora.optimizer import SlotAdamW

__all__ = ["compile_kernels"]


def compile_kernels(
    bank: AdapterBank,
    optimizer: SlotAdamW,
    dtype: torch.dtype,
    *,
    has_dropout: bool,
    has_adamw: bool,
    also: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, int]]:
    """Compile the kernels that linear layers and optimizer steps of ``bank`` launch, one kernel per iteration.

    Kernels of other modules (embeddings, experts, the output head) are included if they are the same; otherwise they
    are compiled at their first use. Call this only between two steps, because it invalidates the gradients of slot 0.

    Args:
        bank: Adapters of all slots, after their operands were handed out to layers.
        dtype: Dtype of the base model's activations.
        has_dropout: Whether a job uses dropout.
        has_adamw: Whether a job uses ``adamw_torch``.
        also: Launches kernels of the base model, to compile them as well.

    Yields:
        Number of kernels compiled so far and in total; nothing if there is nothing to compile.
    """
    device = bank.params_ZP.device
    ops = choose_backend(device=device)
    keys = [None, DropoutKey(0.5, 0, 0)] if has_dropout else [None]
    schedules = [TokenSchedule.build([0], [1], [1.0], [key]) for key in keys]

    def run_group(operands: LoraOperands, schedule: TokenSchedule) -> None:
        x_TK = torch.empty(1, operands.in_features, dtype=dtype, device=device)
        ys = [torch.empty(1, width, dtype=dtype, device=device) for width in operands.out_features]
        s_TQ = ops.grouped_shrink(x_TK, operands, schedule)
        ops.grouped_expand(s_TQ, operands, ys, schedule)
        ops.grouped_backward(x_TK, s_TQ, ys, operands, torch.empty_like(x_TK), schedule)

    def run() -> None:
        also()
        for operands in bank.operands_of_linear():
            for schedule in schedules:
                run_group(operands, schedule)
        norms = ops.row_norms(bank.grads_ZP, [0], [1])
        if bank.square_sums is not None:
            ops.summed_norms(bank.square_sums.sums_ZC, [0], [1])
        if has_adamw:
            ops.bank_adamw(
                *(bank.params_ZP, bank.grads_ZP, optimizer.exp_avg_ZP, optimizer.exp_avg_sq_ZP, bank.working_ZP),
                [0],
                parts=[RowParts(1, 1, 1, 1)],
                steps=[1],
                learning_rates=[(0.0, 0.0)],
                betas=[(0.9, 0.999)],
                epsilons=[1e-8],
                weight_decays=[0.0],
                grad_scales=norms,
                clears=[False],
                rounding_keys=[0] if optimizer.rounds_at_random else None,
            )

    yield from ops.compile_kernels(run)
    bank.end_gradients([0])
