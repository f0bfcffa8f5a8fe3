"""The offsets of the sequences of one forward pass, for attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from alto.errors import UnsupportedModelError
from alto.kernels import send

# Sequences as padded rows of one length, for models whose layers need this layout.
#
# Attention takes the boundaries of sequences in a concatenated row as an argument. A recurrence, a convolution or
# custom attention does not. Such a model computes one row per sequence, padded on the right, as Hugging Face's trainers
# do. Adapters and losses are still computed only for tokens (:mod:`alto.lora.linear`).
#
# Shapes: ``T`` tokens, ``S`` sequences, ``L`` positions of the longest, ``P = S · L`` positions.


class PaddedRows:
    """The position of every token in rows that are padded to the same length.

    Args:
        prefixes: Length of each sequence's prefix; see :class:`alto.backbone.sequences.Sequences`. The tokens of the
            prefix are repeated in the sequence's row.

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
            send(numbers, device) for numbers in (token_SL.flatten(), place_T, (token_SL < num_tokens).long())
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


class Sequences:
    """Concatenated sequences; created once per forward pass and read by every layer.

    Args:
        prefixes: Length of each sequence's prefix, 0 without one. The prefix is the beginning of the latest sequence
            without a prefix. For example, two replies to one prompt are a sequence of the prompt and the first reply,
            and a sequence of the second reply with the prompt as its prefix. None if no sequence has a prefix.

    Attributes:
        key_lengths: Length of each sequence with its prefix.
    """

    def __init__(self, lengths: Sequence[int], prefixes: Sequence[int] | None = None) -> None:
        self.lengths = list(lengths)
        self._prefixes = list(prefixes) if prefixes is not None and any(prefixes) else None
        self.key_lengths = (
            [prefix + length for prefix, length in zip(self._prefixes, self.lengths, strict=True)]
            if self._prefixes is not None
            else self.lengths
        )
        provided = 0
        for length, prefix in zip(self.lengths, self._prefixes or (), strict=False):
            assert prefix <= provided, "a prefix is the beginning of a sequence that has none itself"
            provided = provided if prefix else length
        self.longest, self.longest_key = max(self.lengths), max(self.key_lengths)
        self._sent: dict[tuple[str, torch.device], Tensor] = {}
        self._in_chunks: dict[int, Sequences] = {}
        self._padded: dict[torch.device, PaddedRows] = {}

    def padded(self, device: torch.device) -> PaddedRows:
        """Return the same sequences as padded rows of one length."""
        if device not in self._padded:
            self._padded[device] = PaddedRows(self.lengths, self._prefixes or [0] * len(self.lengths), device)
        return self._padded[device]

    def in_chunks(self, size: int) -> Sequences:
        """Return the same tokens, with each sequence cut into chunks of ``size`` positions.

        Raises:
            UnsupportedModelError: A sequence has a prefix; it would share the last chunk of the prefix.
        """
        if self._prefixes is not None:
            raise UnsupportedModelError(
                f"expected attention over whole sequences for pairs that share their prompt, found a model that "
                f"attends in chunks of {size} tokens; use another base model, or a method without pairs"
            )
        if size not in self._in_chunks:
            lengths = (min(size, length - start) for length in self.lengths for start in range(0, length, size))
            self._in_chunks[size] = Sequences(list(lengths))
        return self._in_chunks[size]

    def offsets(self, device: torch.device) -> Tensor:
        """Return the first token of each sequence and the end of the last, int32 on ``device``."""
        return self._send("offsets", device, torch.int32)

    def key_offsets(self, device: torch.device) -> Tensor:
        """Return the cumulative key lengths (``cu_seqlens_k``): the start of each sequence in the output of
        :meth:`with_prefixes`, and the end of the last one; int32 on ``device``."""
        return self._send("offsets" if self._prefixes is None else "key_offsets", device, torch.int32)

    def with_prefixes(self, x_TGD: Tensor) -> Tensor:
        """Return keys or values in which each sequence is preceded by the keys or values of its prefix; unchanged
        without prefixes.

        A token of a prefix gets the sum of the gradients of all sequences that use it, in the order of the sequences.
        """
        if self._prefixes is None:
            return x_TGD
        found: Tensor = _WithPrefixes.apply(x_TGD, self)
        return found

    def prefix_gradients(self, grad_KGD: Tensor) -> Tensor:
        """Compute the gradient of the argument of :meth:`with_prefixes` from the gradient of its result."""
        device = grad_KGD.device
        prefix_P, copies_PC, own_T = (
            self._send(name, device, torch.int64) for name in ("prefix_tokens", "copies", "own_keys")
        )
        grad_TGD = grad_KGD.index_select(0, own_T)
        padded = torch.cat([grad_KGD, grad_KGD.new_zeros(1, *grad_KGD.shape[1:])])
        copies = padded.index_select(0, copies_PC.flatten()).unflatten(0, copies_PC.shape)
        grad_TGD[prefix_P] += copies.sum(1)
        return grad_TGD

    def _send(self, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the tensor ``name``; it is built and copied at the first use, from pinned memory, without host-device
        synchronisation."""
        if (name, device) not in self._sent:
            self._sent[name, device] = send(torch.as_tensor(getattr(self, f"_{name}")(), dtype=dtype), device)
        return self._sent[name, device]

    def _offsets(self) -> list[int]:
        return list(accumulate(self.lengths, initial=0))

    def _key_offsets(self) -> list[int]:
        return list(accumulate(self.key_lengths, initial=0))

    def _key_tokens(self) -> Tensor:
        """Return the index of the token at every position of the result of :meth:`with_prefixes`."""
        ranges = [
            torch.arange(first, first + count)
            for provider, prefix, start, length in self._parts()
            for first, count in ((provider, prefix), (start, length))
        ]
        return torch.cat(ranges)

    def _own_keys(self) -> Tensor:
        """Return the position of every token in the result of :meth:`with_prefixes`; the copies in prefixes of other
        sequences are not included."""
        keys = zip(self._parts(), self._key_offsets(), strict=False)
        return torch.cat([torch.arange(key + prefix, key + prefix + length) for (_, prefix, _, length), key in keys])

    def _prefix_tokens(self) -> Tensor:
        """Return the indices of the tokens that are in the prefix of a sequence, ``[P]``."""
        uses = self._uses_of_prefixes().items()
        return torch.cat([torch.arange(provider, provider + max(prefixes)) for provider, (prefixes, _) in uses])

    def _copies(self) -> Tensor:
        """Return the positions of the copies of the tokens of :meth:`_prefix_tokens`, ``[P, C]``. Rows with fewer
        copies are filled with the index after the last position."""
        padding, uses = sum(self.key_lengths), list(self._uses_of_prefixes().values())
        most = max(len(prefixes) for prefixes, _ in uses)
        found = [torch.full((max(prefixes), most), padding) for prefixes, _ in uses]
        for copies, (prefixes, keys) in zip(found, uses, strict=True):
            for column, (prefix, key) in enumerate(zip(prefixes, keys, strict=True)):
                copies[:prefix, column] = torch.arange(key, key + prefix)
        return torch.cat(found)

    def _uses_of_prefixes(self) -> dict[int, tuple[list[int], list[int]]]:
        """Map the first token of each sequence that provides prefixes to the lengths and the first positions of these
        prefixes."""
        found: dict[int, tuple[list[int], list[int]]] = {}
        for (provider, prefix, _, _), key in zip(self._parts(), self._key_offsets(), strict=False):
            if prefix:
                prefixes, keys = found.setdefault(provider, ([], []))
                prefixes.append(prefix)
                keys.append(key)
        return found

    def _parts(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield, for every sequence, the start and the length of its prefix, and its own start and length."""
        assert self._prefixes is not None
        provider = 0
        for prefix, length, start in zip(self._prefixes, self.lengths, self._offsets(), strict=False):
            provider = provider if prefix else start
            yield provider, prefix, start, length


class _WithPrefixes(torch.autograd.Function):
    """:meth:`Sequences.with_prefixes` with a gradient that is bitwise equal in every run. On a GPU, the
    backward pass of PyTorch's own ``index_select`` adds the parts of the gradient in an undefined order."""

    @staticmethod
    def forward(ctx: Any, x_TGD: Tensor, sequences: Sequences) -> Tensor:
        ctx.sequences = sequences
        return x_TGD.index_select(0, sequences._send("key_tokens", x_TGD.device, torch.int64))

    @staticmethod
    def backward(ctx: Any, grad_KGD: Tensor) -> tuple[Tensor, None]:
        return ctx.sequences.prefix_gradients(grad_KGD), None
