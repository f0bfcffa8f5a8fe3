"""Names of row forms and column roles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from alto.base import quoted

RowFormName = Literal[
    "auto",
    "messages",
    "sharegpt",
    "prompt_completion",
    "raw_prompt_completion",
    "alpaca",
    "text",
    "preference",
    "raw_preference",
    "openai_preference",
    "unpaired_preference",
    "text_classification",
]


_COLUMN_ROLES = (
    *("messages", "system", "prompt", "completion", "instruction", "input", "output", "history", "text", "text_pair"),
    *("chosen", "rejected", "preferred_output", "non_preferred_output", "label"),
    *("tools", "functions", "chat_template_kwargs"),
)
"""Roles of a dataset's columns: the keys of ``columns``."""


ROW_COLUMNS = frozenset({*_COLUMN_ROLES, "conversations", "question", "answer", "response", "sentence"})
"""Usual names of columns; rows are recognised by them."""


def check_columns(columns: object) -> dict[str, str]:
    """Check ``columns`` of a task or a source and return it as a dictionary.

    Raises:
        ValueError: It does not map roles to different columns.
    """
    if not isinstance(columns, Mapping) or not all(
        isinstance(item, str) and item for pair in columns.items() for item in pair
    ):
        raise ValueError(
            f"should map roles to names of the dataset's columns, found {quoted(columns)}. "
            "Write for example {prompt: question, completion: solution}."
        )
    unknown = [role for role in columns if role not in _COLUMN_ROLES]
    if unknown:
        raise ValueError(
            f"should have roles as keys, found {quoted(unknown[0])}; roles are {', '.join(_COLUMN_ROLES)}. Write the "
            "dataset's name of the column on the right."
        )
    if len(set(columns.values())) < len(columns):
        raise ValueError(f"should give every role a different column, found {quoted(dict(columns))}. Remove one.")
    return dict(columns)


def label_names(value: object) -> tuple[str, ...]:
    """Check ``id2label`` of a task and return the names in order.

    Args:
        value: A list of names, or a mapping from the indices 0 to K - 1 to names.

    Raises:
        ValueError: ``value`` is neither, or two names are the same.
    """
    given: list[object] = list(value) if isinstance(value, list | tuple) else []
    if isinstance(value, Mapping):
        indices = {str(key): name for key, name in value.items()}
        given = [indices.get(str(index)) for index in range(len(value))]
    names = [name for name in given if isinstance(name, str) and name]
    if not names or len(set(names)) < len(given):
        raise ValueError(
            f"should give labels 0 to K - 1 different names, found {quoted(value)}. Write for example {{0: negative, "
            "1: positive}; put names that look like numbers or truth values in quotes."
        )
    return tuple(names)
