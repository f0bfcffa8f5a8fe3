"""Attention without padding: each implementation against one masked softmax, and the choice of the implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import flash_fakes
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedModel

from alto.backbone import Backbone, attention, flash
from alto.backbone.attention import Pattern, has_chunks, sdpa_attention, set_pattern
from alto.backbone.flash import FlashKernel, Scores, find_kernel, flash_attn_kernel, installed_kernels, torch_kernel
from alto.backbone.sequences import Sequences

HEADS, GROUPS, HEAD_SIZE, SCALE = 4, 2, 16, 0.3
LENGTHS = [5, 1, 9, 3]
PREFIXES = [0, 5, 0, 4]
"""Prefix lengths of the two pairs: the whole preceding sequence, and a part of it."""


@dataclass(frozen=True, kw_only=True)
class Implementation:
    attend: Any
    can_cap: bool = True
    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-10

    def run(
        self,
        operands: Sequence[Tensor],
        lengths: Sequence[int],
        upstream: Tensor | None = None,
        prefixes: Sequence[int] | None = None,
        **options: Any,
    ) -> list[Tensor]:
        """Return the output and, given an upstream gradient, the operands' gradients; all on the CPU."""
        leaves = [x.to(self.device, self.dtype).detach().requires_grad_(upstream is not None) for x in operands]
        output = self.attend(*leaves, Sequences(lengths, prefixes), Scores(SCALE, **options))
        results = [output]
        if upstream is not None:
            results += torch.autograd.grad(output, leaves, upstream.to(output))
        return [result.detach().cpu() for result in results]


def cuda_kernels() -> list[Any]:
    """Return the real kernels, or without a GPU one skipped parameter that says why."""
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        return [pytest.param(None, id="cuda", marks=[pytest.mark.gpu, skip])]
    return [
        pytest.param(
            Implementation(
                attend=kernel.attend, can_cap=kernel.can_cap, device="cuda", dtype=torch.bfloat16, tolerance=2e-2
            ),
            id=f"cuda-{number}",
            marks=pytest.mark.gpu,
        )
        for number, kernel in enumerate(installed_kernels())
    ]


FLASH_ATTN = flash_attn_kernel(flash_fakes.flash_attn_varlen_func)
TORCH = torch_kernel(flash_fakes.varlen_attn, flash_fakes.flash_attention_backward)
EARLY_TORCH = torch_kernel(flash_fakes.early_varlen_attn, flash_fakes.flash_attention_backward)
IMPLEMENTATIONS = [
    pytest.param(Implementation(attend=sdpa_attention), id="sdpa"),
    pytest.param(Implementation(attend=FLASH_ATTN.attend, can_cap=FLASH_ATTN.can_cap), id="flash-attn"),
    pytest.param(Implementation(attend=TORCH.attend, can_cap=TORCH.can_cap), id="torch"),
    pytest.param(Implementation(attend=EARLY_TORCH.attend, can_cap=EARLY_TORCH.can_cap), id="torch-early"),
    *cuda_kernels(),
]
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def draw(num_tokens: int, groups: int = GROUPS) -> tuple[list[Tensor], Tensor]:
    """Draw queries, keys, values and an upstream gradient, all exact in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_tokens, heads, HEAD_SIZE) for heads in (HEADS, groups, groups, HEADS)]
    q, k, v, upstream = (torch.randn(shape, generator=generator).bfloat16().double() for shape in shapes)
    return [q, k, v], upstream


def dense(
    operands: Sequence[Tensor],
    lengths: Sequence[int],
    upstream: Tensor,
    prefixes: Sequence[int] | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> list[Tensor]:
    """Return the results expected of :meth:`Implementation.run`."""
    prefixes = prefixes or [0] * len(lengths)
    leaves = [x.clone().requires_grad_() for x in operands]
    q, k, v = (x.transpose(0, 1) for x in leaves)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.cat([torch.arange(p, p + length) for p, length in zip(prefixes, lengths, strict=True)])
    distance = position[:, None] - position[None, :]
    is_own = sequence[:, None] == sequence[None, :]
    lent = torch.tensor(prefixes)[sequence]
    lends = torch.tensor([not prefix for prefix in prefixes])
    lender = torch.where(lends, torch.arange(len(prefixes)), -1).cummax(0).values[sequence]
    is_prefix = (lender[:, None] == sequence[None, :]) & (position[None, :] < lent[:, None])
    seen = (is_own | is_prefix) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    share = q.shape[0] // k.shape[0]
    scores = SCALE * q @ k.repeat_interleave(share, 0).mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    output = (weights @ v.repeat_interleave(share, 0)).transpose(0, 1)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the distance in norm, relative unless the gradient is all zero (a sequence of one token)."""
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1.0))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Draw lengths of a few sequences, and lengths of prefixes taken from the latest sequence without one."""
    lengths, prefixes, lent = [], [], 0
    for length in draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)):
        prefixes.append(draw(st.integers(0, lent)))
        lengths.append(length)
        lent = lent if prefixes[-1] else length
    return lengths, prefixes


@every_implementation
@example(layout=(LENGTHS, PREFIXES), groups=2, window=3, softcap=None)
@example(layout=([2, 7], [0, 1]), groups=1, window=None, softcap=30.0)
@example(layout=([5, 3, 4, 6], [0, 4, 2, 5]), groups=2, window=None, softcap=None)
@given(
    layout=layouts(),
    groups=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, 1, 3, 20]),
    softcap=st.sampled_from([None, 0.5, 30.0]),
)
def test_output_and_gradients(
    implementation: Implementation,
    layout: tuple[list[int], list[int]],
    groups: int,
    window: int | None,
    softcap: float | None,
) -> None:
    lengths, prefixes = layout
    softcap = softcap if implementation.can_cap else None
    operands, upstream = draw(sum(lengths), groups)
    found = implementation.run(operands, lengths, upstream, prefixes, window=window, softcap=softcap)
    expected = dense(operands, lengths, upstream, prefixes, window=window, softcap=softcap)
    assert max(map(relative, found, expected)) <= implementation.tolerance


@pytest.mark.parametrize("mistake", ["one sequence", "other window", "no window", "zeros", "swapped sequences"])
def test_the_tolerances_bite(mistake: str) -> None:
    operands, upstream = draw(sum(LENGTHS))
    expected = dense(operands, LENGTHS, upstream, window=3)
    lengths = {"one sequence": [sum(LENGTHS)], "swapped sequences": LENGTHS[::-1]}.get(mistake, LENGTHS)
    window = {"other window": 4, "no window": None}.get(mistake, 3)
    wrong = dense([x * (mistake != "zeros") for x in operands], lengths, upstream, window=window)
    assert relative(wrong[0], expected[0]) > 0.04


@every_implementation
def test_nan_in_one_sequence_leaves_every_bit_of_the_others(implementation: Implementation) -> None:
    operands, upstream = draw(sum(LENGTHS))
    clean = implementation.run(operands, LENGTHS, upstream)
    for x in operands:
        x[6:15] = float("nan")
    upstream[6:15] = float("nan")
    beside = implementation.run(operands, LENGTHS, upstream)
    others = [*range(6), *range(15, 18)]
    assert beside[0][6:15].isnan().all()
    assert all(torch.equal(left[others], right[others]) for left, right in zip(clean, beside, strict=True))


@every_implementation
def test_nan_in_one_pair_leaves_every_bit_of_the_others(implementation: Implementation) -> None:
    operands, upstream = draw(sum(LENGTHS))
    clean = implementation.run(operands, LENGTHS, upstream, PREFIXES)
    for x in operands:
        x[6:15] = float("nan")
    beside = implementation.run(operands, LENGTHS, upstream, PREFIXES)
    assert beside[0][6:].isnan().all(), "the second of the pair sees the prefix that it has in the first"
    assert all(torch.equal(left[:6], right[:6]) for left, right in zip(clean, beside, strict=True))


@every_implementation
def test_output_bits_do_not_depend_on_other_sequences(implementation: Implementation) -> None:
    operands, _ = draw(sum(LENGTHS))
    (together,) = implementation.run(operands, LENGTHS)
    for part, *alone in zip(together.split(LENGTHS), *(x.split(LENGTHS) for x in operands), strict=True):
        assert torch.equal(implementation.run(alone, [part.shape[0]])[0], part)
    (together,) = implementation.run(operands, LENGTHS, prefixes=PREFIXES)
    for pair in (slice(0, 2), slice(2, 4)):
        tokens = slice(sum(LENGTHS[: pair.start]), sum(LENGTHS[: pair.stop]))
        (alone,) = implementation.run([x[tokens] for x in operands], LENGTHS[pair], prefixes=PREFIXES[pair])
        assert torch.equal(alone, together[tokens])


@every_implementation
def test_the_same_pass_gives_the_same_bits(implementation: Implementation) -> None:
    lengths = [300, 1, 700]
    operands, upstream = draw(sum(lengths))
    first, second = (implementation.run(operands, lengths, upstream) for _ in range(2))
    assert all(map(torch.equal, first, second))


@every_implementation
def test_recomputing_it_in_the_backward_pass(implementation: Implementation) -> None:
    operands, upstream = draw(sum(LENGTHS))

    def attend(*args: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(implementation.attend, *args, use_reentrant=False)

    recomputed = Implementation(attend=attend, device=implementation.device, dtype=implementation.dtype)
    expected = implementation.run(operands, LENGTHS, upstream)
    assert all(map(torch.equal, recomputed.run(operands, LENGTHS, upstream), expected))


def test_offsets_are_made_once_per_pass_and_device() -> None:
    sequences = Sequences((5, 1, 9))
    offsets = sequences.offsets(torch.device("cpu"))
    assert offsets.tolist() == [0, 5, 6, 15]
    assert offsets.dtype == torch.int32
    assert sequences.longest == 9
    assert sequences.offsets(torch.device("cpu")) is offsets
    assert sequences.key_offsets(torch.device("cpu")) is offsets
    assert sequences.offsets(torch.device("meta")).device.type == "meta"


def test_what_a_sequence_with_a_prefix_sees() -> None:
    sequences = Sequences(LENGTHS, PREFIXES)
    assert sequences.offsets(torch.device("cpu")).tolist() == [0, 5, 6, 15, 18]
    assert sequences.key_offsets(torch.device("cpu")).tolist() == [0, 5, 11, 20, 27]
    assert (sequences.longest, sequences.longest_key) == (9, 9)
    seen = sequences.with_prefixes(torch.arange(18)[:, None, None]).flatten().tolist()
    assert seen == [*range(5), *range(5), 5, *range(6, 15), *range(6, 10), *range(15, 18)]


@pytest.mark.parametrize("prefixes", [[1, 0, 0], [0, 6, 0], [0, 2, 6], [0, 0, 4]])
def test_a_prefix_is_the_beginning_of_a_sequence_that_has_none(prefixes: list[int]) -> None:
    with pytest.raises(AssertionError, match="beginning"):
        Sequences([5, 3, 4], prefixes)


def test_a_model_with_a_layer_that_attends_in_chunks_is_found() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    set_pattern(layers[0], Pattern(window=4))
    assert not has_chunks(layers)
    set_pattern(layers[1], Pattern(chunk=4))
    assert has_chunks(layers)


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
def test_the_implementation_that_is_chosen(
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
    """A kernel for all layers that counts its calls and the distinct offsets passed to it."""

    def __init__(self, kernel: FlashKernel) -> None:
        self._kernel = kernel
        self.calls = 0
        self.offsets: dict[int, Tensor] = {}  # by id; kept alive so that no id is used twice

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
    # Three passes: one for the losses, and two in which a row, or half of one, has other tokens.
    assert watched.calls == 3 * backbone.model.config.num_hidden_layers
    assert len(watched.offsets) == 3
