"""Runs and queues of runs on disk: their folders, their journals, and the state derived from the journals. Without
torch."""

from alto.base import replace_file
from alto.runs.background import FLUSH_TIMEOUT_S, BackgroundObserver, ending_in_time, in_background
from alto.runs.events import Event, JournalEntry
from alto.runs.history import RunHistory, history_before, read_history
from alto.runs.job_history import JobHistory, RunStatus, Stage
from alto.runs.journal import (
    NOT_FOLDABLE,
    Journal,
    JournalTail,
    Observer,
    SilentJournal,
    cut_journal,
    read_entries,
    read_events,
    read_intact_entries,
    read_intact_events,
)
from alto.runs.mailbox import Command, CommandAnswer, JobAction, Mailbox, QueueAction, QueueCommand, QueueMailbox
from alto.runs.overview import RunState, RunSummary, find_runs, latest_run, summarise
from alto.runs.queue_dir import QueueContent, QueueDir, QueueEntry
from alto.runs.queue_history import (
    Attempt,
    QueueHistory,
    QueueProgress,
    TaskHistory,
    TaskStage,
    gpus_to_json,
    read_queue_history,
)
from alto.runs.result import check_can_continue, has_result, kept_jobs, remove_states, task_outcome
from alto.runs.run_dir import METRICS_NAME, RunDir, load_run_task

__all__ = [
    "FLUSH_TIMEOUT_S",
    "METRICS_NAME",
    "NOT_FOLDABLE",
    "Attempt",
    "BackgroundObserver",
    "Command",
    "CommandAnswer",
    "Event",
    "JobAction",
    "JobHistory",
    "Journal",
    "JournalEntry",
    "JournalTail",
    "Mailbox",
    "Observer",
    "QueueAction",
    "QueueCommand",
    "QueueContent",
    "QueueDir",
    "QueueEntry",
    "QueueHistory",
    "QueueMailbox",
    "QueueProgress",
    "RunDir",
    "RunHistory",
    "RunState",
    "RunStatus",
    "RunSummary",
    "SilentJournal",
    "Stage",
    "TaskHistory",
    "TaskStage",
    "check_can_continue",
    "cut_journal",
    "ending_in_time",
    "find_runs",
    "gpus_to_json",
    "has_result",
    "history_before",
    "in_background",
    "kept_jobs",
    "latest_run",
    "load_run_task",
    "read_entries",
    "read_events",
    "read_history",
    "read_intact_entries",
    "read_intact_events",
    "read_queue_history",
    "remove_states",
    "replace_file",
    "summarise",
    "task_outcome",
]
