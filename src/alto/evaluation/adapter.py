"""Saved adapters loaded together onto one base model, without merging."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from alto.backbone import Backbone
from alto.lora import SavedAdapter, ServedAdapters, check_fit, serving

__all__ = ["loaded_adapters"]


@contextlib.contextmanager
def loaded_adapters(backbone: Backbone, adapters: Sequence[SavedAdapter | None], base: str) -> Iterator[ServedAdapters]:
    """Load ``adapters`` onto ``backbone`` inside the context, one per slot; None means the base model alone.

    Args:
        base: Name of the base model in error messages.

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
