"""Runs tasks on a device: trains, evaluates and saves their jobs."""

from alto.executor.beginning import RunInputs, model_notes
from alto.executor.conclusion import Hooks
from alto.executor.context import JobState, TaskContext, initial_states
from alto.executor.executor import Executor, run_alone
from alto.executor.init_adapter import InitAdapter
from alto.executor.micro_batches import MicroBatches
from alto.executor.planned_job import resolve_early_exit, resolve_rungs
from alto.executor.ranks import Ranks
from alto.executor.recovery import ResumeState, check_base, check_precision, read_oom_record, recover
from alto.executor.session import TaskSession
from alto.executor.shared_bank import BankSize, SharedBank, build_trainer
from alto.executor.stages import load_base, with_references
from alto.executor.trainer import Trainer

__all__ = [
    "BankSize",
    "Executor",
    "Hooks",
    "InitAdapter",
    "JobState",
    "MicroBatches",
    "Ranks",
    "ResumeState",
    "RunInputs",
    "SharedBank",
    "TaskContext",
    "TaskSession",
    "Trainer",
    "build_trainer",
    "check_base",
    "check_precision",
    "initial_states",
    "load_base",
    "model_notes",
    "read_oom_record",
    "recover",
    "resolve_early_exit",
    "resolve_rungs",
    "run_alone",
    "with_references",
]
