"""The keys and values of texts that are generated together, in buffers with room for further tokens.

Shapes: ``B`` texts.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

_GROWTH = 1.5


def roomy_cache(config: PreTrainedConfig) -> DynamicCache:
    """Return a cache for a model with ``config``; sliding-window layers keep the cache of transformers."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def cache_argument(model: nn.Module) -> str:
    """Return the name of the argument through which ``model`` takes a cache.

    It is ``cache`` since transformers 5.24, and ``past_key_values`` in earlier versions and in models with custom code.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class RoomyLayer(DynamicLayer):
    """The cache of one layer; ``keys`` and ``values``, ``[rows, heads, tokens, head size]``, are views of larger
    buffers."""

    def __init__(self) -> None:
        super().__init__()
        self._rooms: tuple[Tensor, ...] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add tokens, and return the keys and values of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new, first = (key_states, value_states), self.get_seq_length()
        end = first + key_states.shape[2]
        if not self._rooms or self._rooms[0].shape[2] < end:
            self._rooms = tuple(_with_room(known, states) for known, states in zip(self._known(), new, strict=True))
        for room, states in zip(self._rooms, new, strict=True):
            room[:, :, first:end] = states
        self._set_length(end)
        return self._known()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows in ``indices``."""
        self.keep(indices, self.get_seq_length())

    def keep(self, rows: Tensor, num_tokens: int) -> None:
        """Keep only the last ``num_tokens`` tokens of ``rows``."""
        if not self._rooms:
            return
        first = self.get_seq_length() - num_tokens
        self._rooms = tuple(room[:, :, first:].index_select(0, rows) for room in self._rooms)
        self._set_length(num_tokens)

    def join(self, other: RoomyLayer, places_B: Tensor, num_tokens: int) -> None:
        """Add the rows of ``other``, and keep the last ``num_tokens`` tokens; shorter rows begin with zeros.

        Args:
            places_B: The row that each row of this layer becomes, and then each row of ``other``.
        """
        if not self._rooms:
            return
        pairs = zip(self._known(), other._known(), strict=True)
        self._rooms = tuple(_joined(pair, places_B, num_tokens) for pair in pairs)
        self._set_length(num_tokens)

    def _known(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def _set_length(self, num_tokens: int) -> None:
        self.keys, self.values = (room[:, :, :num_tokens] for room in self._rooms)


def _with_room(known: Tensor, new: Tensor) -> Tensor:
    """Return a buffer that starts with ``known``, and has room for ``new`` and further tokens."""
    num_tokens = (known.shape[2] if known.numel() else 0) + new.shape[2]
    rows, heads, _, size = new.shape
    room = torch.empty(rows, heads, int(num_tokens * _GROWTH) + 1, size, dtype=new.dtype, device=new.device)
    if known.numel():
        room[:, :, : known.shape[2]] = known
    return room


def _joined(parts: Sequence[Tensor], places_B: Tensor, num_tokens: int) -> Tensor:
    """Return a buffer with the rows of all ``parts``, and room for further tokens; see :meth:`RoomyLayer.join`."""
    _, heads, _, size = parts[0].shape
    room = parts[0].new_empty(len(places_B), heads, int(num_tokens * _GROWTH) + 1, size)
    for part, places in zip(parts, places_B.split([len(part) for part in parts]), strict=True):
        missing = max(num_tokens - part.shape[2], 0)
        room[:, :, :missing].index_fill_(0, places, 0)  # masked, but a NaN would count
        room[:, :, missing:num_tokens].index_copy_(0, places, part[:, :, missing - num_tokens :])
    return room
