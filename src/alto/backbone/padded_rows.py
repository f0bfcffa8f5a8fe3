"""Sequences as padded rows of one length, for models whose layers need this layout.

Attention takes the boundaries of sequences in a concatenated row as an argument. A recurrence, a convolution or custom
attention does not. Such a model computes one row per sequence, padded on the right, as Hugging Face's trainers do.
Adapters and losses are still computed only for tokens (:mod:`alto.lora.linear`).

Shapes: ``T`` tokens, ``S`` sequences, ``L`` positions of the longest, ``P = S · L`` positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["PaddedRows"]


class PaddedRows:
    """The place of every token in rows of one length.

    Args:
        lengths: Number of tokens of each sequence.
        prefixes: Length of each sequence's prefix; see :class:`alto.backbone.sequences.Sequences`. The tokens of the
            prefix are repeated in the sequence's row.
        device: Device of the rows.

    Attributes:
        shape: ``(S, L)``.
    """

    def __init__(self, lengths: Sequence[int], prefixes: Sequence[int], device: torch.device) -> None:
        num_tokens = sum(lengths)
        self.shape = len(lengths), max(map(sum, zip(prefixes, lengths, strict=True)))
        token_SL = torch.full(self.shape, num_tokens)  # the index after the last token means padding
        place_T = torch.empty(num_tokens, dtype=torch.long)
        first = provider = 0
        for row, (length, prefix) in enumerate(zip(lengths, prefixes, strict=True)):
            provider = provider if prefix else first
            token_SL[row, :prefix] = torch.arange(provider, provider + prefix)
            token_SL[row, prefix : prefix + length] = torch.arange(first, first + length)
            place_T[first : first + length] = torch.arange(prefix, prefix + length) + row * self.shape[1]
            first += length
        self._token_P, self._place_T, self.mask_SL = (
            _send(numbers, device) for numbers in (token_SL.flatten(), place_T, (token_SL < num_tokens).long())
        )

    @property
    def num_positions(self) -> int:
        """Number of positions ``P``, with padding."""
        return self.shape[0] * self.shape[1]

    def spread(self, x_TN: Tensor) -> Tensor:
        """Copy ``[T, N]`` to ``[P, N]``: zeros at padding, tokens of a prefix in every row that uses it.

        The gradient of a token in the prefix of a pair is a sum of two numbers, which has the same bits in any order.
        """
        return torch.cat([x_TN, x_TN.new_zeros(1, x_TN.shape[1])]).index_select(0, self._token_P)

    def spread_ids(self, ids_T: Tensor, padding: int) -> Tensor:
        """Copy token ids ``[T]`` to ``[S, L]``."""
        return torch.cat([ids_T, ids_T.new_full((1,), padding)]).index_select(0, self._token_P).view(self.shape)

    def collect(self, x_PN: Tensor) -> Tensor:
        """Select the tokens ``[T, N]`` from ``[P, N]``."""
        return x_PN.index_select(0, self._place_T)


def _send(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy to ``device`` without host-device synchronisation."""
    pinned = numbers.pin_memory() if device.type == "cuda" else numbers
    return pinned.to(device, non_blocking=True)
