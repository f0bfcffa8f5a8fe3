"""Two finished runs side by side in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from alto.export.wording import (
    clean,
    format_duration,
    format_loss,
    format_setting,
    format_share,
    short_name,
    short_path,
)

__all__ = ["comparison_table"]


def comparison_table(
    run_dirs: tuple[str, str],
    facts: Mapping[str, tuple[Any, Any]],
    settings: Mapping[str, tuple[Any, Any]],
    *,
    same_data: bool | None,
    same_loss: bool,
) -> RenderableType:
    """The facts of two runs, then the settings of their best jobs that differ.

    Args:
        run_dirs: Their folders.
        facts, settings, same_data, same_loss: As of :class:`alto.results.RunComparison`.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for run_dir in run_dirs:
        table.add_column(clean(short_path(run_dir)), justify="right", overflow="fold")
    for name, values in facts.items():
        table.add_row(clean(name), *(_format(name, value) for value in values))
    if settings:
        table.add_section()
    for key, values in settings.items():
        table.add_row(f"best job: {clean(short_name(key))}", *map(format_setting, values))
    return Group(table, *_warnings(settings, same_data=same_data, same_loss=same_loss))


def _warnings(settings: Mapping[str, tuple[Any, Any]], *, same_data: bool | None, same_loss: bool) -> list[Text]:
    found = []
    if same_data is False:
        found.append(Text("The runs have other rows, or other tokens of them: their losses cannot be compared."))
    if same_data is None:
        found.append(Text("A journal does not record its rows: whether the losses can be compared is not known."))
    if not same_loss:
        found.append(Text("The best jobs have other losses, by method or by its settings: they cannot be compared."))
    if not settings:
        found.append(Text("The best jobs have the same configuration."))
    return found


def _format(name: str, value: Any) -> str:
    if name == "seconds":
        return format_duration(value)
    if name == "samples saved":
        return format_share(value)
    if isinstance(value, float):
        return format_loss(value)
    return f"{value:,}" if isinstance(value, int) else format_setting(value)
