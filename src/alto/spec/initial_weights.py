"""Initial weights of an adapter."""

from __future__ import annotations

import re
from typing import Any, Literal, Protocol, TypeAlias

from alto.base import quoted
from alto.errors import UnsupportedError
from alto.spec.module_names import ALL_LINEAR

InitLoraWeights: TypeAlias = Literal["default", "gaussian", "orthogonal"]
"""The initial weights; ``default`` is PEFT's ``True``: ``A`` Kaiming-uniform and ``B`` zero. With ``orthogonal`` both
are random, and their product is zero."""

_CHANGES_THE_BASE = (
    "it subtracts the adapter's initial product from the base model's weights, which all jobs share and which must "
    "not change"
)
_NEEDS_DATA = "it is computed from forward or backward passes of the base model on the training rows"
_OTHER_INITS = {
    "corda": _CHANGES_THE_BASE,
    "loftq": _CHANGES_THE_BASE,
    "mica": "it is a variant of LoRA, in which B is not trained",
    "olora": _CHANGES_THE_BASE,
    "pissa": _CHANGES_THE_BASE,
    "eva": _NEEDS_DATA,
    "lora_ga": _NEEDS_DATA,
}
"""PEFT's other initialisations, by the beginning of their names, with the reason why they are refused."""


def supported_init(value: object) -> object:
    """Return ``value`` with true replaced by ``default`` and text in lower case.

    Raises:
        UnsupportedError: ``value`` is false or one of PEFT's other initialisations.
    """
    if value is True:
        return "default"
    if value is False:
        raise UnsupportedError(
            "init_lora_weights: expected 'default', 'gaussian' or 'orthogonal', found false: with A and B both "
            "random, training would not start from the base model. Remove the key."
        )
    if isinstance(value, str):
        value = value.lower()
        why = next((why for start, why in _OTHER_INITS.items() if value.startswith(start)), None)
        if why is not None:
            raise UnsupportedError(
                f"init_lora_weights: expected 'default', 'gaussian' or 'orthogonal', found {quoted(value)}: {why}. "
                "Write one of the three."
            )
    return value


_NAME = r"[A-Za-z0-9_.-]+"


class _Config(Protocol):
    """The fields of :class:`alto.spec.JobConfig` that :func:`check_targets` reads."""

    @property
    def target_modules(self) -> str | tuple[str, ...]: ...

    @property
    def target_parameters(self) -> tuple[str, ...] | None: ...

    @property
    def init_lora_weights(self) -> str: ...

    @property
    def lora_dropout(self) -> float: ...

    @property
    def optim(self) -> str: ...

    @property
    def bias(self) -> str: ...

    @property
    def use_dora(self) -> bool: ...


def parameter_names(value: Any) -> tuple[str, ...]:
    """Return ``target_parameters`` as sorted names of parameters.

    Raises:
        ValueError: ``value`` is not a name or a list of different names.
    """
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(
        isinstance(name, str) and re.fullmatch(_NAME, name) for name in names
    ):
        raise ValueError(
            f"should be a list of names of parameters, found {quoted(value)}. Write for example "
            "[experts.gate_up_proj, experts.down_proj]."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"should name each parameter once, found {quoted(value)}. Remove the repeated name.")
    return tuple(sorted(names))


def check_targets(config: _Config) -> None:
    """Check the modules and parameters that a job adapts.

    Raises:
        ValueError: There are none, or ``target_parameters`` is combined with a setting that it does not support.
    """
    if not config.target_modules and not config.target_parameters:
        raise ValueError(
            f"target_modules should be {ALL_LINEAR!r}, a module name, a list of names or a pattern, found []. "
            "Write for example [q_proj, v_proj]."
        )
    patterned = next(
        (key for key in ("rank_pattern", "alpha_pattern", "layers_to_transform") if getattr(config, key)), None
    )
    if config.target_parameters and patterned:
        raise ValueError(
            f"{patterned} should not come with target_parameters, found both: PEFT reads it differently for "
            "parameters and for modules. Remove one of the two."
        )
    if config.target_parameters and config.init_lora_weights == "orthogonal":
        raise ValueError(
            "init_lora_weights should be 'default' or 'gaussian' with target_parameters, found 'orthogonal', which "
            "initialises the matrices of all experts as one matrix. Remove one of the two."
        )
    if config.target_parameters and config.lora_dropout:
        raise ValueError(
            f"lora_dropout should be 0 with target_parameters, found {config.lora_dropout:g}: PEFT adds the adapter "
            "to the weights of experts, where there is no input to drop. Remove one of the two."
        )
    if config.target_parameters and config.use_dora:
        raise ValueError(
            "use_dora should be false with target_parameters, found true: PEFT has no DoRA for experts and "
            "routers. Remove one of the two."
        )
    if config.target_parameters and config.bias != "none":
        raise ValueError(
            f"bias should be 'none' with target_parameters, found {quoted(config.bias)}: PEFT's layers of experts and "
            "routers have no bias that it trains in this way. Remove one of the two."
        )
    if config.target_parameters and config.optim != "adamw_torch":
        raise ValueError(
            f"optim should be 'adamw_torch' with target_parameters, found {quoted(config.optim)}: the shapes of its "
            "state would not match those of PEFT's matrices. Remove optim or target_parameters."
        )
