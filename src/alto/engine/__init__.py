"""The wiring: profile, schedule, execute, select, export."""

from alto.engine.engine import Engine

__all__ = ["Engine"]
