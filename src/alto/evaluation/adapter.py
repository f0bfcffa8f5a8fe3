"""Adapters from folders on one base, unmerged, as PEFT adds each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from alto.backbone import Backbone
from alto.lora import SavedAdapter, ServedAdapters, check_fit, serving

__all__ = ["loaded_adapters"]


@contextlib.contextmanager
def loaded_adapters(backbone: Backbone, adapters: Sequence[SavedAdapter | None], base: str) -> Iterator[ServedAdapters]:
    """Put ``adapters`` on ``backbone`` while the context lasts, one per slot; None is the base alone.

    Args:
        base: The name of the base model, for messages.

    Raises:
        TargetModuleError: An adapter does not fit the model.
    """
    for adapter in adapters:
        if adapter is not None:
            check_fit(
                backbone.model,
                adapter,
                base,
                remedy="name the model it was trained on with --base",
                otherwise=", or evaluate it with PEFT",
            )
    weights = [None if adapter is None else (adapter.weights, adapter.scales) for adapter in adapters]
    with serving(backbone.model, weights, backbone.run_once, backbone.rows_in_pass) as served:
        yield served
