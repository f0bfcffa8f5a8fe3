"""``target_parameters`` of a job, and the settings that cannot be combined with it."""

from __future__ import annotations

import re
from typing import Any, Protocol

from alto.spec.module_names import ALL_LINEAR
from alto.spec.quoting import quoted

__all__ = ["check_targets", "parameter_names"]

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
            f"optim should be 'adamw_torch' with target_parameters, found {quoted(config.optim)}, whose state would "
            "have other shapes than that of PEFT's matrices. Remove one of the two."
        )
