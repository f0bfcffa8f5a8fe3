"""Parameters of requests for pages."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

__all__ = ["After", "Limit"]

After = Annotated[str | None, Query(max_length=200, description="id of the last object of the previous page")]
Limit = Annotated[int, Query(ge=1, le=100, description="maximum number of objects per page")]
