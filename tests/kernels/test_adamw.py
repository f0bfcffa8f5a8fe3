"""``bank_adamw`` against ``torch.optim.AdamW`` on one row at a time with its own settings, and ``row_norms``."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
import torch
from kernel_backends import BACKENDS
from torch import Tensor

from alto.kernels import RowParts, RowStep, torch_backend

SETTINGS = {
    0: {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    2: {"lr": 5e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3},
    3: {"lr": 1e-1, "betas": (0.0, 0.5), "eps": 1e-2, "weight_decay": 0.01},
}
RATES_OF_B = {0: 1e-3, 2: 2e-1, 3: 2e-2}
PARTS = {0: RowParts(12, 30, 33, 37), 2: RowParts(5, 8, 11, 11), 3: RowParts(27, 28, 28, 30)}
"""The parts of each trained row."""
NUM_ROWS, ROW_SIZE, NUM_STEPS = 5, 37, 30
NAMES = ("params", "grads", "exp_avg", "exp_avg_sq")
NAN = float("nan")


class Bank:
    """Five rows, three of which are trained; row 1 is between them, and row 4 is never named.

    Past a row's end its gradient is NaN, and would make the rest NaN too.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(3)
        self.behind_ZP = torch.zeros(NUM_ROWS, ROW_SIZE, dtype=torch.bool)
        for slot, parts in PARTS.items():
            self.behind_ZP[slot, parts.end :] = True
        self.params, self.grads = self.draw(), self.draw_grads()
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.params), torch.zeros_like(self.params)

    def draw(self) -> Tensor:
        return torch.randn(NUM_ROWS, ROW_SIZE, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def draw_grads(self) -> Tensor:
        return self.draw().masked_fill_(self.behind_ZP, NAN)

    def bits(self, where: Tensor | list[int]) -> list[Tensor]:
        """Return copies of all four tensors' bits there, so that NaN equals itself."""
        return [getattr(self, name)[where].clone().view(torch.uint8) for name in NAMES]

    def step(
        self, ops: ModuleType, slots: list[int], steps: list[int], scales: list[float], working: Tensor | None = None
    ) -> None:
        rows = [
            RowStep(
                slot=slot,
                parts=PARTS[slot],
                step=step,
                rates=(SETTINGS[slot]["lr"], RATES_OF_B[slot]),
                betas=SETTINGS[slot]["betas"],
                epsilon=SETTINGS[slot]["eps"],
                weight_decay=SETTINGS[slot]["weight_decay"],
                clears=True,
            )
            for slot, step in zip(slots, steps, strict=True)
        ]
        banks = (self.params, self.grads, self.exp_avg, self.exp_avg_sq)
        ops.bank_adamw(*banks, working, rows, torch.tensor(scales, dtype=self.dtype))


class Alone:
    """One row's parts under PyTorch's own optimizer."""

    def __init__(self, row_P: Tensor, slot: int) -> None:
        parts, settings = PARTS[slot], SETTINGS[slot]
        self.parts = [slice(*ends) for ends in itertools.pairwise((0, *parts))]
        self.parameters = [torch.nn.Parameter(row_P[part].clone()) for part in self.parts]
        rates = (settings["lr"], RATES_OF_B[slot], RATES_OF_B[slot], settings["lr"])
        decays = (settings["weight_decay"], settings["weight_decay"], 0.0, settings["weight_decay"])
        groups = [
            {"params": [parameter], "lr": rate, "weight_decay": decay}
            for parameter, rate, decay in zip(self.parameters, rates, decays, strict=True)
        ]
        self.optimizer = torch.optim.AdamW(groups, **settings)

    def step(self, gradient_P: Tensor) -> Tensor:
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            parameter.grad = gradient_P[part].clone()
        self.optimizer.step()
        return torch.cat([parameter.data for parameter in self.parameters])


@BACKENDS
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["float64", "float32"]
)
def test_many_steps_equal_torch_and_touch_nothing_else(ops: ModuleType, dtype: torch.dtype, limit: float) -> None:
    bank = Bank(dtype)
    alone = {slot: Alone(bank.params[slot], slot) for slot in SETTINGS}
    elsewhere = bank.behind_ZP.clone()
    elsewhere[[1, 4]] = True
    before = bank.bits(elsewhere)
    counts = dict.fromkeys(SETTINGS, 0)
    for step in range(NUM_STEPS):
        # Rows join late and rest in between, in a changing order, as admitted and parked jobs do.
        slots = [slot for slot in ([3, 0, 2] if step % 2 else [2, 3, 0]) if step >= 4 * slot and (step + slot) % 5]
        if not slots:
            continue
        scales = [2.0**-slot for slot in slots]  # exact in every precision of a backend
        fresh = bank.draw_grads()
        expected = {}
        for slot, scale in zip(slots, scales, strict=True):
            counts[slot] += 1
            bank.grads[slot] = fresh[slot]
            expected[slot] = alone[slot].step(fresh[slot] * scale)
        resting = [slot for slot in SETTINGS if slot not in slots]
        of_resting = bank.bits(resting)
        bank.step(ops, slots, [counts[slot] for slot in slots], scales)
        for slot, row_P in expected.items():
            torch.testing.assert_close(bank.params[slot, : PARTS[slot].end], row_P, rtol=limit, atol=limit)
            assert not bank.grads[slot, : PARTS[slot].end].any(), "the gradient was not forgotten"
        assert all(torch.equal(one, other) for one, other in zip(bank.bits(resting), of_resting, strict=True))
    assert min(counts.values()) > 10
    assert len(set(counts.values())) > 1, "rows should be at different steps"
    assert all(torch.equal(one, other) for one, other in zip(bank.bits(elsewhere), before, strict=True))


@BACKENDS
def test_nan_in_one_row_leaves_every_bit_of_the_others(ops: ModuleType) -> None:
    clean, beside_nan = Bank(), Bank()
    beside_nan.grads[2] = NAN
    for bank in (clean, beside_nan):
        bank.step(ops, [0, 2, 3], [1, 1, 1], [1.0, NAN if bank is beside_nan else 1.0, 1.0])
    assert beside_nan.params[2, : PARTS[2].end].isnan().all()
    assert not beside_nan.grads[2, : PARTS[2].end].any(), "a gradient of NaN is forgotten too"
    others = [0, 1, 3, 4]
    assert all(torch.equal(one, other) for one, other in zip(clean.bits(others), beside_nan.bits(others), strict=True))


@BACKENDS
@pytest.mark.parametrize("mistake", ["step", "scale"])
def test_a_wrong_step_or_scale_shows(ops: ModuleType, mistake: str) -> None:
    right, wrong = Bank(), Bank()
    # Eps is large in row 3, so that the gradient's scale does not cancel.
    right.step(ops, [3], [3], [1.0])
    wrong.step(ops, [3], [2 if mistake == "step" else 3], [1.0 if mistake == "step" else 0.5])
    assert not torch.allclose(right.params[3], wrong.params[3], rtol=1e-6, atol=1e-6)


def test_a_row_with_one_rate_is_one_fused_call(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, fused = [], torch_backend.adamw
    monkeypatch.setattr(
        torch_backend,
        "adamw",
        lambda params, *rest, **settings: (
            sizes.append([part.numel() for part in params]) or fused(params, *rest, **settings)
        ),
    )
    Bank().step(torch_backend, [0, 2], [1, 1], [1.0, 1.0])
    assert sizes == [[37], [5], [3], [3]], "row 0 whole; row 2 with its A, its B and its vectors without decay apart"


class TestRowNorms:
    """Long rows, which kernels process in blocks."""

    SLOTS, ENDS = [3, 0, 4, 1], [20_001, 5, 0, 4096]

    def rows(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return five rows with NaN past those ends, and in the row that is not requested."""
        rows_ZP = torch.randn(5, 20_001, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
        rows_ZP[2] = NAN
        for slot, end in zip(self.SLOTS, self.ENDS, strict=True):
            rows_ZP[slot, end:] = NAN
        return rows_ZP

    @BACKENDS
    @pytest.mark.parametrize(
        ("dtype", "result", "limit"),
        [
            (torch.float64, torch.float64, 1e-13),
            (torch.float32, torch.float32, 1e-5),
            (torch.bfloat16, torch.float32, 1e-5),  # in bfloat16 the norm alone would be off by a thousandth
        ],
        ids=["float64", "float32", "bfloat16"],
    )
    def test_is_the_norm_of_each_row_up_to_its_end(
        self, ops: ModuleType, dtype: torch.dtype, result: torch.dtype, limit: float
    ) -> None:
        rows_ZP = self.rows(dtype)
        before = rows_ZP.clone()
        found = ops.row_norms(rows_ZP, self.SLOTS, self.ENDS)
        pairs = zip(self.SLOTS, self.ENDS, strict=True)
        expected = [float(rows_ZP[slot, :end].double().square().sum().sqrt()) for slot, end in pairs]
        assert found.dtype == result
        assert found.tolist() == pytest.approx(expected, rel=limit, abs=0.0)
        assert expected[2] == 0.0, "a row without numbers"
        assert torch.equal(rows_ZP.view(torch.uint8), before.view(torch.uint8))

    @BACKENDS
    @pytest.mark.parametrize("poison", [NAN, float("inf")])
    def test_a_row_that_is_not_finite_leaves_every_bit_of_the_others(self, ops: ModuleType, poison: float) -> None:
        rows_ZP = self.rows(torch.float32)
        clean = ops.row_norms(rows_ZP, self.SLOTS, self.ENDS)
        rows_ZP[3, 77] = poison
        found = ops.row_norms(rows_ZP, self.SLOTS, self.ENDS)
        assert not found[0].isfinite()
        assert torch.equal(found[1:], clean[1:])

    @BACKENDS
    def test_a_row_s_bits_do_not_depend_on_other_rows(self, ops: ModuleType) -> None:
        rows_ZP = self.rows(torch.float32)
        together = ops.row_norms(rows_ZP, self.SLOTS, self.ENDS)
        alone = [ops.row_norms(rows_ZP, [slot], [end]) for slot, end in zip(self.SLOTS, self.ENDS, strict=True)]
        assert torch.equal(together, torch.cat(alone))


@BACKENDS
def test_copies_of_the_weights_are_written_with_them(ops: ModuleType) -> None:
    bank = Bank(torch.float32)
    working = torch.full((NUM_ROWS, ROW_SIZE), 7.0, dtype=torch.float16)
    bank.step(ops, [3, 0], [1, 1], [1.0, 1.0], working)
    for slot in range(NUM_ROWS):
        end = PARTS[slot].end if slot in (0, 3) else 0
        assert torch.equal(working[slot, :end], bank.params[slot, :end].half())
        assert (working[slot, end:] == 7.0).all()
