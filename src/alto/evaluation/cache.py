"""A key-value cache in preallocated buffers: adding a token does not copy the earlier tokens."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

__all__ = ["cache_argument", "roomy_cache"]

_GROWTH = 1.5


def roomy_cache(config: PreTrainedConfig) -> DynamicCache:
    """Return a cache for a model with ``config``; sliding-window layers keep the cache of transformers."""
    cache = DynamicCache(config=config)
    cache.layers = [_RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def cache_argument(model: nn.Module) -> str:
    """Return the name of the argument through which ``model`` takes a cache.

    It is ``cache`` since transformers 5.24, and ``past_key_values`` in earlier versions and in models with custom code.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class _RoomyLayer(DynamicLayer):
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
        self._see(end)
        return self._known()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows in ``indices``."""
        if not self._rooms:
            return
        self._rooms = tuple(room.index_select(0, indices) for room in self._rooms)
        self._see(self.get_seq_length())

    def _known(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def _see(self, num_tokens: int) -> None:
        self.keys, self.values = (room[:, :, :num_tokens] for room in self._rooms)


def _with_room(known: Tensor, new: Tensor) -> Tensor:
    """Return a buffer that starts with ``known``, and has room for ``new`` and further tokens."""
    num_tokens = (known.shape[2] if known.numel() else 0) + new.shape[2]
    rows, heads, _, size = new.shape
    room = torch.empty(rows, heads, int(num_tokens * _GROWTH) + 1, size, dtype=new.dtype, device=new.device)
    if known.numel():
        room[:, :, : known.shape[2]] = known
    return room
