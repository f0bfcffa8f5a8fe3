"""Initial weights of an adapter."""

from __future__ import annotations

from typing import Literal, TypeAlias

from alto.base import quoted
from alto.errors import UnsupportedError

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
