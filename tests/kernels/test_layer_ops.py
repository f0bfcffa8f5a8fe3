"""``swiglu``, ``rotary`` and ``cross_entropy`` kernels against the reference in float64, outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from layer_kernels import TOLERANCES, functions, on_device
from torch import Tensor

from alto.kernels import layer_reference, layer_triton

NAN = float("nan")
DTYPES = pytest.mark.parametrize(("dtype", "limit"), TOLERANCES, ids=str)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Draw numbers that are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-24, 25, shape, generator=generator).double() / 8


def results(function: Callable[..., Any], inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of ``function``, and the gradients for its first one or two inputs."""
    leaves = [on_device(x).requires_grad_() for x in inputs[:2]]
    outputs = function(*leaves, *map(on_device, inputs[2:]))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    found = torch.autograd.grad(outputs, leaves, [on_device(gradient) for gradient in gradients])
    return [x.detach().cpu() for x in (*outputs, *found)]


def is_near(found: Tensor, right: Tensor, limit: float) -> bool:
    """Return whether both agree, relative to the largest number in each row."""
    largest = right.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return found.shape == right.shape and bool(((found.double() - right).abs() <= limit * largest).all())


def assert_near(found: Sequence[Tensor], right: Sequence[Tensor], limit: float) -> None:
    assert len(found) == len(right)
    for number, (one, other) in enumerate(zip(found, right, strict=True)):
        assert is_near(one, other, limit), number


class TestSwiglu:
    SHAPES: ClassVar = [(1, 16), (5, 33), (2, 3, 7), (1, 3, 1500), (2, 2048)]

    @DTYPES
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_outputs_and_gradients(self, shape: tuple[int, ...], dtype: torch.dtype, limit: float) -> None:
        inputs = [draw(*shape, seed=seed).to(dtype) for seed in range(2)]
        dy = draw(*shape, seed=2).to(dtype)
        found = results(functions().swiglu, inputs, [dy])
        assert {x.dtype for x in found} == {dtype}
        right = results(layer_reference.swiglu, [x.double() for x in inputs], [dy.double()])
        assert_near(found, right, limit)

    def test_a_wrong_gate_shows(self) -> None:
        gate, up, dy = (draw(3, 40, seed=seed) for seed in range(3))
        right = results(layer_reference.swiglu, [gate, up], [dy])
        wrong = results(functions().swiglu, [up, gate], [dy])
        assert not any(is_near(one, other, 1e-3) for one, other in zip(wrong, right, strict=True))

    def test_halves_of_one_tensor_are_read_where_they_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        both, dy = draw(6, 2 * 1040), draw(1040, 6, seed=1).T
        gate, up = both.chunk(2, dim=-1)
        assert not gate.is_contiguous()
        assert_near(
            results(functions().swiglu, [gate, up], [dy]), results(layer_reference.swiglu, [gate, up], [dy]), 1e-13
        )
        given: list[Any] = []
        monkeypatch.setattr(layer_triton, "launch", lambda _, __, tensors, sizes, *rest: given.append((tensors, sizes)))
        layer_triton.swiglu(gate, up)
        [((gate_TI, up_TI, _), sizes)] = given
        assert (gate_TI.data_ptr(), up_TI.data_ptr()) == (gate.data_ptr(), up.data_ptr())
        assert sizes == (2080, 2080, 1040)

    @pytest.mark.filterwarnings("ignore:overflow")  # raised by NumPy, in the interpreter
    def test_large_gates_do_not_overflow(self) -> None:
        gate = torch.tensor([[-1e4, -200.0, -90.0, 0.0, 90.0, 200.0, 1e4]])
        found = results(functions().swiglu, [gate, torch.ones_like(gate)], [torch.ones_like(gate)])
        right = results(layer_reference.swiglu, [gate.double(), torch.ones(1, 7).double()], [torch.ones(1, 7).double()])
        assert_near(found, right, 1e-6)


class TestRotary:
    CASES: ClassVar = [(1, 1, 1, 2, 2), (3, 4, 2, 5, 16), (1, 12, 3, 7, 80), (2, 32, 1, 1, 128), (1, 3, 3, 9, 96)]
    """Rows, heads of queries and of keys, tokens, head size."""

    def inputs(self, case: tuple[int, ...], dtype: torch.dtype, angles: torch.dtype) -> list[Tensor]:
        """Return queries and keys as transformers' attention has them, token by token; the angles' halves differ."""
        rows, num_q, num_k, tokens, width = case
        q, k = (draw(rows, tokens, heads, width, seed=heads).to(dtype).transpose(1, 2) for heads in (num_q, num_k))
        return [q, k, *(draw(rows, tokens, width, seed=90 + n).to(angles) / 4 for n in range(2))]

    @DTYPES
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_outputs_and_gradients(self, case: tuple[int, ...], dtype: torch.dtype, limit: float) -> None:
        inputs = self.inputs(case, dtype, dtype)
        gradients = [x.roll(1, -1) for x in inputs[:2]]
        found = results(functions().rotary, inputs, gradients)
        assert {x.dtype for x in found} == {dtype}
        right = results(layer_reference.rotary, [x.double() for x in inputs], [x.double() for x in gradients])
        assert_near(found, right, limit)

    def test_the_roundings_are_those_of_pytorch(self) -> None:
        if not torch.cuda.is_available():
            pytest.skip("the interpreter cuts off what the compiler rounds")
        for angles in (torch.bfloat16, torch.float32):
            inputs = self.inputs((1, 32, 8, 50, 128), torch.bfloat16, angles)
            gradients = [x.roll(1, -1) for x in inputs[:2]]
            found, own = (results(ops.rotary, inputs, gradients) for ops in (functions(), layer_reference))
            for one, other in zip(found, own, strict=True):
                assert torch.equal(one, other)

    def test_with_angles_of_float32_it_is_rounded_once(self) -> None:
        inputs = self.inputs((1, 4, 2, 40, 64), torch.bfloat16, torch.float32)
        found = results(functions().rotary, inputs, inputs[:2])[:2]
        right = layer_reference.rotary(*(x.double() for x in inputs))
        for one, other in zip(found, right, strict=True):
            # The interpreter truncates; rounded products would differ by up to twice as much.
            assert ((one.double() - other).abs() <= 2.0**-7 * other.abs() + 1e-5).all()

    @pytest.mark.parametrize("swap", ["cos and sin", "halves", "neighbours"])
    def test_a_wrong_rotation_shows(self, swap: str) -> None:
        q, k, cos, sin = self.inputs((1, 4, 2, 6, 16), torch.float64, torch.float64)
        right = results(layer_reference.rotary, [q, k, cos, sin], [q, k])
        if swap == "cos and sin":
            cos, sin = sin, cos
        elif swap == "halves":
            cos, sin = cos.roll(8, -1), sin.roll(8, -1)
        else:
            cos, sin = cos.roll(1, 1), sin.roll(1, 1)
        wrong = results(functions().rotary, [q, k, cos, sin], [q, k])
        assert not any(is_near(one, other, 1e-3) for one, other in zip(wrong, right, strict=True))

    @pytest.mark.parametrize("layout", ["heads first", "part of a head", "one row of angles", "every second number"])
    def test_every_layout(self, layout: str) -> None:
        q, k, cos, sin = self.inputs((2, 4, 2, 6, 32), torch.float64, torch.float64)
        if layout == "heads first":
            q, k = q.contiguous(), k.contiguous()
        elif layout == "part of a head":
            q, k, cos, sin = (x[..., :16] for x in (q, k, cos, sin))
        elif layout == "one row of angles":
            cos, sin = cos[:1], sin[:1]
        else:
            q, k, cos, sin = (x[..., ::2] for x in (q, k, cos, sin))
        inputs, gradients = [q, k, cos, sin], [q.roll(1, -1), k.roll(1, -1).contiguous()]
        assert_near(
            results(functions().rotary, inputs, gradients), results(layer_reference.rotary, inputs, gradients), 1e-13
        )

    def test_a_token_depends_on_itself_alone(self) -> None:
        inputs = self.inputs((1, 5, 2, 9, 24), torch.float32, torch.float32)
        whole = results(functions().rotary, inputs, inputs[:2])
        poisoned = [inputs[0].clone(), inputs[1].clone(), *inputs[2:]]
        poisoned[0][:, :, 3], poisoned[1][:, :, 3] = NAN, NAN
        found = results(functions().rotary, poisoned, poisoned[:2])
        for one, other in zip(found, whole, strict=True):
            assert one[:, :, 3].isnan().all()
            assert torch.equal(one[:, :, [0, 1, 2, *range(4, 9)]], other[:, :, [0, 1, 2, *range(4, 9)]])


class TestCrossEntropy:
    SHAPES: ClassVar = [(1, 2), (7, 97), (3, 4096), (2, 9001), (1, 4097)]

    def found(self, logits_CV: Tensor, targets_C: Tensor, *, in_place: bool = True) -> tuple[Tensor, Tensor]:
        """Return the losses and the gradient, which is written over the logits or elsewhere."""
        logits_CV = on_device(logits_CV).clone()
        gradient_CV = logits_CV if in_place else torch.full_like(logits_CV, NAN, dtype=torch.float32)
        before = logits_CV.clone()
        losses_C = functions().cross_entropy(logits_CV, targets_C.to(logits_CV.device), gradient_CV)
        assert in_place or torch.equal(logits_CV, before)
        return losses_C.cpu(), gradient_CV.cpu()

    def right(self, logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        gradient_CV = logits_CV.double().clone()
        return layer_reference.cross_entropy(logits_CV.double(), targets_C, gradient_CV), gradient_CV

    def targets(self, num_tokens: int, width: int) -> Tensor:
        """Return the first and the last token of a vocabulary, and others."""
        return torch.tensor([width - 1, 0, *range(5, 5 + num_tokens)])[:num_tokens] % width

    @DTYPES
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("in_place", [True, False])
    def test_losses_and_gradients(
        self, shape: tuple[int, int], in_place: bool, dtype: torch.dtype, limit: float
    ) -> None:
        logits_CV, targets_C = (4 * draw(*shape)).to(dtype), self.targets(*shape)
        losses_C, gradient_CV = self.found(logits_CV, targets_C, in_place=in_place)
        expected = self.right(logits_CV, targets_C)
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        assert losses_C.dtype == exact
        assert gradient_CV.dtype == (dtype if in_place else torch.float32)
        assert (losses_C.double() - expected[0]).abs().max() <= (1e-12 if exact == torch.float64 else 3e-5)
        limit = limit if in_place else max(limit, 3e-6)
        largest = expected[1].abs().amax(-1, keepdim=True)
        # Subtracting 1 from a probability of almost 1 leaves the rounding of numbers near 1.
        rounding = 4 * torch.finfo(exact).eps
        assert ((gradient_CV.double() - expected[1]).abs() <= limit * largest + rounding).all()

    def test_without_a_gradient_logits_are_left_as_they_are(self) -> None:
        logits_CV, targets_C = on_device(draw(5, 300)).clone(), self.targets(5, 300)
        before = logits_CV.clone()
        losses_C = functions().cross_entropy(logits_CV, targets_C.to(logits_CV.device))
        assert torch.equal(logits_CV, before)
        torch.testing.assert_close(losses_C.cpu(), self.right(before.cpu(), targets_C)[0], rtol=1e-12, atol=1e-12)

    def test_a_wrong_target_shows(self) -> None:
        logits_CV, targets_C = draw(6, 128), self.targets(6, 128)
        right, wrong = self.right(logits_CV, targets_C), self.found(logits_CV, targets_C.roll(1))
        assert not torch.allclose(wrong[0], right[0], rtol=1e-2)
        assert not is_near(wrong[1], right[1], 1e-2)

    @pytest.mark.filterwarnings("ignore:invalid value")  # raised by NumPy, in the interpreter
    def test_a_token_depends_on_itself_alone(self) -> None:
        logits_CV, targets_C = draw(6, 5000).float(), self.targets(6, 5000)
        whole = self.found(logits_CV, targets_C)
        poisoned = logits_CV.clone()
        poisoned[2, 4500] = NAN
        found = self.found(poisoned, targets_C)
        for one, other in zip(found, whole, strict=True):
            assert one[2].isnan().all()
            assert torch.equal(one[[0, 1, 3, 4, 5]], other[[0, 1, 3, 4, 5]])
        alone = self.found(logits_CV[3:4], targets_C[3:4])
        assert all(torch.equal(one, other[3:4]) for one, other in zip(alone, whole, strict=True))

    def test_logits_of_minus_infinity_have_no_probability(self) -> None:
        logits_CV, targets_C = draw(2, 9000), torch.tensor([8999, 4999])
        logits_CV[:, :4999] = -float("inf")  # more than a block
        losses_C, gradient_CV = self.found(logits_CV, targets_C)
        expected = self.right(logits_CV, targets_C)
        torch.testing.assert_close(losses_C, expected[0], rtol=1e-12, atol=1e-12)
        assert is_near(gradient_CV, expected[1], 1e-12)
        assert not gradient_CV[:, :4999].any()

    def test_rows_of_a_wider_tensor(self) -> None:
        logits_CV, targets_C = draw(4, 700)[:, 100:612], self.targets(4, 512)
        expected = self.right(logits_CV, targets_C)
        gradient_CV = torch.full((4, 600), NAN, dtype=torch.float64)
        on = on_device(gradient_CV)
        losses_C = functions().cross_entropy(on_device(logits_CV), targets_C.to(on.device), on[:, :512])
        torch.testing.assert_close(losses_C.cpu(), expected[0], rtol=1e-12, atol=1e-12)
        assert is_near(on[:, :512].cpu(), expected[1], 1e-12)
        assert on[:, 512:].isnan().all()


def test_no_tokens_give_no_results() -> None:
    empty = torch.zeros(0, 8)
    assert [x.shape for x in results(functions().swiglu, [empty, empty], [empty])] == [(0, 8)] * 3
    heads, angles = torch.zeros(1, 2, 0, 8), torch.zeros(1, 0, 8)
    found = results(functions().rotary, [heads, heads, angles, angles], [heads, heads])
    assert [x.shape for x in found] == [(1, 2, 0, 8)] * 4
    assert functions().cross_entropy(on_device(empty), on_device(torch.zeros(0)).long(), None).shape == (0,)
