"""Pages of rows in the total order of their numbers."""

from __future__ import annotations

from typing import Any, TypeVar

from sqlalchemy import Select
from sqlalchemy.orm import InstrumentedAttribute, Session

__all__ = ["page_of"]

Row = TypeVar("Row")


def page_of(
    session: Session,
    statement: Select[Row],
    number: InstrumentedAttribute[Any],
    *,
    after: int | None,
    limit: int,
    is_ascending: bool = False,
) -> tuple[list[Row], bool]:
    """The next rows of ``statement``, and whether there are more behind them.

    Args:
        statement: Rows without an order.
        number: Column that numbers them.
        after: Number of the row before the page; None begins with the first row.
        limit: Most rows.
        is_ascending: Oldest first; else newest first.
    """
    if after is not None:
        statement = statement.where(number > after if is_ascending else number < after)
    statement = statement.order_by(number.asc() if is_ascending else number.desc()).limit(limit + 1)
    rows = list(session.scalars(statement))
    return rows[:limit], len(rows) > limit
