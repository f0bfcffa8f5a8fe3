"""Measures the memory and time that a task takes on this device, and plans the packing of its jobs, before training."""

from alto.executor.profiling.planning import USUAL_TOKENS_PER_PASS, pack, plan

__all__ = ["USUAL_TOKENS_PER_PASS", "pack", "plan"]
