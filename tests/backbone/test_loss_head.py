"""The chunked loss head against ``F.cross_entropy``: values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_kernels import functions
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from alto.backbone import output_head
from alto.backbone.output_head import token_losses

VOCABULARY, HIDDEN = 23, 11


def operands(num_tokens: int, *, bias: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return hidden states that need a gradient, weight, targets and bias; the logits are a few nats."""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden_SH = torch.randn(num_tokens, HIDDEN, generator=generator).requires_grad_()
    weight_VH = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    targets_S = torch.randint(0, VOCABULARY, (num_tokens,), generator=generator)
    return hidden_SH, weight_VH, targets_S, torch.randn(VOCABULARY, generator=generator) if bias else None


def dense(
    hidden_SH: Tensor, weight_VH: Tensor, targets_S: Tensor, bias_V: Tensor | None, softcap: float | None
) -> Tensor:
    logits = F.linear(hidden_SH.double(), weight_VH.double(), bias_V.double() if bias_V is not None else None)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets_S, reduction="none")


# Chunks that divide the tokens, that leave a remainder, of one token, and of more tokens than there are.
@given(
    num_tokens=st.integers(1, 12),
    chunk=st.integers(1, 14),
    bias=st.booleans(),
    softcap=st.sampled_from([None, 2.0, 30.0]),
)
def test_losses_and_gradients(num_tokens: int, chunk: int, bias: bool, softcap: float | None) -> None:
    hidden_SH, weight_VH, targets_S, bias_V = operands(num_tokens, bias=bias)
    upstream_S = torch.linspace(-1.0, 2.0, num_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_head, "_chunk_tokens", lambda *_: chunk)
        found = token_losses(hidden_SH, weight_VH, targets_S, bias_V=bias_V, softcap=softcap)
    (gradient,) = torch.autograd.grad(found, hidden_SH, upstream_S)
    expected = dense(hidden_SH, weight_VH, targets_S, bias_V, softcap)
    (expected_gradient,) = torch.autograd.grad(expected, hidden_SH, upstream_S.double())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mistake", ["no softcap", "no bias", "shifted targets", "zeros"])
def test_the_comparison_bites(mistake: str) -> None:
    hidden_SH, weight_VH, targets_S, bias_V = operands(9, bias=True)
    expected = dense(hidden_SH, weight_VH, targets_S, bias_V, 2.0)
    found = token_losses(
        hidden_SH * (mistake != "zeros"),
        weight_VH,
        targets_S.roll(int(mistake == "shifted targets")),
        bias_V=None if mistake == "no bias" else bias_V,
        softcap=None if mistake == "no softcap" else 2.0,
    )
    assert float((found - expected).detach().norm() / expected.detach().norm()) > 1e-2


def test_a_chunk_boundary_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_SH, weight_VH, targets_S, _ = operands(8, bias=False)
    whole = token_losses(hidden_SH, weight_VH, targets_S)
    calls = []
    plain = F.linear
    monkeypatch.setattr(output_head.F, "linear", lambda x, *rest: calls.append(x.shape[0]) or plain(x, *rest))
    monkeypatch.setattr(output_head, "_chunk_tokens", lambda *_: 3)
    chunked = token_losses(hidden_SH, weight_VH, targets_S)
    assert calls == [3, 3, 2]
    torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("device", "vocabulary", "tokens"),
    [("cpu", 2048, 1024), ("cpu", 151_936, 128), ("cuda", 128_256, 523), ("cuda", 2048, 32_768)],
)
def test_tokens_of_a_chunk(device: str, vocabulary: int, tokens: int) -> None:
    assert output_head._chunk_tokens(device, vocabulary) == tokens


class LargestResult(TorchDispatchMode):
    """Records in ``largest`` the most elements that the result of any op has."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor) and not func.is_view:
                self.largest = max(self.largest, tensor.numel())
        return result


def test_nothing_is_larger_than_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_head, "_chunk_tokens", lambda *_: 3)
    hidden_SH, weight_VH, targets_S, bias_V = operands(6, bias=True)  # so few tokens that [V, H] is the largest tensor
    weight_VH.requires_grad_()
    with LargestResult() as watched:
        token_losses(hidden_SH, weight_VH, targets_S, bias_V=bias_V, softcap=2.0).sum().backward()
    assert watched.largest == 3 * VOCABULARY


def test_no_tokens_give_no_losses() -> None:
    hidden_SH, weight_VH, targets_S, _ = operands(4, bias=False)
    found = token_losses(hidden_SH[:0], weight_VH, targets_S[:0])
    assert found.shape == (0,)
    assert found.dtype == torch.float32


def test_logits_far_out_do_not_overflow() -> None:
    hidden_SH, weight_VH, targets_S, _ = operands(5, bias=False)
    found = token_losses(hidden_SH * 1e4, weight_VH, targets_S)
    assert found.isfinite().all()
    torch.testing.assert_close(
        found.double(), dense(hidden_SH * 1e4, weight_VH, targets_S, None, None), rtol=1e-5, atol=1e-2
    )


def test_nan_of_one_token_leaves_every_bit_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_head, "_chunk_tokens", lambda *_: 3)
    results = []
    for poison in (False, True):
        hidden_SH, weight_VH, targets_S, _ = operands(8, bias=False)
        with torch.no_grad():
            if poison:
                hidden_SH[4] = float("nan")
        losses = token_losses(hidden_SH, weight_VH, targets_S)
        losses.sum().backward()
        results.append((losses.detach(), hidden_SH.grad))
    others = [0, 1, 2, 3, 5, 6, 7]
    assert results[1][0][4].isnan()
    assert all(torch.equal(clean[others], beside[others]) for clean, beside in zip(*results, strict=True))


def test_the_frozen_head_gets_no_gradient_and_nothing_is_computed_without_need() -> None:
    hidden_SH, weight_VH, targets_S, bias_V = operands(6, bias=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_head.torch, "mm", None)  # forms the gradient
        losses = token_losses(hidden_SH.detach(), weight_VH, targets_S, bias_V=bias_V)
    assert not losses.requires_grad
    weight_VH.requires_grad_()
    token_losses(hidden_SH, weight_VH, targets_S).sum().backward()
    assert weight_VH.grad is None
    assert hidden_SH.grad is not None


def test_a_bfloat16_model_gets_float32_losses() -> None:
    hidden_SH, weight_VH, targets_S, _ = operands(12, bias=False)
    hidden = hidden_SH.detach().bfloat16().requires_grad_()
    weight = weight_VH.bfloat16()
    found = token_losses(hidden, weight, targets_S)
    found.sum().backward()
    expected = F.cross_entropy(F.linear(hidden, weight).double(), targets_S, reduction="none")  # rounded logits
    assert found.dtype == torch.float32
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    assert float((found - expected).detach().norm() / expected.detach().norm()) < 1e-6


class TestKernel:
    """Losses and gradients by a kernel, which is slow in Triton's interpreter."""

    @pytest.mark.parametrize("chunk", [3, 8, 20])
    @pytest.mark.parametrize("bias", [False, True])
    def test_they_are_those_of_pytorch(self, chunk: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(output_head, "_chunk_tokens", lambda *_: chunk)
        hidden_SH, weight_VH, targets_S, bias_V = operands(8, bias=bias)
        upstream_S = torch.linspace(-1.0, 2.0, 8)
        own, found = (
            token_losses(hidden_SH, weight_VH, targets_S, bias_V=bias_V, kernel=kernel)
            for kernel in (None, functions().cross_entropy)
        )
        gradients = [torch.autograd.grad(losses_S, hidden_SH, upstream_S)[0] for losses_S in (own, found)]
        torch.testing.assert_close(found, own, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)

    def test_logits_are_read_by_it_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hidden_SH, weight_VH, targets_S, _ = operands(8, bias=False)
        kernel, in_place = functions().cross_entropy, []
        monkeypatch.setattr(output_head.F, "log_softmax", None)

        def watched(logits_CV: Tensor, targets_C: Tensor, gradient_CV: Tensor | None) -> Tensor:
            in_place.append(gradient_CV is logits_CV)
            return kernel(logits_CV, targets_C, gradient_CV)

        token_losses(hidden_SH, weight_VH, targets_S, kernel=watched).sum().backward()
        token_losses(hidden_SH.detach(), weight_VH, targets_S, kernel=watched)
        assert in_place == [True, False], "a needed gradient is written over the logits"

    def test_no_kernel_computes_a_cap_or_a_scale(self) -> None:
        hidden_SH, weight_VH, targets_S, _ = operands(8, bias=False)
        for settings in ({"scale": 2.0}, {"softcap": 2.0}):
            with pytest.raises(AssertionError):
                token_losses(hidden_SH, weight_VH, targets_S, kernel=functions().cross_entropy, **settings)
