"""Modules of the frozen base that compute as fused Triton kernels, where Triton is the backend.

A module is recognised by its structure, and its class is tried on random numbers: what a kernel takes the place of gave
the same numbers. Whatever is not recognised stays as it is, and :class:`FusedLayers` says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from alto.backbone.fused_forward import FusedForward
from alto.backbone.fused_loss import sample_losses, why_no_kernel
from alto.backbone.fused_mlps import FusedMlp, linear_names, why_unfused
from alto.backbone.fused_norms import FusedNorm, fused_norm, norm_signature
from alto.backbone.fused_rotary import FusedRotary, fused_rotation, rotating_function
from alto.backbone.output_head import OutputHead

__all__ = ["FusedLayers", "Fusion"]

_LOSS = "cross_entropy"


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """Which parts of a base model are fused kernels.

    Attributes:
        counts: Number of modules, by operation.
        kept: Why others compute as their classes do: by class, under ``cross_entropy`` for the losses, ``layers`` for
            all layers, or ``all`` for everything.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """As the journal has it."""
        return {**self.counts, "kept": dict(self.kept)}


class FusedLayers:
    """The fused forward passes of a model, and the losses of its output head."""

    def __init__(self) -> None:
        self._forwards: list[tuple[nn.Module, FusedForward]] = []
        self._head: OutputHead | None = None
        self._kept: dict[str, str] = {}

    def use_in_layers(self, model: PreTrainedModel, functions: ModuleType) -> None:
        """Find the modules of ``model`` that :mod:`alto.kernels.layer_functions` computes, and let it."""
        self._find_norms(model, functions)
        self._find_mlps(model, functions)
        self._find_rotations(model, functions)
        self._use()

    def use_in_head(self, head: OutputHead, functions: ModuleType) -> None:
        """Let the kernel compute the losses of ``head``, if it can; it was observed."""
        why_not = why_no_kernel(head, functions)
        if why_not:
            self._kept[_LOSS] = why_not
        else:
            head.kernel, self._head = functions.cross_entropy, head

    def keep_layers(self, why: str) -> None:
        """The layers stay as they are: what the journal says."""
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
        """Use none of them any more."""
        self._remove()
        if self._head is not None:
            self._head.kernel = None
            self._head = None
        self._kept = {"all": why}
        self._forwards = []

    def drop_unused(self) -> None:
        """After a forward pass of the model over two tokens, drop those that could not compute in it."""
        left = []
        for module, forward in self._forwards:
            if forward.why_not:
                del module.forward
                self._kept[type(module).__name__] = forward.why_not
            else:
                forward.is_observed = True
                left.append((module, forward))
        self._forwards = left

    def sample(self, dtype: torch.dtype, device: torch.device) -> None:
        """Launch once, on a few tokens, every kernel that a step of training launches; arguments as of
        :meth:`FusedForward.sample`."""
        different = {forward.signature: forward for _, forward in self._forwards}
        with torch.enable_grad():
            for forward in different.values():
                forward.sample(dtype, device)
        if self._head is not None:
            sample_losses(self._head, dtype, device)

    @contextmanager
    def unused(self) -> Iterator[None]:
        """The modules compute as their classes do."""
        self._remove()
        try:
            yield
        finally:
            self._use()

    def _remove(self) -> None:
        for module, _ in self._forwards:
            vars(module).pop("forward", None)

    def _find_norms(self, model: PreTrainedModel, functions: ModuleType) -> None:
        found: dict[Any, Any] = {}
        for module in _own_forwards(model):
            signature = norm_signature(module)
            if signature is None:
                continue
            if signature not in found:
                found[signature] = fused_norm(module, functions, model.device)
            if isinstance(found[signature], str):
                self._kept[type(module).__name__] = found[signature]
            else:
                kind, epsilon = found[signature]
                self._forwards.append((module, FusedNorm(module, functions, epsilon, kind)))

    def _find_mlps(self, model: PreTrainedModel, functions: ModuleType) -> None:
        found: dict[Any, str] = {}
        for module in _own_forwards(model):
            names = linear_names(module)
            if names is None:
                continue
            if type(module) not in found:
                found[type(module)] = why_unfused(module, names, functions, model.dtype, model.device)
            if found[type(module)]:
                self._kept[type(module).__name__] = found[type(module)]
            else:
                self._forwards.append((module, FusedMlp(module, functions, names)))

    def _find_rotations(self, model: PreTrainedModel, functions: ModuleType) -> None:
        found: dict[Any, Any] = {}
        for module in _own_forwards(model):
            kind = type(module)
            function = rotating_function(kind)
            if function is None:
                continue
            if kind not in found:
                found[kind] = fused_rotation(kind, function, functions, model.dtype, model.device)
            if isinstance(found[kind], str):
                self._kept[kind.__name__] = found[kind]
            else:
                forward, rotation = found[kind]
                self._forwards.append((module, FusedRotary(module, forward, rotation)))


def _own_forwards(model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose forward pass is that of their class."""
    return (module for module in model.modules() if "forward" not in vars(module))
