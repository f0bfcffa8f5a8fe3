"""Pages of rows, ordered by their numbers."""

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
    """Return the next rows of ``statement``, and whether more rows follow.

    Args:
        statement: Query without an order.
        number: Column that numbers the rows.
        after: Number of the last row of the previous page; None begins with the first row.
        is_ascending: Whether the oldest row comes first; else the newest.
    """
    if after is not None:
        statement = statement.where(number > after if is_ascending else number < after)
    statement = statement.order_by(number.asc() if is_ascending else number.desc()).limit(limit + 1)
    rows = list(session.scalars(statement))
    return rows[:limit], len(rows) > limit
