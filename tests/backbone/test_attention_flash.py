"""Which attention serves whom, and what we ask of PyTorch's kernels; what they compute is in ``test_attention``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import flash_fakes
import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedModel

from alto.backbone import Backbone, attention, flash
from alto.backbone.flash import FlashKernel, Scores, find_kernel, flash_attn_kernel, installed_kernels, torch_kernel
from alto.backbone.sequences import Sequences

FLASH_ATTN = flash_attn_kernel(flash_fakes.flash_attn_varlen_func)
TORCH = torch_kernel(flash_fakes.varlen_attn, flash_fakes.flash_attention_backward)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
AMPERE, HOPPER, TURING = (8, 0), (9, 0), (7, 5)


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "head_sizes", "softcap", "with_package", "without_package"),
    [
        ("cuda", HOPPER, BF16, (128, 128), None, FLASH_ATTN, TORCH),
        ("cuda", AMPERE, FP16, (64, 64), None, FLASH_ATTN, TORCH),
        ("cuda", HOPPER, BF16, (256, 256), None, FLASH_ATTN, TORCH),
        ("cuda", HOPPER, BF16, (256, 256), 50.0, FLASH_ATTN, None),
        ("cuda", HOPPER, BF16, (264, 264), None, None, None),
        ("cuda", HOPPER, BF16, (100, 100), None, None, None),
        ("cuda", HOPPER, BF16, (192, 128), None, None, None),
        ("cuda", HOPPER, FP32, (128, 128), None, None, None),
        ("cuda", TURING, FP16, (128, 128), None, None, None),
        ("cpu", HOPPER, BF16, (128, 128), None, None, None),
    ],
)
def test_who_serves_whom(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_sizes: tuple[int, int],
    softcap: float | None,
    with_package: FlashKernel | None,
    without_package: FlashKernel | None,
) -> None:
    q, v = (
        SimpleNamespace(device=torch.device(device), dtype=dtype, shape=torch.Size([7, 4, size])) for size in head_sizes
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    for kernels, expected in (((FLASH_ATTN, TORCH), with_package), ((TORCH,), without_package)):
        monkeypatch.setattr(flash, "installed_kernels", lambda kernels=kernels: kernels)
        assert find_kernel(q, v, softcap=softcap) is expected


def test_pytorchs_kernel_is_always_there() -> None:
    assert not installed_kernels()[-1].can_cap


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("prefixes", [None, [0, 2]])
def test_the_real_functions_take_what_they_are_given(window: int | None, prefixes: list[int] | None) -> None:
    kernel = torch_kernel(varlen_attn, torch.ops.aten._flash_attention_backward)
    q, k, v = (torch.empty(8, heads, 16, dtype=BF16, device="meta", requires_grad=True) for heads in (4, 2, 2))
    output = kernel.attend(q, k, v, Sequences([3, 5], prefixes), Scores(0.3, window))
    gradients = torch.autograd.grad(output, (q, k, v), torch.empty_like(output))
    assert [gradient.shape for gradient in (output, *gradients)] == [q.shape, q.shape, k.shape, v.shape]


@pytest.mark.parametrize("fails", [False, True])
def test_determinism_is_asked_of_the_backward_pass_alone(fails: bool) -> None:
    modes = []

    def backward(*args: Any, **settings: Any) -> Any:
        modes.append((torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory))
        if fails:
            raise torch.OutOfMemoryError
        return flash_fakes.flash_attention_backward(*args, **settings)

    kernel = torch_kernel(flash_fakes.varlen_attn, backward)
    q, k, v = (torch.ones(8, 4, 16, requires_grad=True) for _ in range(3))
    output = kernel.attend(q, k, v, Sequences([3, 5]), Scores(0.3))
    assert torch.get_deterministic_debug_mode() == 0
    if fails:
        with pytest.raises(torch.OutOfMemoryError):
            output.sum().backward()
    else:
        output.sum().backward()
    assert modes == [(2, False)]
    assert torch.get_deterministic_debug_mode() == 0
    assert torch.utils.deterministic.fill_uninitialized_memory


class Watched:
    """Gives everyone the same kernel and counts its calls and the different offsets they read."""

    def __init__(self, kernel: FlashKernel) -> None:
        self._kernel = kernel
        self.calls = 0
        self.offsets: dict[int, Tensor] = {}  # by id; kept, so that no id is used twice

    def find(self, *_: Tensor, softcap: float | None) -> FlashKernel:
        return FlashKernel(attend=self._attend, can_cap=True)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scores: Scores) -> Tensor:
        self.calls += 1
        offsets = sequences.offsets(q.device)
        self.offsets[id(offsets)] = offsets
        return self._kernel.attend(q, k, v, sequences, scores)


@pytest.fixture(params=[FLASH_ATTN, TORCH], ids=["flash-attn", "torch"])
def watched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watched = Watched(request.param)
    monkeypatch.setattr(attention, "find_kernel", watched.find)
    return watched


@pytest.mark.parametrize("architecture", ["llama", "gemma2-plain-attention", "mistral"])
def test_a_whole_model_on_a_kernel(
    tiny_model: Callable[..., PreTrainedModel], watched: Watched, architecture: str
) -> None:
    backbone = Backbone(tiny_model(architecture), None, "tiny")  # compares its losses with the model's own
    # Three passes: one whose losses are compared, and two in which a row, or half of one, has other tokens.
    assert watched.calls == 3 * backbone.model.config.num_hidden_layers
    assert len(watched.offsets) == 3
