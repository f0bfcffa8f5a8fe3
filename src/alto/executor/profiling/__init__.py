"""What a task takes of this device, measured before it is trained: memory, packing, time."""

from alto.executor.profiling import cache
from alto.executor.profiling.planning import USUAL_TOKENS_PER_PASS, Subject, pack, plan
from alto.executor.profiling.profile import weights_of

__all__ = ["USUAL_TOKENS_PER_PASS", "Subject", "cache", "pack", "plan", "weights_of"]
