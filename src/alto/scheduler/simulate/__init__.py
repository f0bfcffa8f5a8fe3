"""The queue under a virtual clock: how methods schedule a set of tasks, and how many GPUs are enough. Pure."""

from alto.scheduler.simulate.run import MAX_SOLVED, nodes_of, simulate, smallest_cluster

__all__ = ["MAX_SOLVED", "nodes_of", "simulate", "smallest_cluster"]
