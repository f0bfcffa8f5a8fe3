"""Learning-rate schedules of transformers that need no metric, with their ``lr_scheduler_kwargs``.

Source: ``transformers/optimization.py`` 5.23. Every factor is computed with the same order of operations, so that
learning rates are equal to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

from alto.base import quoted
from alto.errors import UnsupportedError
from alto.spec.module_names import Pairs, pairs_of
from alto.spec.validation import is_finite_number

LrSchedulerType: TypeAlias = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]

_REFUSED = {
    "reduce_lr_on_plateau": "its rate depends on the evaluations, which early exit and rungs read at other steps",
    "greedy": "its rate depends on the losses of the steps so far",
}
_SHAPES = ("linear", "cosine", "1-sqrt")
_CYCLES = ("num_cycles",)
_MIN = ("min_lr", "min_lr_rate")
KWARGS_OF_SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": _CYCLES,
    "cosine_with_restarts": _CYCLES,
    "polynomial": ("lr_end", "power"),
    "constant": (),
    "constant_with_warmup": (),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": (*_CYCLES, *_MIN),
    "cosine_warmup_with_min_lr": (*_CYCLES, *_MIN, "warmup_lr_rate"),
    "warmup_stable_decay": (
        *("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio"),
        *_CYCLES,
    ),
}
"""The ``lr_scheduler_kwargs`` that each schedule takes."""

DOMAINS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "num_cycles": ("a number > 0", lambda value: is_finite_number(value) and value > 0),
    "lr_end": ("a number >= 0", lambda value: is_finite_number(value) and value >= 0),
    "power": ("a number > 0", lambda value: is_finite_number(value) and value > 0),
    "timescale": ("a whole number >= 1", lambda value: _is_whole(value) and value >= 1),
    "min_lr": ("a number >= 0", lambda value: is_finite_number(value) and value >= 0),
    "min_lr_rate": ("a share from 0 to 1", lambda value: is_finite_number(value) and 0 <= value <= 1),
    "warmup_lr_rate": ("a share from 0 to 1", lambda value: is_finite_number(value) and 0 <= value <= 1),
    "num_decay_steps": ("a whole number >= 0", lambda value: _is_whole(value) and value >= 0),
    "num_stable_steps": ("a whole number >= 0", lambda value: _is_whole(value) and value >= 0),
    "warmup_type": ("'linear', 'cosine' or '1-sqrt'", lambda value: value in _SHAPES),
    "decay_type": ("'linear', 'cosine' or '1-sqrt'", lambda value: value in _SHAPES),
    "min_lr_ratio": ("a share from 0 to 1", lambda value: is_finite_number(value) and 0 <= value <= 1),
}
"""The allowed values of each setting: in words, and as a test."""


def supported_scheduler(value: object) -> object:
    """Return ``value`` unless it is an unsupported schedule; a member of transformers' enumeration becomes its text.

    Raises:
        UnsupportedError: The schedule depends on losses.
    """
    name = getattr(value, "value", value)
    if isinstance(name, str) and name in _REFUSED:
        raise UnsupportedError(
            f"lr_scheduler_type: expected a schedule that is fixed before the job starts, found {quoted(name)}: "
            f"{_REFUSED[str(name)]}. Use a different schedule, such as 'cosine'."
        )
    return name


def scheduler_kwargs(value: object) -> Pairs:
    """Return ``value`` of ``lr_scheduler_kwargs`` as sorted pairs; settings that are null are left out."""
    pairs = pairs_of(value)
    if pairs is None:
        raise ValueError(
            f"should map settings of the schedule to values, found {quoted(value)}. For example: {{min_lr_rate: 0.1}}."
        )
    for key, item in pairs:
        if key not in DOMAINS:
            raise ValueError(
                f"should have settings of schedules as keys ({', '.join(DOMAINS)}), found {quoted(key)}. Correct it, "
                "or remove it."
            )
        domain, is_allowed = DOMAINS[key]
        if item is not None and not is_allowed(item):
            raise ValueError(f"should have {domain} for {key}, found {quoted(item)}. Correct the value.")
    return tuple(sorted((key, item) for key, item in pairs if item is not None))


def check_schedule(name: LrSchedulerType, kwargs: Mapping[str, Any], learning_rate: float) -> None:
    """Check that the schedule ``name`` takes ``kwargs``."""
    foreign = [key for key in kwargs if key not in KWARGS_OF_SCHEDULES[name]]
    if foreign:
        known = ", ".join(KWARGS_OF_SCHEDULES[name]) or "none"
        raise ValueError(
            f"lr_scheduler_kwargs should have settings of lr_scheduler_type {name!r} ({known}), found {foreign[0]!r}. "
            "Remove it, or name the schedule it belongs to."
        )
    if "min_lr" in KWARGS_OF_SCHEDULES[name] and len([key for key in _MIN if key in kwargs]) != 1:
        found = " and ".join(key for key in _MIN if key in kwargs) or "neither"
        raise ValueError(
            f"lr_scheduler_type {name!r} should have one of min_lr and min_lr_rate in lr_scheduler_kwargs, found "
            f"{found}. For example: {{min_lr_rate: 0.1}}."
        )
    if name == "warmup_stable_decay" and "num_decay_steps" not in kwargs:
        raise ValueError(
            "lr_scheduler_type 'warmup_stable_decay' should have num_decay_steps in lr_scheduler_kwargs, found none. "
            "For example: {num_decay_steps: 100}."
        )
    if name == "polynomial" and not learning_rate > kwargs.get("lr_end", _LR_END):
        raise ValueError(
            f"lr_scheduler_type 'polynomial' should end at a rate below learning_rate, found lr_end "
            f"{kwargs.get('lr_end', _LR_END)} and learning_rate {learning_rate}. Lower lr_end in lr_scheduler_kwargs."
        )


_LR_END = 1e-7


def schedule_factor(
    name: LrSchedulerType,
    step: int,
    *,
    warmup: int,
    total_steps: int,
    learning_rate: float,
    kwargs: Mapping[str, Any],
) -> float:
    """Return the learning rate of the step with 0-based index ``step``, divided by the peak ``learning_rate``.

    Args:
        kwargs: Settings that :func:`check_schedule` has checked.
    """
    if name == "constant":
        return 1.0
    if name == "warmup_stable_decay":
        return _stable_decay(step, warmup, total_steps, kwargs)
    if name == "cosine_warmup_with_min_lr":
        return _warm_cosine(step, warmup, total_steps, learning_rate, kwargs)
    if step < warmup:
        return step / warmup
    decay_steps = max(1, total_steps - warmup)
    progress = (step - warmup) / decay_steps
    match name:
        case "constant_with_warmup":
            return 1.0
        case "linear":
            return max(0.0, (total_steps - step) / decay_steps)
        case "cosine":
            return max(0.0, _wave(kwargs.get("num_cycles", 0.5), progress))
        case "cosine_with_min_lr":
            return _raised(_wave(kwargs.get("num_cycles", 0.5), progress), _min_rate(kwargs, learning_rate))
        case "cosine_with_restarts":
            if progress >= 1.0:
                return 0.0
            cycles = float(kwargs.get("num_cycles", 1))
            return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((cycles * progress) % 1.0))))
        case "polynomial":
            lr_end, power = kwargs.get("lr_end", _LR_END), kwargs.get("power", 1.0)
            if step > total_steps or total_steps <= warmup:
                return float(lr_end / learning_rate)
            left = 1 - (step - warmup) / (total_steps - warmup)
            return float(((learning_rate - lr_end) * left**power + lr_end) / learning_rate)
        case "inverse_sqrt":
            timescale = kwargs.get("timescale", warmup or 10_000)
            return 1.0 / math.sqrt((step + (timescale - warmup)) / timescale)


def _wave(num_cycles: float, progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * float(num_cycles) * 2.0 * progress))


def _raised(factor: float, lowest: float) -> float:
    return max(0.0, factor * (1 - lowest) + lowest)


def _min_rate(kwargs: Mapping[str, Any], learning_rate: float) -> float:
    return float(kwargs["min_lr"] / learning_rate if "min_lr" in kwargs else kwargs["min_lr_rate"])


def _warm_cosine(step: int, warmup: int, total_steps: int, learning_rate: float, kwargs: Mapping[str, Any]) -> float:
    if step < warmup:
        if "warmup_lr_rate" not in kwargs:
            return (step + 1.0) / max(1.0, warmup)
        first = float(kwargs["warmup_lr_rate"])
        return first + (1.0 - first) * step / max(1, warmup - 1)
    progress = (step - warmup + 1.0) / max(1.0, total_steps - warmup)
    return _raised(_wave(kwargs.get("num_cycles", 0.5), progress), _min_rate(kwargs, learning_rate))


def _stable_decay(step: int, warmup: int, total_steps: int, kwargs: Mapping[str, Any]) -> float:
    decay, lowest = kwargs["num_decay_steps"], kwargs.get("min_lr_ratio", 0)
    stable = kwargs.get("num_stable_steps", total_steps - warmup - decay)
    if step < warmup:
        progress = step / warmup
        match kwargs.get("warmup_type", "linear"):
            case "linear":
                factor = progress
            case "cosine":
                factor = 0.5 * (1.0 - math.cos(math.pi * progress))
            case _:
                factor = 1.0 - math.sqrt(1.0 - progress)
    elif step < warmup + stable:
        return 1.0
    elif step < warmup + stable + decay:
        progress = (step - warmup - stable) / max(1, decay)
        match kwargs.get("decay_type", "cosine"):
            case "linear":
                factor = 1.0 - progress
            case "cosine":
                factor = _wave(kwargs.get("num_cycles", 0.5), progress)
            case _:
                factor = 1.0 - math.sqrt(progress)
    else:
        return float(lowest)
    return float(_raised(factor, lowest))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
_NOT_HERE: Mapping[str, str] = {name: why for why, names in _WHY_REFUSED.items() for name in names}
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
    if name in _NOT_HERE:
        raise UnsupportedError(
            f"optim: expected one of {', '.join(get_args(OptimizerName))}, found {quoted(name)}: {_NOT_HERE[name]}. "
            "Use one of these."
        )
    return _OTHER_SPELLINGS.get(name, name)


def optimizer_args(value: object) -> _Args:
    """Return ``optim_args`` as sorted pairs of names and values.

    Args:
        value: A mapping, or text such as ``"momentum=0.9,nesterov=true"`` as in transformers' ``TrainingArguments``.
    """
    pairs = _pairs_of_text(value) if isinstance(value, str) else pairs_of(value)
    if pairs is None:
        raise ValueError(
            f"should map settings of the optimizer to values, found {quoted(value)}. For example: "
            "{momentum: 0.9}, or 'momentum=0.9,nesterov=true'."
        )
    return tuple(sorted((_known(name), _value(name, given)) for name, given in pairs if given is not None))


def check_optimizer_args(optim: OptimizerName, args: Mapping[str, float | bool]) -> None:
    """Check that ``optim`` takes ``args``, and that they are consistent."""
    foreign = next((name for name in args if name not in _ARGS.get(optim, ())), None)
    if foreign is not None:
        own = ", ".join(_ARGS[optim]) if optim in _ARGS else "none"
        raise ValueError(
            f"optim_args should have settings of optim {optim!r} ({own}), found {foreign!r}. Remove it, or vary the "
            "two keys together under 'paired'."
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
            "should not have weight_decay, which transformers' Trainer ignores there, found it. Set the key "
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
            raise ValueError(f"should have true or false for {name}, found {quoted(given)}. Use one of them.")
        return flag
    try:
        number = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or (name in _NON_NEGATIVE and number < 0):
        domain = "a finite number >= 0" if name in _NON_NEGATIVE else "a finite number"
        raise ValueError(f"should have {domain} for {name}, found {quoted(given)}. Correct the value.")
    return number
