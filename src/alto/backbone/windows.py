"""Finds which tokens each attention module of a model attends to, from the masks that transformers builds for it.

Many models define this only in their mask, which padding-free attention never builds. So the mask is read once, on a
short row. Windows are made small meanwhile, because a short row would not show large ones.

Shapes: ``L`` tokens of a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from alto.backbone.attention import Pattern
from alto.errors import UnsupportedModelError

__all__ = ["LARGEST_SMALL_WINDOW", "find_patterns", "real_patterns", "small_windows"]

LARGEST_SMALL_WINDOW = 12
"""Windows up to this size are left as they are."""

_TRACE = "alto_trace"
_FIRST_SMALL = 5
_WINDOWS = re.compile(r".*window(?!.*layer).*|.*attention_chunk_size|floor_scale")
"""Names in configurations and modules of transformers for a number of tokens that attention depends on."""

_SEEN: ContextVar[dict[nn.Module, list[tuple[Tensor | None, int | None]]]] = ContextVar("masks of a traced pass")


@contextmanager
def small_windows(model: PreTrainedModel) -> Iterator[Mapping[int, int]]:
    """Reduce every window of ``model`` to at most :data:`LARGEST_SMALL_WINDOW`; different windows stay different.

    Yields:
        The real size of each small size that is used instead.
    """
    owners = [vars(part) for part in _parts(model)]
    places = [
        (owner, name, value)
        for owner in owners
        for name, value in owner.items()
        if isinstance(name, str) and isinstance(value, int) and not isinstance(value, bool) and _WINDOWS.fullmatch(name)
    ]
    left_alone = {value for _, _, value in places if value <= LARGEST_SMALL_WINDOW}
    free = (size for size in range(_FIRST_SMALL, LARGEST_SMALL_WINDOW + 1) if size not in left_alone)
    real: dict[int, int] = {}
    for _, _, value in places:
        if value > LARGEST_SMALL_WINDOW and value not in real.values():
            size = next(free, None)
            if size is None:
                raise UnsupportedModelError(
                    f"{type(model).__name__}: expected a few different attention windows at most, found "
                    f"{len({value for _, _, value in places})}; use another base model"
                )
            real[size] = value
    small = {value: size for size, value in real.items()}
    try:
        for owner, name, value in places:
            owner[name] = small.get(value, value)
        yield real
    finally:
        for owner, name, value in places:
            owner[name] = value


def find_patterns(model: PreTrainedModel, input_ids_L: Tensor) -> dict[nn.Module, Pattern]:
    """Return the pattern of every attention module of ``model``; the model's attention stays replaced afterwards.

    Raises:
        UnsupportedModelError: A mask cannot be expressed as a :class:`Pattern`.
    """
    AttentionInterface.register(_TRACE, _trace)
    AttentionMaskInterface.register(_TRACE, _whole_mask)
    model.set_attn_implementation(_TRACE)
    token = _SEEN.set({})
    try:
        model(input_ids=input_ids_L[None], use_cache=False)
        traced = _SEEN.get()
    finally:
        _SEEN.reset(token)
    names = {module: name for name, module in model.named_modules()}
    patterns = {}
    for module, masks in traced.items():
        found = {_pattern(mask, window, len(input_ids_L)) for mask, window in masks}
        pattern = found.pop()
        if pattern is None or found:
            raise UnsupportedModelError(
                f"{type(model).__name__}: expected attention to a token itself and to earlier tokens (all, a window or "
                f"a chunk), found a different mask in {names.get(module, 'the model')}; use another base model"
            )
        patterns[module] = pattern
    return patterns


def real_patterns(patterns: Mapping[nn.Module, Pattern], real: Mapping[int, int]) -> dict[nn.Module, Pattern]:
    """Replace the small window sizes in ``patterns`` by the real ones, which :func:`small_windows` has yielded."""
    return {
        module: replace(
            pattern,
            window=None if pattern.window is None else real.get(pattern.window, pattern.window),
            chunk=None if pattern.chunk is None else real.get(pattern.chunk, pattern.chunk),
        )
        for module, pattern in patterns.items()
    }


def _parts(model: PreTrainedModel) -> list[Any]:
    """Return the modules of ``model`` and all configurations that they keep, each once."""
    found: dict[int, Any] = {}
    for module in model.modules():
        found[id(module)] = module
        configs = [module.config] if "config" in vars(module) else []
        while configs:
            config = configs.pop(0)
            if id(config) not in found:
                found[id(config)] = config
                inner = (vars(config).get(name) for name in getattr(config, "sub_configs", ()))
                configs += [one for one in inner if one is not None]
    return [part for part in found.values() if hasattr(part, "__dict__")]


def _trace(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *_: Any,
    sliding_window: int | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """Record the mask; the return value does not matter."""
    _SEEN.get().setdefault(module, []).append((attention_mask, sliding_window))
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def _whole_mask(*arguments: Any, **settings: Any) -> Tensor | None:
    return sdpa_mask(*arguments, **settings | {"allow_is_causal_skip": False})


def _pattern(mask: Tensor | None, window: int | None, length: int) -> Pattern | None:
    """Return the pattern of ``mask``, ``[1, 1 or heads, L, L]``; None if :class:`Pattern` cannot express it."""
    if mask is None:
        return Pattern(window=window)
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[-2:] != (length, length):
        return None
    if mask.dtype == torch.bool:
        seen = mask
    else:
        seen = mask == 0
        if not (seen | (mask <= torch.finfo(mask.dtype).min / 2)).all():
            return None
    first = int(seen[..., 0].sum(-1).max())  # tokens that see the first one
    position = torch.arange(length, device=mask.device)
    distance = position[:, None] - position[None, :]
    is_causal = distance >= 0
    for pattern, expected in (
        (Pattern(), is_causal),
        (Pattern(window=first), is_causal & (distance < first)),
        (Pattern(chunk=first), is_causal & (position[:, None] // max(first, 1) == position[None, :] // max(first, 1))),
    ):
        if bool((seen == expected).all()):
            return pattern
    return None
