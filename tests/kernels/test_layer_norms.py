"""``rms_norm`` kernels against the reference in float64, outputs and gradients."""

from __future__ import annotations

import pytest
import torch
from layer_kernels import TOLERANCES, functions, on_device
from torch import Tensor

from alto.kernels.layer_reference import NormKind, rms_norm

KINDS = pytest.mark.parametrize("kind", list(NormKind))
EPSILON = 1e-6
SHAPES = [(1, 32), (7, 33), (2, 5, 16), (1, 3, 4, 128), (3, 5), (130, 64), (2, 2048), (1, 5000)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Draw numbers that are exact in every dtype, with rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-16, 17, shape, generator=generator).double() / 16
    x[..., 0, :] *= 2.0**-10  # its mean square is about epsilon
    return x


def both(x: Tensor, weight_H: Tensor, dy: Tensor, kind: NormKind, epsilon: float = EPSILON) -> tuple[Tensor, Tensor]:
    x, weight_H, dy = on_device(x), on_device(weight_H), on_device(dy)
    y = functions().rms_norm(x.requires_grad_(), weight_H, epsilon, kind)
    [dx] = torch.autograd.grad(y, x, dy)
    return y.detach().cpu(), dx.cpu()


def expected(x: Tensor, weight_H: Tensor, dy: Tensor, kind: NormKind) -> tuple[Tensor, Tensor]:
    x = x.detach().double().requires_grad_()
    y = rms_norm(x, weight_H.double(), EPSILON, kind)
    return y.detach(), torch.autograd.grad(y, x, dy.double())[0]


def is_near(found: Tensor, right: Tensor, limit: float) -> bool:
    """Return whether all rows agree, relative to the largest number in each row."""
    largest = right.abs().amax(-1, keepdim=True)
    return bool(((found.double() - right).abs() <= limit * largest).all())


@KINDS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "limit"), TOLERANCES, ids=str)
def test_outputs_and_gradients_are_those_of_the_reference(
    kind: NormKind, shape: tuple[int, ...], dtype: torch.dtype, limit: float
) -> None:
    x, dy = draw(*shape).to(dtype), draw(*shape, seed=1).to(dtype)
    weight_H = (draw(2, shape[-1], seed=2)[1] + 1.0).to(dtype)
    for found, right in zip(both(x, weight_H, dy, kind), expected(x, weight_H, dy, kind), strict=True):
        assert found.dtype == dtype
        assert found.shape == shape
        assert is_near(found, right, limit)


@KINDS
def test_a_wrong_epsilon_or_kind_shows(kind: NormKind) -> None:
    x, dy, weight_H = draw(3, 64), draw(3, 64, seed=1), draw(2, 64, seed=2)[1] + 1.0
    right = expected(x, weight_H, dy, kind)
    wrong = {"epsilon": both(x, weight_H, dy, kind, 1.1 * EPSILON), "zeros": (torch.zeros_like(x),) * 2}
    if kind is not NormKind.ONE_PLUS:
        wrong["kind"] = both(x, weight_H, dy, NormKind.ONE_PLUS)
    for name, found in wrong.items():
        assert not any(is_near(one, other, 1e-6) for one, other in zip(found, right, strict=True)), name


def test_kinds_differ_by_what_is_rounded_in_16_bits() -> None:
    x, weight_H = draw(40, 256).bfloat16(), (draw(2, 256, seed=2)[1] / 3 + 1).bfloat16()
    rounded, wide = (both(x, weight_H, x, kind)[0] for kind in (NormKind.ROUNDED, NormKind.FLOAT32))
    assert 0.02 < (rounded != wide).float().mean() < 0.9
    torch.testing.assert_close(rounded, wide, rtol=2**-6, atol=0)


@KINDS
def test_rows_that_are_no_neighbours_are_read_where_they_are(kind: NormKind) -> None:
    wide = draw(6, 3, 80)
    weight_H = draw(2, 40, seed=2)[1]
    for x in (wide[..., 40:], wide[::2, :, :40], wide[..., ::2], wide.transpose(0, 1)[..., :40]):
        dy = torch.randn(x.shape[::-1], dtype=torch.float64).permute(2, 1, 0)
        for found, right in zip(both(x, weight_H, dy, kind), expected(x, weight_H, dy, kind), strict=True):
            assert is_near(found, right, 1e-13)


@KINDS
@pytest.mark.filterwarnings("ignore:invalid value")  # raised by NumPy, in the interpreter
def test_a_row_depends_on_itself_alone(kind: NormKind) -> None:
    x, dy, weight_H = (draw(*shape).float() for shape in ((37, 48), (37, 48), (2, 48)))
    whole = both(x, weight_H[1], dy, kind)
    poisoned = x.clone()
    poisoned[4], poisoned[9] = float("nan"), float("inf")
    others = [row for row in range(37) if row not in (4, 9)]
    for found in (both(poisoned, weight_H[1], dy, kind), both(x[5:], weight_H[1], dy[5:], kind)):
        for one, other in zip(found, whole, strict=True):
            rows = others if len(one) == 37 else slice(None)
            assert torch.equal(one[rows], (other if len(one) == 37 else other[5:])[rows])
    assert both(poisoned, weight_H[1], dy, kind)[0][4].isnan().all()


def test_no_rows_give_no_results() -> None:
    y, dx = both(torch.zeros(0, 8), torch.ones(8), torch.zeros(0, 8), NormKind.ROUNDED)
    assert y.shape == dx.shape == (0, 8)
