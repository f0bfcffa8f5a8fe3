"""The base model that this process has loaded and keeps for later tasks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from alto.backbone import Backbone, base_differences, base_fingerprint, release_memory, tokenizer_fingerprint
from alto.errors import RunBusyError
from alto.executor import Ranks, load_base
from alto.lora import eject
from alto.spec import BaseModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """A base model in memory, with a description of its source."""

    spec: BaseModelSpec
    backbone: Backbone
    fingerprint: dict[str, object]
    tokenizer: str | None


class ResidentBase:
    """Holds at most one base model; another one replaces it only while nothing uses it."""

    def __init__(self) -> None:
        self._loaded: _Loaded | None = None
        self._num_users = 0

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Keep the base model from being replaced inside the block; the last user removes all adapters."""
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            self.clean()

    def clean(self) -> None:
        """Remove all adapters from the base model unless something uses it."""
        if not self._num_users and self._loaded is not None:
            eject(self._loaded.backbone.model)
            release_memory()

    def load(
        self, spec: BaseModelSpec, device: torch.device, ranks: Ranks, *, gradient_checkpointing: bool
    ) -> Backbone:
        """Return the base model; load it if it is not in memory or its files have changed.

        Args:
            ranks: This process; it must be the only rank.

        Raises:
            RunBusyError: Tasks of this process use another base model.
            AltoError: See :func:`alto.executor.load_base`.
        """
        fingerprint, tokenizer = base_fingerprint(spec), tokenizer_fingerprint(spec)
        if (
            (loaded := self._loaded) is not None
            and (loaded.spec, loaded.tokenizer) == (spec, tokenizer)
            and loaded.backbone.is_checkpointed == gradient_checkpointing
            and not base_differences(loaded.fingerprint, fingerprint)
        ):
            return loaded.backbone
        if self._num_users:
            raise RunBusyError(
                f"expected the base model of the tasks that this process trains, found {spec.id!r} with a different "
                "id, different settings or different files; the task is started again in a separate process"
            )
        self._loaded = None
        release_memory()
        backbone = load_base(spec, device, ranks, gradient_checkpointing=gradient_checkpointing)
        self._loaded = _Loaded(spec=spec, backbone=backbone, fingerprint=fingerprint, tokenizer=tokenizer)
        return backbone
