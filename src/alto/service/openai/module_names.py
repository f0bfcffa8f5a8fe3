"""Module names in requests, which must be plain names. ALTO itself also takes regular expressions, but an expression
of a stranger can keep a process busy forever."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from alto.service.errors import refused
from alto.spec.keys import JOB_ALIASES
from alto.spec.quoting import quoted

__all__ = ["check_module_names"]

_FIELDS = frozenset(
    {
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_pattern",
        "modules_to_save",
        "rank_pattern",
        "alpha_pattern",
    }
)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


def check_module_names(values: Mapping[str, Any]) -> None:
    """Check that settings that name modules have only plain names, also in a search space and in lists.

    Raises:
        ApiError: A setting has something else.
    """
    for key, value in values.items():
        if JOB_ALIASES.get(key, key) in _FIELDS:
            for name in _texts(value):
                if _NAME.fullmatch(name) is None:
                    raise refused(
                        f"{key}: expected names of modules, such as q_proj, found {quoted(name)}; a service does not "
                        "accept regular expressions",
                        "hyperparameters",
                    )
        elif key in ("search_space", "paired") and isinstance(value, Mapping):
            check_module_names(value)


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value; for a mapping, the texts of its keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for each in value:
            yield from _texts(each)
