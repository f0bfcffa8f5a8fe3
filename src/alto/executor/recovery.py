"""Restores the last committed checkpoint of a run whose process has exited."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, cast

from alto.backbone import base_differences
from alto.base import read_json, replace_file, writing
from alto.data import TaskData, digest_of, running_digests
from alto.errors import RunChangedError, RunError, RunNotFoundError
from alto.executor.checkpoint import Kind, StateStore
from alto.runs import JournalEntry, Mailbox, RunDir, RunHistory, check_can_continue, read_intact_events
from alto.runs.events import (
    NO_SEQ,
    BaseDescription,
    CheckpointSaved,
    OutOfMemory,
    RefitFact,
    StartFact,
    TaskCompleted,
    TaskResumed,
    TaskStarted,
    decode,
    encode,
)
from alto.runs.events.codec import WIRE_NAMES, event_from
from alto.spec import QUANTISATION_KEYS, EarlyExit, JobConfig, Refit, Task

_OOM_RECORD_FILE = "oom.json"

_ENVELOPE = ("seq", "time", "event")
"""Keys of a journal line that are not fields of its event."""

_PRECISION = ("dtype", *QUANTISATION_KEYS.values(), "adapter_dtype", "optim_state_dtype")
"""Fields of :class:`BaseDescription` that a task sets, unlike the digests of files."""


@dataclass(frozen=True, kw_only=True)
class ResumeState:
    """The state that a run is resumed from.

    Attributes:
        lines: The journal up to the checkpoint, as JSON values; empty for a run that begins.
        notes: Sentences that describe what was lost.
        oom_record: Fields of the ``OutOfMemory`` event that ended the last attempt on several ranks; None if there is
            none.
        extends_run: Whether the run already has a result and a user's command adds more training to it.
    """

    lines: Sequence[Mapping[str, Any]] = ()
    notes: tuple[str, ...] = ()
    oom_record: Mapping[str, Any] | None = None
    extends_run: bool = False

    @cached_property
    def entries(self) -> tuple[JournalEntry, ...]:
        """The journal up to the checkpoint.

        Raises:
            RunError: A known field of a known event is missing or has another type.
        """
        return tuple(decode(line) for line in self.lines)

    @property
    def duration_s(self) -> float:
        """Duration of the run in seconds, without interruptions."""
        return RunHistory.of(self.entries).duration_s

    @property
    def started(self) -> TaskStarted:
        """The first event of the resumed run."""
        event = self.entries[0].event
        if not isinstance(event, TaskStarted):
            raise RunError(
                f"Expected a journal that begins with the start of its task, found {self.entries[0].name} as its first "
                "event. Put the journal back as it was, or start a new run with: alto tune"
            )
        return event

    @property
    def checkpoint(self) -> CheckpointSaved | None:
        """The checkpoint that the run is resumed from; None if it begins at its first step."""
        events = (entry.event for entry in reversed(self.entries))
        return next((event for event in events if isinstance(event, CheckpointSaved)), None)

    @property
    def base(self) -> BaseDescription | None:
        """Fingerprint and precision of the base model that the run was trained on; None if version 0.1 began the run,
        or if the journal's record is not valid."""
        events = (entry.event for entry in reversed(self.entries))
        bases = (event.base for event in events if isinstance(event, TaskStarted | TaskResumed))
        return next((base for base in bases if base is not None), None)

    @property
    def max_tokens_per_pass(self) -> int | None:
        """The value of ``max_tokens_per_pass`` after memory last ran out; None if it never did."""
        events = (entry.event for entry in self.entries)
        limits = [event.max_tokens_per_pass for event in events if isinstance(event, OutOfMemory)][-1:]
        limits += [self.oom_record["max_tokens_per_pass"]] if self.oom_record is not None else []
        return min(limits, default=None)

    @property
    def is_finished(self) -> bool:
        """Whether the task has its result and nothing more to train."""
        if self.extends_run:
            return False
        return bool(self.lines) and isinstance(decode(self.lines[-1]).event, TaskCompleted)


def recover(run: RunDir) -> ResumeState:
    """Restore the states of ``run`` as of its last intact checkpoint. Opening a `Journal` with the returned state then
    cuts the journal there.

    States of a checkpoint are removed once the next checkpoint is durable. If a journal line or a state is damaged
    later, the run falls back to the latest checkpoint whose states are all intact; without one, it starts from the
    beginning. A finished run is not changed, unless a waiting command adds more training to it: then it continues after
    its result, if its last checkpoint is intact. The function is idempotent, even if it is interrupted.

    Raises:
        JobCommandError: A finished run should train additional jobs, but has not kept all states.
        RunError: A finished run should train additional jobs, but a state of its last checkpoint is missing or damaged.
        RunWriteError: The run directory cannot be written.
    """
    entries, is_cut = _readable_entries(run)
    has_result = bool(entries) and isinstance(entries[-1].event, TaskCompleted)
    if has_result and not Mailbox(run).extends_run:
        return ResumeState(lines=[encode(entry) for entry in entries])
    store = StateStore(run)
    ends = [index for index, entry in enumerate(entries, start=1) if isinstance(entry.event, CheckpointSaved)]
    if has_result:
        check_can_continue(run)
    if has_result and not (ends and _is_restored(store, entries[ends[-1] - 1])):
        raise RunError(
            f"expected the states of all jobs of the finished run {run.root} as it saved them, found missing or "
            f"changed states, so it cannot train further jobs; put {run.root}/jobs back as it was, or remove "
            f"{run.control} and start a new run with: alto tune"
        )
    end = next((end for end in reversed(ends) if _is_restored(store, entries[end - 1])), 0)
    if not end:
        store.restore({})
    oom_record, is_damaged = _load_oom_record(run)
    notes = _notes(sum(other > end for other in ends), from_beginning=not end)
    if has_result:
        end = len(entries)  # the result follows its last checkpoint, and changes no state
        notes += ("The run was finished and then continued by a command; its result covers all its jobs.",)
    if is_cut:
        notes += ("The journal has a damaged line; the events after it are lost.",)
    if is_damaged:
        notes += (f"{_OOM_RECORD_FILE} is damaged and is not used; the largest micro-batch that fits is found again.",)
    lines = [encode(entry) for entry in entries[:end]]
    return ResumeState(lines=lines, notes=notes, oom_record=oom_record, extends_run=has_result)


def _readable_entries(run: RunDir) -> tuple[list[JournalEntry], bool]:
    """Return the entries before the first damaged one, and whether a complete line was left out because of its
    contents."""
    try:
        lines = read_intact_events(run.journal_file)
    except RunNotFoundError:
        return [], False
    entries = []
    for line in lines:
        try:
            entries.append(decode(line, run.journal_file))
        except RunError:
            return entries, True
    return entries, False


def write_oom_record(run: RunDir, event: OutOfMemory) -> None:
    """Write ``oom.json``, which tells the next attempt the size of the micro-batch that did not fit into memory.

    Raises:
        RunWriteError: The run directory cannot be written.
    """
    line = encode(JournalEntry(seq=NO_SEQ, time=0.0, event=event))
    facts = {key: value for key, value in line.items() if key not in _ENVELOPE}
    with writing(run.root, run.root / _OOM_RECORD_FILE):
        replace_file(run.root / _OOM_RECORD_FILE, json.dumps(facts) + "\n")


def oom_record_event(facts: Mapping[str, Any]) -> OutOfMemory:
    """Return the event that :func:`write_oom_record` wrote as ``facts``.

    Raises:
        TypeError: ``facts`` are not the fields of such an event.
    """
    return cast(OutOfMemory, event_from(WIRE_NAMES[OutOfMemory], facts))


def read_oom_record(run: RunDir) -> Mapping[str, Any] | None:
    """Return the fields of the ``OutOfMemory`` event that ended the last attempt on several ranks; None if ``oom.json``
    is missing or damaged."""
    oom_record, _ = _load_oom_record(run)
    return oom_record


def data_fingerprint(data: TaskData, chat_template: str | None = None) -> str:
    """Return a digest of every token and every target of a task's data, of the layout of its pairs, and of the chat
    template if the task sets one."""
    return _with_template(digest_of(*data.splits), chat_template)


def data_fingerprints(data: TaskData, chat_template: str | None = None) -> dict[str, str]:
    """Return the digests of a task's data by name.

    ``fingerprint`` is :func:`data_fingerprint`, which a resumed run checks. The other digests are used to compare
    runs, or their rows with those that are evaluated later, and do not include the chat template: one covers training
    and validation rows, the others only validation or test rows.
    """
    digests = dict(zip(data.named_splits, running_digests(*data.splits), strict=True))
    *_, last = digests.values()
    found = {"fingerprint": _with_template(last, chat_template)}
    found["train_validation_fingerprint"] = digests.get("validation", digests["train"])
    for name, split in data.named_splits.items():
        if name != "train":
            found[f"{name}_fingerprint"] = digest_of(split)
    return found


def _with_template(digest: str, chat_template: str | None) -> str:
    return digest if chat_template is None else hashlib.sha256(f"{digest}\n{chat_template}".encode()).hexdigest()


def check_base(resume_state: ResumeState, found: Mapping[str, Any], *, model: str, remedy: str) -> None:
    """Check that ``found`` is the base model of a run; a run whose journal does not record its base model passes.

    Args:
        found: Fingerprint from :func:`alto.backbone.base_fingerprint`.
        remedy: Advice for a different base model, for the message.

    Raises:
        RunChangedError: The base model is different.
    """
    differences = base_differences(asdict(resume_state.base), found) if resume_state.base is not None else ()
    if differences:
        raise RunChangedError(
            f"model: expected the base model that the run began with, found {', '.join(differences)} in {model!r}; "
            f"{remedy}"
        )


def check_precision(resume_state: ResumeState, found: BaseDescription) -> None:
    """Check that base model and adapters have the same precision as when the run began.

    Raises:
        RunChangedError: The precision is different.
    """
    if resume_state.base is None:
        return
    before, now = asdict(resume_state.base), asdict(found)
    changed = [key for key in _PRECISION if before[key] != now[key]]
    if changed:
        raise RunChangedError(
            f"expected the precision that the run began with ({_named(before, changed)}), found "
            f"{_named(now, changed)}; set it back in its task.yaml, or start a new run with: alto tune"
        )


def _named(facts: Mapping[str, Any], keys: Sequence[str]) -> str:
    return ", ".join(f"{key}: {json.dumps(facts[key]).strip(chr(34))}" for key in keys)


def check_data(started: TaskStarted, data: TaskData, chat_template: str | None = None) -> None:
    """Check that a run is resumed with the data that it began with.

    Raises:
        RunChangedError: Rows, tokenizer, chat template or max_length are different.
    """
    if started.data.get("fingerprint") != data_fingerprint(data, chat_template):
        remedy = "put the files (and the model's tokenizer) back as they were, or start a new run with: alto tune"
        if started.base is None:  # version 0.1 began the run
            remedy = (
                "version 0.1 of ALTO, which began the run, made different tokens from some rows than this version; if "
                "the files are unchanged, start a new run with: alto tune; otherwise put them back, then continue "
                "with: alto resume"
            )
        raise RunChangedError(
            f"expected the data that the run began with, found different rows or tokens in {started.dataset}; {remedy}"
        )


def check_start(started: TaskStarted, found: StartFact | None) -> None:
    """Check that the jobs of a run begin with the same adapter as when the run began; its folder may be different.

    Args:
        found: The adapter as it is now; None if jobs begin with new adapters.

    Raises:
        RunChangedError: The adapter is different.
    """
    before = started.init_adapter
    if (None if before is None else before.fingerprint) == (None if found is None else found.fingerprint):
        return
    if before is None or found is None:
        expected, now = ("none" if fact is None else fact.path for fact in (before, found))
        raise RunChangedError(
            f"init_adapter: expected the value that the run began with ({expected}), found {now}; put task.yaml back "
            "as it was, or start a new run with: alto tune"
        )
    raise RunChangedError(
        f"init_adapter: expected the adapter that the run began with, found a different one in {found.path}; put its "
        "files back as they were, or start a new run with: alto tune"
    )


def refit_fact(refit: Refit | None) -> RefitFact | None:
    """Return the journal's description of a refit."""
    return None if refit is None else RefitFact(run=refit.run, job=refit.job, steps=refit.steps)


def check_jobs(started: TaskStarted, configs: Mapping[str, JobConfig], task: Task) -> None:
    """Check that a run is resumed with the jobs, the method, the metric, the evaluation points and the early-exit
    settings that it began with.

    Raises:
        RunChangedError: ``task.yaml`` was changed.
    """
    changed = []
    if started.method != task.method:
        changed.append("method")
    else:
        began_with = {job.job: task.job_config(job.config) for job in started.jobs}
        changed += [job for job in {**began_with, **configs} if configs.get(job) != began_with.get(job)]
    if EarlyExit.of_run(started.early_exit).resolved() != task.early_exit.resolved():
        changed.append("early_exit")
    if started.metric != task.metric:
        changed.append("metric")
    if started.refit != refit_fact(task.refit):
        changed.append("refit")
    if started.eval_steps not in (None, task.eval_steps):
        changed.append("eval_steps")
    if changed:
        raise RunChangedError(
            f"expected task.yaml to be as it was when the run began, found different settings of {', '.join(changed)}; "
            "put it back, change single jobs with: alto job clone, or start a new run with: alto tune"
        )


def _load_oom_record(run: RunDir) -> tuple[Mapping[str, Any] | None, bool]:
    """Read ``oom.json``, the record of the out-of-memory error that ended the last multi-rank attempt.

    Return its contents (None if missing or damaged), and whether the file is damaged.
    """
    try:
        facts = read_json(run.root / _OOM_RECORD_FILE)
        limit = facts["max_tokens_per_pass"]
        if type(limit) is not int or limit < 1 or not facts.keys().isdisjoint(_ENVELOPE):
            return None, True
        oom_record_event(facts)
    except FileNotFoundError:
        return None, False
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None, True
    return facts, False


def _is_restored(store: StateStore, entry: JournalEntry) -> bool:
    assert isinstance(entry.event, CheckpointSaved)
    jobs = entry.event.jobs
    last: dict[tuple[str, Kind], int] = {(job, "last"): saved.step for job, saved in jobs.items() if saved.is_resumable}
    best: dict[tuple[str, Kind], int] = {
        (job, "best"): saved.best_step for job, saved in jobs.items() if saved.best_step
    }
    return store.restore(last | best)


def _notes(num_damaged: int, *, from_beginning: bool) -> tuple[str, ...]:
    if not num_damaged:
        return ()
    subject = "The last checkpoint is" if num_damaged == 1 else f"The last {num_damaged} checkpoints are"
    start = "starts from the beginning" if from_beginning else "continues from the checkpoint before"
    return (f"{subject} damaged; the run {start}.",)
