"""Runs modules of the frozen base model as fused Triton kernels, if Triton is the backend.

A module is recognised by its structure. Then its class is run on random numbers: a kernel replaces an operation only if
it gives the same numbers. All other modules stay as they are, and :class:`FusedLayers` reports why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from alto.backbone.fused_modules import (
    FusedForward,
    FusedMlp,
    FusedNorm,
    FusedRotary,
    fused_norm,
    fused_rotation,
    linear_names,
    norm_signature,
    rotating_function,
    sample_losses,
    why_no_kernel,
    why_unfused,
)
from alto.backbone.output_head import OutputHead

_LOSS = "cross_entropy"

_Maker: TypeAlias = Callable[[nn.Module], FusedForward]


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """The parts of a base model that run as fused kernels.

    Attributes:
        counts: Number of fused modules, by operation.
        kept: Reasons why other parts are not fused, by name of the class; under ``cross_entropy`` for the losses,
            ``layers`` for all layers, or ``all`` for everything.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """Return the form that the journal records."""
        return {**self.counts, "kept": dict(self.kept)}


class FusedLayers:
    """The fused forward passes of a model, and the losses of its output head."""

    def __init__(self) -> None:
        self._forwards: list[tuple[nn.Module, FusedForward]] = []
        self._head: OutputHead | None = None
        self._kept: dict[str, str] = {}

    def use_in_layers(self, model: PreTrainedModel, functions: ModuleType) -> None:
        """Run those modules of ``model`` as fused kernels that :mod:`alto.kernels.layer_functions` supports."""
        dtype, device = model.dtype, model.device

        def find_norm(module: nn.Module) -> _Maker | str:
            found = fused_norm(module, functions, device)
            return found if isinstance(found, str) else lambda norm: FusedNorm(norm, functions, *found)

        def find_mlp(module: nn.Module) -> _Maker | str:
            names = linear_names(module) or ()
            why_not = why_unfused(module, names, functions, dtype, device)
            return why_not or (lambda mlp: FusedMlp(mlp, functions, names))

        def find_rotation(module: nn.Module) -> _Maker | str:
            kind, function = type(module), rotating_function(type(module))
            assert function is not None
            found = fused_rotation(kind, function, functions, dtype, device)
            return found if isinstance(found, str) else lambda attention: FusedRotary(attention, *found)

        self._find(model, norm_signature, find_norm)
        self._find(model, lambda module: (names := linear_names(module)) and (type(module), names), find_mlp)
        self._find(model, lambda module: rotating_function(type(module)) and type(module), find_rotation)
        self._use()

    def use_in_head(self, head: OutputHead, functions: ModuleType) -> None:
        """Let the kernel compute the losses of ``head`` if it can; ``head`` has been observed before."""
        why_not = why_no_kernel(head, functions)
        if why_not:
            self._kept[_LOSS] = why_not
        else:
            head.kernel, self._head = functions.cross_entropy, head

    def keep_layers(self, why: str) -> None:
        """Record in the journal why the layers stay as they are."""
        self._kept["layers"] = why

    @property
    def fusion(self) -> Fusion:
        counts = Counter(forward.op for _, forward in self._forwards)
        if self._head is not None:
            counts[_LOSS] = 1
        return Fusion(counts=dict(counts), kept=dict(self._kept))

    def _use(self) -> None:
        for module, forward in self._forwards:
            module.forward = forward

    def drop(self, why: str) -> None:
        """Stop using any fused kernel, and record why."""
        self._remove()
        if self._head is not None:
            self._head.kernel = None
            self._head = None
        self._kept = {"all": why}
        self._forwards = []

    def drop_unused(self) -> None:
        """Drop the kernels that could not be used in the trial forward pass. Call this method after that pass, which
        runs the model over two tokens."""
        left = []
        for module, forward in self._forwards:
            if forward.trial.why_not:
                del module.forward
                self._kept[type(module).__name__] = forward.trial.why_not
            else:
                forward.trial.is_over = True
                left.append((module, forward))
        self._forwards = left

    def sample(self, dtype: torch.dtype, device: torch.device) -> None:
        """Launch every kernel of a training step once, on a few tokens."""
        different = {forward.signature: forward for _, forward in self._forwards}
        with torch.enable_grad():
            for forward in different.values():
                forward.sample(dtype, device)
        if self._head is not None:
            sample_losses(self._head, dtype, device)

    @contextmanager
    def unused(self) -> Iterator[None]:
        """Use the forward passes of the modules' classes inside the context."""
        self._remove()
        try:
            yield
        finally:
            self._use()

    def _remove(self) -> None:
        for module, _ in self._forwards:
            vars(module).pop("forward", None)

    def _find(
        self, model: nn.Module, key_of: Callable[[nn.Module], Any], find: Callable[[nn.Module], _Maker | str]
    ) -> None:
        """Fuse the modules that use the forward pass of their class and have the structure that ``key_of`` recognises.

        Args:
            key_of: Returns a key; modules with equal keys compute the same. Returns None for other structures.
            find: Returns the maker of the forward pass for modules with this key, or the reason why they are not fused.
        """
        found: dict[Any, _Maker | str] = {}
        for module in model.modules():
            if "forward" in vars(module) or (key := key_of(module)) is None:
                continue
            if key not in found:
                found[key] = find(module)
            make = found[key]
            if isinstance(make, str):
                self._kept[type(module).__name__] = make
            else:
                self._forwards.append((module, make(module)))
