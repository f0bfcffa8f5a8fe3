"""The saved adapter that every job of a task begins with (``init_adapter``)."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeAlias

from alto.backbone import Backbone
from alto.errors import TargetModuleError
from alto.lora import AdapterShape, AdapterWeights, SavedAdapter, adapter_scale, check_fit, read_saved_adapter, serving
from alto.lora.peft_format import CONFIG_FILE, WEIGHTS_FILE
from alto.runs.events import StartFact
from alto.spec import JobConfig

Within: TypeAlias = Callable[[int], AbstractContextManager[None]]
"""A context for a forward pass of the given number of tokens; inside, the pass computes with the adapter that jobs
begin with."""

_MAX_SHOWN = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class InitAdapter:
    """An adapter that jobs begin with.

    Attributes:
        fact: Its folder and fingerprint, for the journal.
    """

    saved: SavedAdapter
    fact: StartFact
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path, backbone: Backbone, *, model: str, notes: tuple[str, ...] = ()) -> Self:
        """Read the adapter in ``folder`` and check it against the base model.

        Args:
            model: Name of the base model, for messages.
            notes: Notes of the caller about the adapter.

        Raises:
            RunNotFoundError: There is no adapter.
            RunError: A file cannot be read.
            UnsupportedError: The adapter is not plain LoRA.
            TargetModuleError: The adapter does not fit the base model.
        """
        saved = read_saved_adapter(folder)
        check_fit(backbone.model, saved, model, remedy="name the model it was trained on in 'model'")
        return cls(saved=saved, fact=StartFact(path=str(folder), fingerprint=_fingerprint(folder)), notes=notes)

    @property
    def weights(self) -> AdapterWeights:
        """Its tensors, float32 on the CPU."""
        return self.saved.weights

    def check_job(self, job: str, config: JobConfig, shape: AdapterShape) -> None:
        """Check that a job trains an adapter of this kind: the same modules, each with the same rank and scale, and the
        same further tensors.

        Raises:
            TargetModuleError: The job trains a different kind of adapter.
        """
        scale = adapter_scale(config)
        modules = zip(shape.targets, shape.ranks, shape.ratios, strict=True)
        found = {module.name: (rank, ratio * scale) for module, rank, ratio in modules}
        wanted = {name: (a_KR.shape[-1], self.saved.scales[name]) for name, (a_KR, _) in self.weights.items()}
        extras = {extra.name: extra.shape for extra in shape.extras}
        wanted_extras = {name: tuple(tensor.shape) for name, tensor in self.weights.extras.items()}
        differences = [
            *_of_names(wanted, found),
            *_of_numbers(wanted, found),
            *_of_names(wanted_extras, extras),
            *(
                f"{name} with shape {extras[name]}, but {size} in the adapter"
                for name, size in wanted_extras.items()
                if extras.get(name, size) != size
            ),
        ]
        if differences:
            more = f" and {len(differences) - _MAX_SHOWN} more" if len(differences) > _MAX_SHOWN else ""
            raise TargetModuleError(
                f"init_adapter: expected {job} to train an adapter with the modules, ranks, scales and other tensors "
                f"of {self.saved.folder}, found {'; '.join(differences[:_MAX_SHOWN])}{more}; remove r, lora_alpha, "
                "target_modules and similar keys, so that the adapter sets them, or correct them"
            )

    @contextlib.contextmanager
    def applied(self, backbone: Backbone) -> Iterator[Within]:
        """Put the adapter on ``backbone`` inside the context, instead of any bank; afterwards the base model has no
        adapters. All ranks must make the same call."""
        weights = (self.weights, self.saved.scales)
        with serving(backbone.model, [weights], backbone.run_once, backbone.rows_in_pass) as served:
            yield lambda num_tokens: served.use(served.schedule([num_tokens]))


@contextlib.contextmanager
def beginning_with(start: InitAdapter | None, backbone: Backbone, restore: Callable[[], None]) -> Iterator[Within]:
    """Enter a context in which forward passes compute the jobs' starting point: the adapter, or without one, the base
    model.

    Args:
        start: The adapter; None if jobs begin with new adapters, which change nothing.
        backbone: The base model, with or without the adapters of a bank.
        restore: Puts the adapters of a bank back; called only if they were replaced.
    """
    if start is None:
        yield lambda num_tokens: contextlib.nullcontext()
        return
    try:
        with start.applied(backbone) as within:
            yield within
    finally:
        restore()


def _fingerprint(folder: Path) -> str:
    """Return a digest of the description and the tensors of an adapter."""
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


def _of_names(wanted: Mapping[str, object], found: Mapping[str, object]) -> Iterator[str]:
    for name in sorted(wanted.keys() ^ found.keys()):
        yield f"{name} only in the adapter" if name in wanted else f"{name}, which the adapter does not have"


def _of_numbers(wanted: Mapping[str, tuple[int, float]], found: Mapping[str, tuple[int, float]]) -> Iterator[str]:
    for name in sorted(wanted.keys() & found.keys()):
        (rank, scale), (other_rank, other_scale) = wanted[name], found[name]
        if rank != other_rank:
            yield f"rank {other_rank} on {name}, but {rank} in the adapter"
        elif not math.isclose(scale, other_scale, rel_tol=1e-6):
            yield f"a scale of {other_scale:g} on {name}, but {scale:g} in the adapter"
