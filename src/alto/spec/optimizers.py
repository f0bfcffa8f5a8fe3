"""The optimizers of jobs, with transformers' names, and their ``optim_args``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from alto.errors import UnsupportedError
from alto.spec.module_names import pairs_of
from alto.spec.quoting import quoted

__all__ = [
    "EIGHT_BIT_OPTIMIZERS",
    "OptimizerName",
    "check_optimizer_args",
    "optimizer_args",
    "supported_optimizer",
]

OptimizerName: TypeAlias = Literal[
    "adamw_torch", "adamw_8bit", "paged_adamw_8bit", "sgd", "rmsprop", "adagrad", "adafactor"
]
"""AdamW with 32-bit state, with bitsandbytes' 8-bit state, or with paged 8-bit state; torch's own optimizers and
transformers' Adafactor, with the settings that transformers' Trainer gives them."""

EIGHT_BIT_OPTIMIZERS = ("adamw_8bit", "paged_adamw_8bit")
"""Optimizers with 8-bit state."""

_OTHER_SPELLINGS = {"adamw": "adamw_torch", "adamw_torch_fused": "adamw_torch", "adamw_bnb_8bit": "adamw_8bit"}

_NEEDS_PACKAGE = "it needs a package that ALTO does not use"
_BY_LAYER = "it projects the gradients of whole layers, which an adapter's small matrices do not need"
_IN_BACKWARD = "it updates weights inside the backward pass, before the gradients of a job are clipped"
_TWO_WEIGHTS = "it keeps two sets of weights, one to train and one to evaluate"
_OTHER_BITSANDBYTES = "of bitsandbytes' optimizers only its 8-bit AdamW is supported"

_WHY_REFUSED: Mapping[str, tuple[str, ...]] = {
    "it is for other devices": ("adamw_torch_xla", "adamw_torch_npu_fused"),
    _NEEDS_PACKAGE: ("adamw_anyprecision", "adamw_torch_4bit", "adamw_torch_8bit", "grokadamw", "stable_adamw"),
    _IN_BACKWARD: ("lomo", "adalomo"),
    _TWO_WEIGHTS: ("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
    _BY_LAYER: (
        *("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise"),
        *("galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "apollo_adamw", "apollo_adamw_layerwise"),
    ),
    _OTHER_BITSANDBYTES: (
        *("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "paged_adamw_32bit"),
        *("lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit"),
        *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
    ),
}
_REFUSED: Mapping[str, str] = {name: why for why, names in _WHY_REFUSED.items() for name in names}
"""transformers' other optimizers, with the reason why they are refused."""

_NON_NEGATIVE = ("momentum", "alpha", "eps", "lr_decay")
_FLAGS = ("nesterov", "centered")
_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

_ARGS: Mapping[str, tuple[str, ...]] = {
    "sgd": ("momentum", "dampening", "nesterov"),
    "rmsprop": ("alpha", "eps", "momentum", "centered"),
    "adagrad": ("eps", "lr_decay"),
}
"""The ``optim_args`` that transformers' Trainer reads for each optimizer; the others have none."""

_ALL_ARGS = tuple(dict.fromkeys(name for names in _ARGS.values() for name in names))

_Args: TypeAlias = tuple[tuple[str, float | bool], ...]


def supported_optimizer(value: object) -> object:
    """Return ``value`` in the spelling of :data:`OptimizerName`.

    Raises:
        UnsupportedError: ``value`` is an optimizer of transformers that is not supported.
    """
    name = getattr(value, "value", value)
    if not isinstance(name, str):
        return value
    if name in _REFUSED:
        raise UnsupportedError(
            f"optim: expected one of {', '.join(get_args(OptimizerName))}, found {quoted(name)}: {_REFUSED[name]}. "
            "Write one of these."
        )
    return _OTHER_SPELLINGS.get(name, name)


def optimizer_args(value: object) -> _Args:
    """Return ``optim_args`` as sorted pairs of names and values.

    Args:
        value: A mapping, or text such as ``"momentum=0.9,nesterov=true"`` as in transformers' ``TrainingArguments``.

    Raises:
        ValueError: ``value`` is neither, or has a name or a value that no optimizer takes.
    """
    pairs = _pairs_of_text(value) if isinstance(value, str) else pairs_of({} if value is None else value)
    if pairs is None:
        raise ValueError(
            f"should map settings of the optimizer to values, found {quoted(value)}. Write for example "
            "{momentum: 0.9}, or 'momentum=0.9,nesterov=true'."
        )
    return tuple(sorted((_known(name), _value(name, given)) for name, given in pairs if given is not None))


def check_optimizer_args(optim: OptimizerName, args: Mapping[str, float | bool]) -> None:
    """Check that ``optim`` takes ``args``, and that they are consistent.

    Raises:
        ValueError: ``optim`` does not take one of them, or they contradict each other.
    """
    foreign = next((name for name in args if name not in _ARGS.get(optim, ())), None)
    if foreign is not None:
        own = ", ".join(_ARGS[optim]) if optim in _ARGS else "none"
        raise ValueError(
            f"optim_args should have settings of optim {optim!r} ({own}), found {foreign!r}. Remove it, or tie the two "
            "keys with paired."
        )
    if args.get("nesterov") and (not args.get("momentum") or args.get("dampening")):
        raise ValueError(
            f"optim_args should have a momentum above 0 and no dampening with nesterov, found momentum "
            f"{args.get('momentum', 0.0)} and dampening {args.get('dampening', 0.0)}. Correct one of them."
        )


def _pairs_of_text(text: str) -> tuple[tuple[str, Any], ...] | None:
    parts = [part.split("=") for part in text.replace(" ", "").split(",") if part]
    if any(len(part) != 2 for part in parts) or len({part[0] for part in parts}) < len(parts):
        return None
    return tuple((name, given) for name, given in parts)


def _known(name: str) -> str:
    if name == "weight_decay":
        raise ValueError(
            "should not have weight_decay, which transformers' Trainer ignores there, found it. Write the key "
            "weight_decay beside optim."
        )
    if name not in _ALL_ARGS:
        raise ValueError(
            f"should have settings of optimizers ({', '.join(_ALL_ARGS)}), found {quoted(name)}. Correct it."
        )
    return name


def _value(name: str, given: Any) -> float | bool:
    if name in _FLAGS:
        flag = given if isinstance(given, bool) else _WORDS.get(str(given).lower())
        if flag is None:
            raise ValueError(f"should have true or false for {name}, found {quoted(given)}. Write one of them.")
        return flag
    try:
        number = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or (name in _NON_NEGATIVE and number < 0):
        domain = "a finite number >= 0" if name in _NON_NEGATIVE else "a finite number"
        raise ValueError(f"should have {domain} for {name}, found {quoted(given)}. Write such a value.")
    return number
