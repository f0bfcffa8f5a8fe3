"""Measures the memory and time that a task takes on this device, and plans the packing of its jobs, before training."""

from alto.executor.profiling.planning import USUAL_TOKENS_PER_PASS, pack, plan
from alto.executor.profiling.threads import kept_thread_times, using_threads

__all__ = ["USUAL_TOKENS_PER_PASS", "kept_thread_times", "pack", "plan", "using_threads"]
