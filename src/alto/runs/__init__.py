"""A run on disk: its folder, its journal, and what the journal tells. No torch here."""

from alto.runs.files import replace_file, sync_folder, writing
from alto.runs.history import JobHistory, Occupancy, RungOutcome, RunHistory, Stage, read_history
from alto.runs.journal import Event, Journal, Observer, cut_journal, read_events, read_intact_events
from alto.runs.mailbox import Action, Answer, Command, Mailbox
from alto.runs.result import task_result
from alto.runs.run_dir import RunDir

__all__ = [
    "Action",
    "Answer",
    "Command",
    "Event",
    "JobHistory",
    "Journal",
    "Mailbox",
    "Observer",
    "Occupancy",
    "RunDir",
    "RunHistory",
    "RungOutcome",
    "Stage",
    "cut_journal",
    "read_events",
    "read_history",
    "read_intact_events",
    "replace_file",
    "sync_folder",
    "task_result",
    "writing",
]
