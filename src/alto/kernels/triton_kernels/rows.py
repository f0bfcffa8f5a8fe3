"""Loads and stores of columns of a row of the bank; the last block may extend into another row."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_columns", "store_columns"]


@triton.jit
def load_columns(row_P, columns, end, IS_FULL: tl.constexpr):
    """Return ``row[columns]``, zero from ``end`` on.

    Args:
        IS_FULL: Whether all columns are known to lie before ``end``.
    """
    if IS_FULL:
        return tl.load(row_P + columns)
    else:
        return tl.load(row_P + columns, mask=columns < end, other=0.0)


@triton.jit
def store_columns(row_P, columns, values, end, IS_FULL: tl.constexpr):
    """Write ``row[columns] = values`` before ``end``."""
    if IS_FULL:
        tl.store(row_P + columns, values)
    else:
        tl.store(row_P + columns, values, mask=columns < end)
