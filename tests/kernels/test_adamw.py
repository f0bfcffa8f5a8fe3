"""``bank_adamw`` against ``torch.optim.AdamW``, a row at a time with its own settings, ``B`` with a rate of its own."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from kernel_backends import BACKENDS
from torch import Tensor

from alto.kernels import torch_backend

SETTINGS = {
    0: {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    2: {"lr": 5e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3},
    3: {"lr": 1e-1, "betas": (0.0, 0.5), "eps": 1e-2, "weight_decay": 0.01},
}
RATES_OF_B = {0: 1e-3, 2: 2e-1, 3: 2e-2}
NUM_ROWS, ROW_SIZE, NUM_STEPS = 5, 37, 30
B_SPANS = [(5, 12), (20, 37)]
IS_B = torch.tensor([any(start <= column < end for start, end in B_SPANS) for column in range(ROW_SIZE)])


class Bank:
    """Rows of which three are trained; row 1 sits between them and row 4 is never named."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.params = self.draw()
        self.grads = self.draw()
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.params), torch.zeros_like(self.params)

    def draw(self) -> Tensor:
        return torch.randn(NUM_ROWS, ROW_SIZE, generator=self.generator, dtype=torch.float64)

    def step(self, ops: ModuleType, slots: list[int], steps: list[int], scales: list[float]) -> None:
        settings = [SETTINGS[slot] for slot in slots]
        ops.bank_adamw(
            self.params,
            self.grads,
            self.exp_avg,
            self.exp_avg_sq,
            slots,
            steps=steps,
            learning_rates=[(SETTINGS[slot]["lr"], RATES_OF_B[slot]) for slot in slots],
            b_spans=B_SPANS,
            betas=[setting["betas"] for setting in settings],
            epsilons=[setting["eps"] for setting in settings],
            weight_decays=[setting["weight_decay"] for setting in settings],
            grad_scales=torch.tensor(scales, dtype=torch.float64),
        )


@BACKENDS
def test_many_steps_equal_torch_and_leave_other_rows_alone(ops: ModuleType) -> None:
    bank = Bank()
    untouched = [tensor[[1, 4]].clone() for tensor in (bank.params, bank.grads)]
    alone = {
        slot: [torch.nn.Parameter(bank.params[slot, columns].clone()) for columns in (~IS_B, IS_B)] for slot in SETTINGS
    }
    optimizers = {
        slot: torch.optim.AdamW([{"params": [a]}, {"params": [b], "lr": RATES_OF_B[slot]}], **SETTINGS[slot])
        for slot, (a, b) in alone.items()
    }
    counts = dict.fromkeys(SETTINGS, 0)
    for step in range(NUM_STEPS):
        # Rows join late and rest in between, in a changing order, as jobs do that are admitted and parked.
        slots = [slot for slot in ([3, 0, 2] if step % 2 else [2, 3, 0]) if step >= 4 * slot and (step + slot) % 5]
        if not slots:
            continue
        scales = [0.5 + 0.25 * slot for slot in slots]
        fresh = bank.draw()
        for slot, scale in zip(slots, scales, strict=True):
            counts[slot] += 1
            bank.grads[slot] = fresh[slot]
            for parameter, columns in zip(alone[slot], (~IS_B, IS_B), strict=True):
                parameter.grad = fresh[slot, columns] * scale
            optimizers[slot].step()
        bank.step(ops, slots, [counts[slot] for slot in slots], scales)
        for slot in SETTINGS:
            for parameter, columns in zip(alone[slot], (~IS_B, IS_B), strict=True):
                torch.testing.assert_close(bank.params[slot, columns], parameter.data, rtol=1e-12, atol=1e-12)
    assert min(counts.values()) > 10
    assert len(set(counts.values())) > 1, "rows should be at different steps"
    assert all(
        torch.equal(tensor[[1, 4]], old) for tensor, old in zip((bank.params, bank.grads), untouched, strict=True)
    )
    assert not bank.exp_avg[[1, 4]].any()
    assert not bank.exp_avg_sq[[1, 4]].any()


@BACKENDS
def test_nan_in_one_row_leaves_every_bit_of_the_others(ops: ModuleType) -> None:
    clean, beside_nan = Bank(), Bank()
    beside_nan.grads[2] = float("nan")
    for bank in (clean, beside_nan):
        bank.step(ops, [0, 2, 3], [1, 1, 1], [1.0, float("nan") if bank is beside_nan else 1.0, 1.0])
    assert beside_nan.params[2].isnan().all()
    others = [0, 1, 3, 4]
    for name in ("params", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(clean, name)[others], getattr(beside_nan, name)[others])


@BACKENDS
@pytest.mark.parametrize("mistake", ["step", "scale"])
def test_a_wrong_step_or_scale_shows(ops: ModuleType, mistake: str) -> None:
    right, wrong = Bank(), Bank()
    # Eps is large in row 3, so that the scale of the gradient is not divided out.
    right.step(ops, [3], [3], [1.0])
    wrong.step(ops, [3], [2 if mistake == "step" else 3], [1.0 if mistake == "step" else 0.5])
    assert not torch.allclose(right.params[3], wrong.params[3], rtol=1e-6, atol=1e-6)


def test_a_row_with_one_rate_is_one_fused_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, fused = [], torch_backend.adamw
    monkeypatch.setattr(
        torch_backend,
        "adamw",
        lambda params, *rest, **settings: calls.append(len(params)) or fused(params, *rest, **settings),
    )
    Bank().step(torch_backend, [0, 2], [1, 1], [1.0, 1.0])
    assert calls == [1, 2, 2], "row 0 whole; row 2 with its A and its B apart"
