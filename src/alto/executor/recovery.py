"""Going back to the last committed checkpoint of a run whose process has died."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alto.data import TaskData, digest_of
from alto.errors import RunError, RunNotFoundError
from alto.executor.checkpoint import Kind, StateStore
from alto.runs import Event, RunDir, cut_journal, read_intact_events, replace_file, writing
from alto.spec import JobConfig, Task
from alto.spec.metric import LOSS

__all__ = ["Past", "check_data", "check_jobs", "data_fingerprint", "note_refusal", "read_refusal", "recover"]

_REFUSAL_FILE = "oom.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What a run goes on from.

    Attributes:
        events: The journal up to the checkpoint; empty for a run that begins.
        notes: What was lost on the way back, in sentences.
        refusal: An ``oom`` event for the journal: the smallest pass that ended an attempt of several ranks.
    """

    events: Sequence[Event] = ()
    notes: tuple[str, ...] = ()
    refusal: Mapping[str, Any] | None = None

    @property
    def checkpoint(self) -> Event | None:
        """The event that the run goes on from; None if it begins at its first step."""
        return next((event for event in reversed(self.events) if event["event"] == "checkpoint"), None)

    @property
    def max_tokens_per_pass(self) -> int | None:
        """Tokens of a pass after memory last ran out; None if it never did."""
        limits = [event["max_tokens_per_pass"] for event in self.events if event["event"] == "oom"][-1:]
        limits += [self.refusal["max_tokens_per_pass"]] if self.refusal is not None else []
        return min(limits, default=None)

    @property
    def is_finished(self) -> bool:
        """Whether the task has its result."""
        return bool(self.events) and self.events[-1]["event"] == "task_completed"


def recover(run: RunDir) -> Past:
    """Cut the journal and the states of ``run`` back to its last checkpoint that is whole.

    A damaged checkpoint, journal line or state costs what came after the checkpoint before it; without any checkpoint
    the run begins anew. A finished run is left as it is. Doing it twice, or dying while doing it, changes nothing.

    Raises:
        RunWriteError: The run directory cannot be written.
    """
    try:
        events = read_intact_events(run.journal_file)
    except RunNotFoundError:
        events = []
    past = Past(events=events)
    if past.is_finished:
        return past
    store = StateStore(run)
    ends = [index for index, event in enumerate(events, start=1) if event["event"] == "checkpoint"]
    end = next((end for end in reversed(ends) if _restored(store, events[end - 1])), 0)
    if not end:
        store.restore({})
    num_damaged = sum(other > end for other in ends)
    if run.journal_file.exists():
        cut_journal(run.journal_file, end)
    notes = _notes(num_damaged, begins_anew=not end)
    return Past(events=events[:end], notes=notes, refusal=read_refusal(run))


def note_refusal(run: RunDir, facts: Mapping[str, Any]) -> None:
    """Keep, for the next attempt, what a pass of this one did not fit into; ``facts`` are those of an ``oom`` event.

    Raises:
        RunWriteError: The run directory cannot be written.
    """
    with writing(run.root, run.root / _REFUSAL_FILE):
        replace_file(run.root / _REFUSAL_FILE, json.dumps(facts) + "\n")


def read_refusal(run: RunDir) -> Mapping[str, Any] | None:
    """The facts of an ``oom`` event that ended an attempt of several ranks; None where none did."""
    try:
        facts: Mapping[str, Any] = json.loads((run.root / _REFUSAL_FILE).read_text("utf-8"))
    except FileNotFoundError:
        return None
    return facts


def data_fingerprint(data: TaskData) -> str:
    """A digest of every token and every target of a task's data, and of how its pairs are laid out."""
    return digest_of(data.train, data.validation)


def check_data(started: Event, data: TaskData) -> None:
    """Make sure that a run goes on with the data it began with.

    Raises:
        RunError: Rows, tokenizer, chat template or max_length are other ones.
    """
    if (started.get("data") or {}).get("fingerprint") != data_fingerprint(data):
        raise RunError(
            f"expected the data that the run began with, found other rows or tokens in {started.get('dataset')}; "
            "put the files (and the model's tokenizer) back as they were, or start a new run with: alto tune"
        )


def check_jobs(started: Event, configs: Mapping[str, JobConfig], task: Task) -> None:
    """Make sure that a run goes on with the jobs, the method, the metric and the early-exit settings it began with.

    Raises:
        RunError: ``task.yaml`` says something else now.
    """
    changed = [entry["job"] for entry in started["jobs"] if configs.get(entry["job"]) != JobConfig(**entry["config"])]
    if started["early_exit"] != task.early_exit.resolved().model_dump(mode="json"):
        changed.append("early_exit")
    if started["method"] != task.method:
        changed.append("method")
    if started.get("metric", LOSS) != task.metric:
        changed.append("metric")
    if changed:
        raise RunError(
            f"expected task.yaml to be as it was when the run began, found other settings of {', '.join(changed)}; "
            "put it back, change single jobs with: alto job clone, or start a new run with: alto tune"
        )


def _restored(store: StateStore, checkpoint: Event) -> bool:
    try:
        states = _states(checkpoint)
    except (KeyError, TypeError, AttributeError):
        return False
    return store.restore(states)


def _states(checkpoint: Event) -> dict[tuple[str, Kind], int]:
    jobs: Mapping[str, Mapping[str, Any]] = checkpoint["jobs"]
    last: dict[tuple[str, Kind], int] = {(job, "last"): at["step"] for job, at in jobs.items()}
    best: dict[tuple[str, Kind], int] = {(job, "best"): at["best_step"] for job, at in jobs.items() if at["best_step"]}
    return last | best


def _notes(num_damaged: int, *, begins_anew: bool) -> tuple[str, ...]:
    if not num_damaged:
        return ()
    subject = "The last checkpoint is" if num_damaged == 1 else f"The last {num_damaged} checkpoints are"
    return (f"{subject} damaged; the run " + ("begins anew." if begins_anew else "goes on from the one before."),)
