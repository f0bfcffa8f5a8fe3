"""Runs many tasks: a controller drives the queue, a cluster launches executors on this machine or on Ray."""

from alto.cluster.base import Cluster, ClusterEvent, ExecutorEnded, GpuCame, GpuGone, Launch, Outcome, Told
from alto.cluster.choice import open_cluster
from alto.cluster.controller import Controller
from alto.cluster.entry import error_class
from alto.cluster.solver import GuardedSolver

__all__ = [
    "Cluster",
    "ClusterEvent",
    "Controller",
    "ExecutorEnded",
    "GpuCame",
    "GpuGone",
    "GuardedSolver",
    "Launch",
    "Outcome",
    "Told",
    "error_class",
    "open_cluster",
]
