"""``grouped_lora_linear`` against autograd through a dense formula, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from adapter_groups import Group
from kernel_backends import BACKENDS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from alto.kernels import DropoutKey, TokenSchedule, grouped_lora_linear, torch_backend
from alto.kernels.dropout import dropout_factor
from alto.lora.linear import FrozenWeight

NUMBER, K = 5, 17
SLOTS, COUNTS, SCALES = (2, 0, 1, 3), (7, 1, 4, 6), (2.0, 0.5, 1.0, 3.0)
KEYS = (DropoutKey(0.4, 1, 2), None, DropoutKey(0.2, 3, 4), DropoutKey(0.5, 5, 6))
GROUPS = {
    "alone": ((20,), [[3], [0], [16], [1]]),
    "two": ((20, 20), [[3, 3], [0, 0], [16, 0], [1, 1]]),
    "three": ((20, 4, 9), [[3, 3, 0], [0, 0, 0], [16, 16, 16], [0, 1, 0]]),
}
"""Out-features of the members, and the rank of four slots on each."""


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Expected(NamedTuple):
    """Outputs and gradients by autograd."""

    ys: list[Tensor]
    dx_TK: Tensor
    grads_ZP: Tensor


class Case:
    """A group with four slots, one of which targets nothing, with tokens, and upstream gradients of all members.

    Attributes:
        x_TK: Input; a leaf that asks for its gradient.
        group: Its gradients start as zeros.
    """

    def __init__(self, members: str = "three", *, bias: bool = True, dropout: bool = False) -> None:
        out_features, ranks_ZM = GROUPS[members]
        self.keys = KEYS if dropout else (None,) * len(SLOTS)
        self.schedule = TokenSchedule.build(SLOTS, COUNTS, SCALES, self.keys)
        self.x_TK = draw(1, sum(COUNTS), K).requires_grad_()
        self.dys = [draw(2 + member, sum(COUNTS), n) for member, n in enumerate(out_features)]
        torch.manual_seed(6)
        bases = [nn.Linear(K, n, bias=bias, dtype=torch.float64) for n in out_features]
        self.bases = [base.requires_grad_(False) for base in bases]
        self.group = Group(ranks_ZM, in_features=K, out_features=out_features, number=NUMBER)
        self.grads_ZP = self.group.operands.grads_ZP.zero_()
        self.anchor = torch.zeros((), requires_grad=True)

    def forward(self, ops: ModuleType) -> tuple[Tensor, ...]:
        return grouped_lora_linear(
            self.x_TK, self.anchor, list(map(FrozenWeight, self.bases)), self.group.operands, self.schedule, ops
        )

    def run(self, ops: ModuleType) -> tuple[Tensor, ...]:
        """Return the outputs after a backward pass with ``dys`` as the gradients of all members' outputs."""
        ys = self.forward(ops)
        torch.autograd.backward(ys, self.dys)
        return ys

    def expected(self) -> Expected:
        x_TK = self.x_TK.detach().clone().requires_grad_()
        params_ZP = self.group.operands.params_ZP.clone().requires_grad_()
        a_ZMKR, bs = self.group.dense(params_ZP)
        slots_T = torch.tensor([slot for slot, count in zip(SLOTS, COUNTS, strict=True) for _ in range(count)])
        scales_T = torch.tensor([scale for scale, count in zip(SCALES, COUNTS, strict=True) for _ in range(count)])
        factors = [
            torch.ones(count, K) if key is None else dropout_factor(key, NUMBER, count, K, x_TK.device)
            for key, count in zip(self.keys, COUNTS, strict=True)
        ]
        s_TMR = torch.einsum("tk,tmkr->tmr", x_TK * torch.cat(factors), a_ZMKR[slots_T])
        ys = [
            F.linear(x_TK, base.weight, base.bias)
            + scales_T[:, None] * torch.einsum("tr,trn->tn", s_TMR[:, member], bs[member][slots_T])
            for member, base in enumerate(self.bases)
        ]
        torch.autograd.backward(ys, self.dys)
        assert x_TK.grad is not None
        assert params_ZP.grad is not None
        return Expected([y_TN.detach() for y_TN in ys], x_TK.grad, params_ZP.grad)

    def assert_gradients(self, expected: Expected, times: int = 1) -> None:
        assert_same(self.x_TK.grad, times * expected.dx_TK)
        assert_same(self.grads_ZP, times * expected.grads_ZP)


def assert_same(found: object, expected: object) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def detached(ys: Sequence[Tensor]) -> list[Tensor]:
    return [y_TN.detach() for y_TN in ys]


@BACKENDS
@pytest.mark.parametrize("members", GROUPS)
@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_outputs_and_all_gradients(ops: ModuleType, members: str, bias: bool, dropout: bool) -> None:
    case = Case(members, bias=bias, dropout=dropout)
    expected = case.expected()
    found = case.run(ops)
    assert_same(detached(found), expected.ys)
    case.assert_gradients(expected)


@BACKENDS
@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
def test_an_input_that_needs_no_gradient_still_gives_adapter_gradients(ops: ModuleType, dropout: bool) -> None:
    case = Case(dropout=dropout)
    expected = case.expected()
    case.x_TK.requires_grad_(False)
    case.run(ops)
    assert case.x_TK.grad is None
    assert_same(case.grads_ZP, expected.grads_ZP)


@BACKENDS
@pytest.mark.parametrize("unused", [0, 1, 2])
def test_a_member_whose_output_is_unused_adds_nothing(ops: ModuleType, unused: int) -> None:
    case = Case(dropout=True)
    case.dys[unused].zero_()
    expected = case.expected()
    pairs = [pair for member, pair in enumerate(zip(case.forward(ops), case.dys, strict=True)) if member != unused]
    torch.autograd.backward(*zip(*pairs, strict=True))
    case.assert_gradients(expected)


@BACKENDS
def test_gradients_accumulate_over_passes(ops: ModuleType) -> None:
    case = Case()
    expected = case.expected()
    case.run(ops)
    case.run(ops)
    case.assert_gradients(expected, times=2)


@BACKENDS
@pytest.mark.parametrize(
    "other",
    [lambda dy_TN: dy_TN.T.contiguous().T, lambda dy_TN: dy_TN[:1, :1].expand_as(dy_TN)],
    ids=["transposed", "expanded"],
)
def test_gradients_of_any_stride_are_taken(ops: ModuleType, other: Callable[[Tensor], Tensor]) -> None:
    """``sum().backward()`` passes an expanded scalar, a transposed consumer a transposed gradient."""
    case = Case()
    case.dys = [other(dy_TN) for dy_TN in case.dys]
    expected = case.expected()
    case.run(ops)
    case.assert_gradients(expected)


@BACKENDS
def test_an_input_of_any_stride_is_taken(ops: ModuleType) -> None:
    case = Case()
    case.x_TK = case.x_TK.detach().T.contiguous().T.requires_grad_()
    expected = case.expected()
    assert_same(detached(case.run(ops)), expected.ys)
    case.assert_gradients(expected)


@BACKENDS
def test_a_checkpointed_pass_gives_the_same_and_counts_once(ops: ModuleType) -> None:
    """Forward runs again inside backward, with the same masks, and does not add to a gradient itself."""
    case = Case(dropout=True)
    expected = case.expected()
    found = checkpoint(case.forward, ops, use_reentrant=False)
    torch.autograd.backward(found, case.dys)
    assert_same(detached(found), expected.ys)
    case.assert_gradients(expected)


@BACKENDS
def test_without_autograd_it_is_the_forward_pass_alone(ops: ModuleType) -> None:
    case = Case(dropout=True)
    expected = case.expected()
    with torch.no_grad():
        found = case.forward(ops)
    assert not any(y_TN.requires_grad for y_TN in found)
    assert_same(detached(found), expected.ys)


@BACKENDS
def test_inputs_gradients_and_weights_are_not_written_to(ops: ModuleType) -> None:
    case = Case(dropout=True)
    inputs: Sequence[Tensor] = (
        case.x_TK,
        *case.dys,
        *(parameter for base in case.bases for parameter in base.parameters()),
    )
    before = [tensor.detach().clone() for tensor in inputs]
    params_ZP = case.group.operands.params_ZP.clone()
    case.run(ops)
    assert all(torch.equal(one, other) for one, other in zip(inputs, before, strict=True))
    torch.testing.assert_close(case.group.operands.params_ZP, params_ZP, rtol=0, atol=0, equal_nan=True)
    assert all(base.weight.grad is None for base in case.bases)
    assert case.anchor.grad is None


def test_unwritten_memory_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch backend leaves columns past a slot's own unwritten; NaN in them changes nothing."""
    expected = Case(dropout=True).expected()
    plain = Tensor.new_empty
    poisonings = 0

    def new_empty(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        nonlocal poisonings
        poisonings += 1
        return plain(self, *args, **kwargs).fill_(float("nan"))

    case = Case(dropout=True)
    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    found = case.run(torch_backend)
    assert poisonings == 2 + len(found), "s, ds and outputs are allocated in another way now; poison that"
    assert_same(detached(found), expected.ys)
    case.assert_gradients(expected)


@BACKENDS
def test_tokens_of_no_job_go_through_the_frozen_layers_only(ops: ModuleType) -> None:
    case = Case()
    case.schedule = TokenSchedule.build((), (), ())
    x_TK = case.x_TK.detach().clone().requires_grad_()
    frozen = tuple(base(x_TK) for base in case.bases)
    torch.autograd.backward(frozen, case.dys)
    ys = case.run(ops)
    assert all(torch.equal(y_TN, expected) for y_TN, expected in zip(ys, frozen, strict=True))
    assert_same(case.x_TK.grad, x_TK.grad)
    assert not case.grads_ZP.any()
