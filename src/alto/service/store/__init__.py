"""The database: what was accepted, from whom, and what became of it."""

from alto.service.store.store import Store

__all__ = ["Store"]
