"""Magnitude vectors of DoRA (``use_dora``): their names, and the vectors of an adapter."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from alto.errors import UnsupportedError
from alto.lora.layout import ExtraTensor, TargetModule
from alto.lora.targets import linear_bases

_ENDING = ".lora_magnitude_vector"


def magnitude_of(module: str) -> str:
    """Return the name of a module's magnitude vector."""
    return f"{module}{_ENDING}"


def is_magnitude(name: str) -> bool:
    """Return whether an extra tensor of an adapter is a magnitude vector."""
    return name.endswith(_ENDING)


def module_of_magnitude(name: str) -> str:
    """Return the name of the module that has the magnitude vector ``name``."""
    return name.removesuffix(_ENDING)


def magnitudes(model: PreTrainedModel, targets: Sequence[TargetModule]) -> tuple[ExtraTensor, ...]:
    """Return the magnitude vectors of an adapter on ``targets``, which must all be linear modules. Weight decay applies
    to them.

    Raises:
        UnsupportedError: The base model is quantised.
    """
    bases = linear_bases(model)
    for target in targets:
        if not isinstance(bases[target.name]._parameters.get("weight"), nn.Parameter):
            raise UnsupportedError(
                f"use_dora: expected an unquantised base model, found that {target.name} is quantised; DoRA needs the "
                "norms of its rows, which depend on how it is dequantised: use an unquantised base, or remove the key"
            )
    return tuple(ExtraTensor(name=magnitude_of(target.name), shape=(target.out_features,)) for target in targets)
