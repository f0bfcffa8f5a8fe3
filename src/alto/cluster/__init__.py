"""Runs tasks: a controller owns the GPUs and drives the queue; a cluster launches executors here or on Ray."""

from alto.cluster.base import (
    AttemptEnded,
    Cluster,
    ClusterEvent,
    Ending,
    EntryWritten,
    GpuAdded,
    GpuLost,
    Launch,
    Outcome,
    TaskTicket,
    check_launch,
)
from alto.cluster.choice import open_cluster
from alto.cluster.controller import Controller, running_controller
from alto.cluster.dispatcher import ControllerStatus, Retrying, TaskStatus
from alto.cluster.host import Host, HostedRun, RunEnd, error_class, run_host
from alto.cluster.live_queue import LiveQueue, QueueIntake, answer_past_ends, past_ends, unique_name
from alto.cluster.processes import num_cores
from alto.cluster.solver import GuardedSolver

__all__ = [
    "AttemptEnded",
    "Cluster",
    "ClusterEvent",
    "Controller",
    "ControllerStatus",
    "Ending",
    "EntryWritten",
    "GpuAdded",
    "GpuLost",
    "GuardedSolver",
    "Host",
    "HostedRun",
    "Launch",
    "LiveQueue",
    "Outcome",
    "QueueIntake",
    "Retrying",
    "RunEnd",
    "TaskStatus",
    "TaskTicket",
    "answer_past_ends",
    "check_launch",
    "error_class",
    "num_cores",
    "open_cluster",
    "past_ends",
    "run_host",
    "running_controller",
    "unique_name",
]
