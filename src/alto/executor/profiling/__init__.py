"""What a task takes of this device, measured before it is trained: memory, packing, time."""

from alto.executor.profiling.planning import USUAL_TOKENS_PER_PASS, pack, plan

__all__ = ["USUAL_TOKENS_PER_PASS", "pack", "plan"]
