"""``grouped_lora_linear`` against autograd through a plain implementation, one job at a time, in float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from kernel_backends import BACKENDS
from torch import Tensor

from alto.kernels import DropoutKey, LoraOperands, TokenSchedule, grouped_lora_linear, torch_backend
from alto.kernels.dropout import dropout_factor

RANKS, MAX_RANK, MODULE, K, N = (3, 0, 16, 1), 16, 5, 17, 20
SLOTS, COUNTS, SCALES = (2, 0, 1, 3), (7, 1, 4, 6), (2.0, 0.5, 1.0, 3.0)
KEYS = (DropoutKey(0.4, 1, 2), None, DropoutKey(0.2, 3, 4), DropoutKey(0.5, 5, 6))


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Case:
    """One module with four slots of which one has rank 0, and a downstream gradient."""

    def __init__(self, *, bias: bool = True, dropout: bool = False) -> None:
        self.schedule = TokenSchedule.build(SLOTS, COUNTS, SCALES, KEYS if dropout else None)
        self.keys = KEYS if dropout else (None,) * 4
        self.x_TK, self.dy_TN = draw(1, sum(COUNTS), K), draw(2, sum(COUNTS), N)
        self.weight_NK, self.bias_N = draw(3, N, K), draw(4, N) if bias else None
        mask = (torch.arange(MAX_RANK)[None, :] < torch.tensor(RANKS)[:, None]).double()
        self.a_ZKR, self.b_ZRN = draw(5, 4, K, MAX_RANK) * mask[:, None, :], draw(6, 4, MAX_RANK, N) * mask[:, :, None]
        self.operands = LoraOperands(
            module=MODULE,
            a_ZKR=self.a_ZKR,
            b_ZRN=self.b_ZRN,
            da_ZKR=torch.zeros_like(self.a_ZKR),
            db_ZRN=torch.zeros_like(self.b_ZRN),
            ranks=RANKS,
        )
        self.anchor = torch.zeros((), dtype=torch.float64, requires_grad=True)

    def run(self, ops: ModuleType, *, input_needs_grad: bool = True) -> tuple[Tensor, Tensor | None]:
        """Output and input gradient; adapter gradients are left in ``operands``."""
        x_TK = self.x_TK.clone().requires_grad_(input_needs_grad)
        y_TN = grouped_lora_linear(x_TK, self.anchor, self.weight_NK, self.bias_N, self.operands, self.schedule, ops)
        y_TN.backward(self.dy_TN)
        return y_TN.detach(), x_TK.grad

    def expected(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Output and gradients of input, ``A`` and ``B`` by autograd, a job at a time."""
        x_TK, a, b = (part.clone().requires_grad_() for part in (self.x_TK, self.a_ZKR, self.b_ZRN))
        parts, start = [], 0
        for slot, count, scale, key in zip(SLOTS, COUNTS, SCALES, self.keys, strict=True):
            x = x_TK[start : start + count]
            dropped = x if key is None else x * dropout_factor(key, MODULE, count, K, x.device)
            base = torch.nn.functional.linear(x, self.weight_NK, self.bias_N)
            rank = RANKS[slot]
            parts.append(base + scale * (dropped @ a[slot, :, :rank] @ b[slot, :rank]))
            start += count
        y_TN = torch.cat(parts)
        y_TN.backward(self.dy_TN)
        return y_TN.detach(), x_TK.grad, a.grad, b.grad


def assert_same(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@BACKENDS
@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_output_and_all_gradients(ops: ModuleType, bias: bool, dropout: bool) -> None:
    case = Case(bias=bias, dropout=dropout)
    y_TN, dx_TK, da_ZKR, db_ZRN = case.expected()
    found_y, found_dx = case.run(ops)
    assert_same(found_y, y_TN)
    assert_same(found_dx, dx_TK)
    assert_same(case.operands.da_ZKR, da_ZKR)
    assert_same(case.operands.db_ZRN, db_ZRN)
    with pytest.raises(AssertionError):
        assert_same(found_dx, case.dy_TN @ case.weight_NK)


@BACKENDS
@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
def test_an_input_that_needs_no_gradient_still_gives_adapter_gradients(ops: ModuleType, dropout: bool) -> None:
    case = Case(dropout=dropout)
    _, _, da_ZKR, db_ZRN = case.expected()
    _, dx_TK = case.run(ops, input_needs_grad=False)
    assert dx_TK is None
    assert_same(case.operands.da_ZKR, da_ZKR)
    assert_same(case.operands.db_ZRN, db_ZRN)


@BACKENDS
def test_gradients_accumulate_over_passes(ops: ModuleType) -> None:
    case = Case()
    _, _, da_ZKR, db_ZRN = case.expected()
    case.run(ops)
    case.run(ops)
    assert_same(case.operands.da_ZKR, 2 * da_ZKR)
    assert_same(case.operands.db_ZRN, 2 * db_ZRN)


@BACKENDS
def test_a_gradient_of_any_stride_is_taken(ops: ModuleType) -> None:
    """``sum().backward()`` hands over an expanded scalar, a transposed consumer a transposed gradient."""
    case = Case()
    case.dy_TN = draw(9, N, sum(COUNTS)).T
    _, dx_TK, da_ZKR, _ = case.expected()
    _, found_dx = case.run(ops)
    assert_same(found_dx, dx_TK)
    assert_same(case.operands.da_ZKR, da_ZKR)


def test_input_and_upstream_gradient_are_not_written_to() -> None:
    case = Case(dropout=True)
    x_TK, dy_TN = case.x_TK.clone(), case.dy_TN.clone()
    case.run(torch_backend)
    assert torch.equal(case.x_TK, x_TK)
    assert torch.equal(case.dy_TN, dy_TN)


def test_unwritten_memory_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch backend leaves columns past a slot's rank unwritten; with NaN in them nothing changes."""
    expected = Case(dropout=True)
    y_TN, dx_TK, da_ZKR, db_ZRN = expected.expected()
    plain = Tensor.new_empty
    poisonings = 0

    def new_empty(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        nonlocal poisonings
        poisonings += 1
        return plain(self, *args, **kwargs).fill_(float("nan"))

    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    case = Case(dropout=True)
    found_y, found_dx = case.run(torch_backend)
    assert poisonings == 2, "the backend allocates s and ds in another way now; poison that"
    assert_same(found_y, y_TN)
    assert_same(found_dx, dx_TK)
    assert_same(case.operands.da_ZKR, da_ZKR)
    assert_same(case.operands.db_ZRN, db_ZRN)
