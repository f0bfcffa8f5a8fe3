"""``varlen_attention`` against one masked softmax over all tokens, in float64."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from alto.backbone.attention import varlen_attention

HEADS, HEAD_SIZE, SCALE = 4, 6, 0.3


def dense(
    q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, lengths: list[int], window: int | None, softcap: float | None
) -> Tensor:
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(len(sequence))
    distance = position[:, None] - position[None, :]
    seen = (sequence[:, None] == sequence[None, :]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    share = q_HTD.shape[1] // k_GTD.shape[1]
    scores = SCALE * q_HTD @ k_GTD.repeat_interleave(share, 1).transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v_GTD.repeat_interleave(share, 1)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    groups=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, 1, 3, 20]),
    softcap=st.sampled_from([None, 0.5, 30.0]),
)
def test_output_and_gradients(lengths: list[int], groups: int, window: int | None, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    operands = [
        torch.randn(1, heads, sum(lengths), HEAD_SIZE, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, groups, groups)
    ]
    upstream = torch.randn(1, HEADS, sum(lengths), HEAD_SIZE, generator=generator, dtype=torch.float64)
    found = varlen_attention(*operands, lengths, scale=SCALE, window=window, softcap=softcap)
    expected = dense(*operands, lengths, window, softcap)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    gradients = torch.autograd.grad(found, operands, upstream)
    for left, right in zip(gradients, torch.autograd.grad(expected, operands, upstream), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)
