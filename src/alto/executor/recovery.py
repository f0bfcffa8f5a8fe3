"""Going back to the last committed checkpoint of a run whose process has died."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alto.backbone import base_differences
from alto.data import TaskData, digest_of
from alto.errors import RunChangedError, RunNotFoundError
from alto.executor.checkpoint import Kind, StateStore
from alto.runs import Event, RunDir, read_intact_events, replace_file, writing
from alto.spec import EarlyExit, JobConfig, Task
from alto.spec.metric import LOSS
from alto.spec.outside import read_json

__all__ = [
    "ResumeState",
    "check_base",
    "check_data",
    "check_jobs",
    "check_precision",
    "data_fingerprint",
    "note_refusal",
    "read_refusal",
    "recover",
]

_REFUSAL_FILE = "oom.json"

_FINGERPRINT = ("weights", "config", "code", "commit", "files")
_PRECISION = ("dtype", "load_in_4bit", "load_in_8bit", "adapter_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
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
    def base(self) -> Mapping[str, Any] | None:
        """Fingerprint and precision of the base model that it was trained on; None where version 0.1 began it, or where
        what the journal says of it is no such thing."""
        return next((event["base"] for event in reversed(self.events) if _is_base(event.get("base"))), None)

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


def recover(run: RunDir) -> ResumeState:
    """Put the states of ``run`` back to its last checkpoint that is whole; its journal is cut back when a `Journal` is
    opened with what is returned.

    A damaged checkpoint, journal line or state costs what came after the checkpoint before it; without any checkpoint
    the run begins anew. A finished run is left as it is. Doing it twice, or dying while doing it, changes nothing.

    Raises:
        RunWriteError: The run directory cannot be written.
    """
    try:
        events = read_intact_events(run.journal_file)
    except RunNotFoundError:
        events = []
    resume_state = ResumeState(events=events)
    if resume_state.is_finished:
        return resume_state
    store = StateStore(run)
    ends = [index for index, event in enumerate(events, start=1) if event["event"] == "checkpoint"]
    end = next((end for end in reversed(ends) if _restored(store, events[end - 1])), 0)
    if not end:
        store.restore({})
    num_damaged = sum(other > end for other in ends)
    refusal, is_damaged = _refusal(run)
    notes = _notes(num_damaged, begins_anew=not end)
    if is_damaged:
        notes += (f"{_REFUSAL_FILE} is damaged and is not used; how much memory a pass may take is found out again.",)
    return ResumeState(events=events[:end], notes=notes, refusal=refusal)


def note_refusal(run: RunDir, facts: Mapping[str, Any]) -> None:
    """Keep, for the next attempt, what a pass of this one did not fit into; ``facts`` are those of an ``oom`` event.

    Raises:
        RunWriteError: The run directory cannot be written.
    """
    with writing(run.root, run.root / _REFUSAL_FILE):
        replace_file(run.root / _REFUSAL_FILE, json.dumps(facts) + "\n")


def read_refusal(run: RunDir) -> Mapping[str, Any] | None:
    """The facts of an ``oom`` event that ended an attempt of several ranks; None where there is none to read."""
    refusal, _ = _refusal(run)
    return refusal


def data_fingerprint(data: TaskData) -> str:
    """A digest of every token and every target of a task's data, and of how its pairs are laid out."""
    return digest_of(data.train, data.validation)


def check_base(resume_state: ResumeState, found: Mapping[str, Any], *, model: str, remedy: str) -> None:
    """Make sure that ``found`` is the base model of a run; of one that says nothing of its base, nothing is known.

    Args:
        found: From :func:`alto.backbone.base_fingerprint`.
        model: Its name, for the message.

    Raises:
        RunChangedError: It is another one.
    """
    differences = base_differences(resume_state.base, found) if resume_state.base is not None else ()
    if differences:
        raise RunChangedError(
            f"model: expected the base model that the run began with, found {', '.join(differences)} in {model!r}; "
            f"{remedy}"
        )


def check_precision(resume_state: ResumeState, found: Mapping[str, Any]) -> None:
    """Make sure that base and adapters have the precision they had when the run began.

    Raises:
        RunChangedError: They have another one.
    """
    if resume_state.base is None:
        return
    changed = [key for key in _PRECISION if resume_state.base[key] != found[key]]
    if changed:
        raise RunChangedError(
            f"expected the precision that the run began with ({_named(resume_state.base, changed)}), found "
            f"{_named(found, changed)}; set it back in its task.yaml, or start a new run with: alto tune"
        )


def _is_base(found: object) -> bool:
    """Whether it is what :func:`alto.backbone.base_fingerprint` says of a model, and the precision."""
    if not isinstance(found, dict) or not found.keys() >= {*_FINGERPRINT, *_PRECISION}:
        return False
    files = found["files"]
    return isinstance(files, dict) and all(
        isinstance(file, list | tuple) and [type(number) for number in file] == [int, int] for file in files.values()
    )


def _named(facts: Mapping[str, Any], keys: Sequence[str]) -> str:
    return ", ".join(f"{key}: {json.dumps(facts[key]).strip(chr(34))}" for key in keys)


def check_data(started: Event, data: TaskData) -> None:
    """Make sure that a run goes on with the data it began with.

    Raises:
        RunChangedError: Rows, tokenizer, chat template or max_length are other ones.
    """
    if (started.get("data") or {}).get("fingerprint") != data_fingerprint(data):
        remedy = "put the files (and the model's tokenizer) back as they were, or start a new run with: alto tune"
        if "base" not in started:  # as version 0.1 began it
            remedy = (
                "version 0.1 of ALTO, which began it, made other tokens of some rows than this version does; if the "
                "files are as they were, a new run is needed: alto tune; if not, put them back, then go on with: "
                "alto resume"
            )
        raise RunChangedError(
            f"expected the data that the run began with, found other rows or tokens in {started.get('dataset')}; "
            f"{remedy}"
        )


def check_jobs(started: Event, configs: Mapping[str, JobConfig], task: Task) -> None:
    """Make sure that a run goes on with the jobs, the method, the metric, the evaluation points and the early-exit
    settings it began with.

    Raises:
        RunChangedError: ``task.yaml`` says something else now.
    """
    changed = []
    if started["method"] != task.method:
        changed.append("method")
    else:
        began_with = {entry["job"]: task.job_config(entry["config"]) for entry in started["jobs"]}
        changed += [job for job, config in began_with.items() if configs.get(job) != config]
    if EarlyExit.of_run(started["early_exit"]).resolved() != task.early_exit.resolved():
        changed.append("early_exit")
    if started.get("metric", LOSS) != task.metric:
        changed.append("metric")
    if started.get("eval_steps", task.eval_steps) != task.eval_steps:
        changed.append("eval_steps")
    if changed:
        raise RunChangedError(
            f"expected task.yaml to be as it was when the run began, found other settings of {', '.join(changed)}; "
            "put it back, change single jobs with: alto job clone, or start a new run with: alto tune"
        )


def _refusal(run: RunDir) -> tuple[Mapping[str, Any] | None, bool]:
    """What :func:`read_refusal` gives, and whether there is a file that cannot be it."""
    try:
        facts = read_json(run.root / _REFUSAL_FILE)
        limit = facts["max_tokens_per_pass"]
        if type(limit) is not int or limit < 1 or not facts.keys().isdisjoint({"seq", "time", "event"}):
            return None, True
    except FileNotFoundError:
        return None, False
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None, True
    return facts, False


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
