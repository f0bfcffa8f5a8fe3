"""The name of every event in a journal: the only place in ``alto`` that spells these names."""

from __future__ import annotations

from collections.abc import Mapping

from alto.runs.events import job_events as job
from alto.runs.events import queue_events as queue
from alto.runs.events import run_events as run

__all__ = ["CLASSES", "RELAYED", "WIRE_NAMES"]

WIRE_NAMES: Mapping[type, str] = {
    run.TaskStarted: "task_started",
    run.TaskResumed: "task_resumed",
    run.ProfileMeasured: "profile",
    run.KernelsCompiled: "kernels_compiled",
    run.BaseEvaluated: "base_evaluated",
    job.JobAdmitted: "job_admitted",
    job.JobResumed: "job_resumed",
    job.TrainSteps: "train",
    job.JobEvaluated: "eval",
    job.BestMeasured: "best_measured",
    job.JobParked: "job_parked",
    run.RungScored: "rung_scored",
    run.WarmupEnded: "warmup_ended",
    job.JobExited: "job_exited",
    job.JobCompleted: "job_completed",
    job.JobAdded: "job_added",
    job.JobReopened: "job_reopened",
    run.CommandRefused: "command_refused",
    run.OutOfMemory: "oom",
    run.GpusOffered: "gpus_offered",
    run.CheckpointSaved: "checkpoint",
    run.ShareReceived: "share_received",
    run.TaskInterrupted: "task_interrupted",
    run.FinalistsJudged: "finalists_judged",
    run.SamplesGenerated: "samples_generated",
    run.AdapterChecked: "adapter_checked",
    run.TaskCompleted: "task_completed",
    queue.QueueStarted: "queue_started",
    queue.QueueResumed: "queue_resumed",
    queue.TaskSubmitted: "task_submitted",
    queue.TaskCancelled: "task_cancelled",
    queue.SchedulePlanned: "planned",
    queue.ExecutorStarted: "executor_started",
    queue.ExecutorExited: "executor_ended",
    queue.TaskGivenUp: "task_given_up",
    queue.GpuLost: "gpu_lost",
    queue.GpuAdded: "gpu_added",
    queue.QueueInterrupted: "queue_interrupted",
    queue.QueueCompleted: "queue_completed",
    queue.MeasuringBegun: "measuring",
    queue.TaskMeasured: "measured",
}
"""Name in journals by class."""

RELAYED = "relayed"
"""Name of the event that holds an event of another journal; only observers see it."""

CLASSES: Mapping[str, type] = {name: event for event, name in WIRE_NAMES.items()}
"""Class by name in journals."""
