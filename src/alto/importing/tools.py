"""The tools whose configurations ALTO can import, and their detection."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from alto.errors import SpecError
from alto.importing import axolotl, llamafactory, trl
from alto.importing.draft import Draft
from alto.spec.quoting import quoted

__all__ = ["TOOLS", "Tool", "find_tool", "recognise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool whose configurations can be imported.

    Attributes:
        title: Name of the tool in messages.
        marks: Keys that identify its configurations.
        read: Converts a draft to a task; its second argument is the method that the user named, or None.
    """

    title: str
    marks: frozenset[str]
    read: Callable[[Draft, str | None], None]


TOOLS: Mapping[str, Tool] = {
    "llamafactory": Tool(title="LLaMA-Factory", marks=llamafactory.MARKS, read=llamafactory.read_llamafactory),
    "axolotl": Tool(title="Axolotl", marks=axolotl.MARKS, read=axolotl.read_axolotl),
    "trl": Tool(title="TRL", marks=trl.MARKS, read=trl.read_trl),
}
"""All tools by their names in the option ``--from``."""


def find_tool(name: str) -> Tool:
    """Return the tool called ``name``.

    Raises:
        SpecError: There is no such tool.
    """
    if name not in TOOLS:
        raise SpecError(f"--from: expected one of {', '.join(TOOLS)}, found {quoted(name)}. Write one of these.")
    return TOOLS[name]


def recognise(keys: Collection[str], where: str) -> Tool:
    """Return the tool that has the most of ``keys`` among its marks.

    Args:
        keys: Keys of the configuration.
        where: File of the configuration, for error messages.

    Raises:
        SpecError: No tool has any of the keys, two tools have equally many, or the configuration is a W&B sweep.
    """
    if {"parameters", "method"} <= set(keys):
        raise SpecError(
            f"{where}: expected a configuration of {', '.join(tool.title for tool in TOOLS.values())}, found a sweep "
            "of W&B. Import the configuration that it varies, and give the sweep's parameters unchanged: --set "
            "'search_space={learning_rate: {distribution: log_uniform_values, min: 1e-5, max: 1e-3}}'."
        )
    counts = {name: len(tool.marks.intersection(keys)) for name, tool in TOOLS.items()}
    most = max(counts.values())
    best = [name for name, count in counts.items() if count == most]
    if most == 0 or len(best) > 1:
        found = "none of their keys" if most == 0 else f"as many keys of {' as of '.join(best)}"
        raise SpecError(
            f"{where}: expected a configuration of {', '.join(tool.title for tool in TOOLS.values())}, found "
            f"{found}. Name the tool with --from {' or '.join(TOOLS)}."
        )
    return TOOLS[best[0]]
