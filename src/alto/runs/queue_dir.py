"""The folder of a queue: many tasks that share the GPUs of a cluster.

::

    runs/queue-<id>/
        queue.yaml           the tasks, their demands, and the scheduling settings
        journal.jsonl        all events of the queue
        control/             commands from other processes: alto submit, alto cancel, alto drain
        tasks/<task>/        the run directory of each task
        report.html
        run.lock             held by the process that works on the queue
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from alto.base import is_number, read_bytes, replace_file, writing
from alto.errors import RunError, RunNotFoundError
from alto.records import MAX_DURATION_S, MIN_DURATION_S, Demand, Sharing, TaskEstimate
from alto.runs.run_dir import RunDir, new_folder
from alto.spec import Task

_SPEC = "queue.yaml"
_MAX_BYTES = 64 * 1024**2

_WRITTEN_IF_SET = ("command", "is_cancelled", "base", "sharing", "is_unmeasured")
"""Keys of a task that are not written if they have their default values."""

_MOST = 2.0**63
"""Largest accepted number of seconds or bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry(Demand):
    """One task of a queue; ``duration_s`` is the estimate for an executor of its own.

    Attributes:
        command: Id of the command that submitted it; empty if it was there from the start, or was submitted by the
            process that works on the queue.
        base: Its base model, equal for tasks that one process can train; empty if unknown.
        sharing: Facts for sharing an executor; None if it has its own executor.
        is_unmeasured: Whether it still has to be measured before the queue's first schedule; ``duration_s`` is a guess
            until then.
    """

    command: str = ""
    is_cancelled: bool = False
    base: str = ""
    sharing: Sharing | None = None
    is_unmeasured: bool = False

    @classmethod
    def new(cls, name: str, task: Task, estimate: TaskEstimate, **more: Any) -> QueueEntry:
        """Return the entry of ``task`` under ``name``, with the fields ``more``."""
        return cls(
            task=name,
            num_gpus=task.num_gpus,
            duration_s=estimate.duration_s,
            priority=task.priority,
            tenant=task.tenant,
            sharing=estimate.sharing,
            **more,
        )


QueueContent: TypeAlias = tuple[list[QueueEntry], dict[str, Any]]
"""The tasks and the settings of a queue."""


class QueueDir:
    """Names of the files of a queue; the journal and the lock are the same as those of a run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run = RunDir(root)
        self._spec_file = root / _SPEC

    @classmethod
    def create(
        cls, output_dir: str | Path, entries: Sequence[QueueEntry], tasks: Sequence[Task], settings: Mapping[str, Any]
    ) -> QueueDir:
        """Make a new folder ``<output_dir>/queue-<id>`` with a run directory for the task of each entry, completely or
        not at all.

        Raises:
            RunError: The folder cannot be made.
        """

        def fill(partial: Path) -> None:
            partial.mkdir(parents=True)
            queue = cls(partial)
            for entry, task in zip(entries, tasks, strict=True):
                queue.run_of(entry.task).begin(task)
            queue._write(entries, settings)
            queue.run.journal_file.touch()
            queue.run.control.mkdir()  # made now, by the user who must later be able to remove commands

        return cls(new_folder(output_dir, "queue", fill))

    @classmethod
    def open(cls, root: str | Path) -> QueueDir:
        """Open the queue at ``root``.

        Raises:
            RunNotFoundError: There is no queue.
        """
        queue = cls(Path(root).resolve())
        if not queue.exists(root):
            raise RunNotFoundError(
                f"expected the folder of a queue, found no {_SPEC} in {root}; give a folder such as runs/queue-<id>"
            )
        return queue

    @staticmethod
    def exists(root: str | Path) -> bool:
        """Return whether the folder belongs to a queue, not to a run."""
        return (Path(root) / _SPEC).is_file()

    def read(self) -> QueueContent:
        """Return the tasks and the settings of the queue.

        Raises:
            RunError: The file does not have the expected content.
        """
        try:
            facts = yaml.safe_load(read_bytes(self._spec_file, _MAX_BYTES).decode("utf-8"))
            entries = [_entry(entry) for entry in facts["tasks"]]
            for entry in entries:
                _check(entry)
            settings = dict(facts["settings"])
            _check_settings(settings)
            return entries, settings
        except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise RunError(
                f"expected {self._spec_file} as ALTO wrote it, found invalid content ({error!r:.100}); restore the "
                "original file, or run the tasks in a new queue"
            ) from error

    def add(self, entry: QueueEntry, task: Task, *, to: QueueContent) -> None:
        """Add a task durably to the content that was read since this process took the lock.

        Raises:
            RunBusyError: See :meth:`RunDir.check_lock`.
            RunWriteError: The folder cannot be written.
        """
        run = self.run_of(entry.task)
        entries, settings = to
        self.run.check_lock()
        with writing(self.root, run.root):
            if run.root.exists():  # left by an attempt that failed before the task was added
                shutil.rmtree(run.root)
            run.begin(task)
            self._write([*entries, entry], settings)

    def cancel(self, task: str) -> None:
        """Record that a task was cancelled; errors as in :meth:`add`."""
        self._change(task, is_cancelled=True)

    def note_estimate(self, task: str, estimate: TaskEstimate) -> None:
        """Record the measured estimate of a task; errors as in :meth:`add`."""
        self._change(task, duration_s=estimate.duration_s, sharing=estimate.sharing, is_unmeasured=False)

    def _change(self, task: str, **changes: Any) -> None:
        entries, settings = self.read()
        self.run.check_lock()
        with writing(self.root, self._spec_file):
            self._write([replace(entry, **changes) if entry.task == task else entry for entry in entries], settings)

    def _write(self, entries: Sequence[QueueEntry], settings: Mapping[str, Any]) -> None:
        facts = {"settings": dict(settings), "tasks": [_facts(entry) for entry in entries]}
        replace_file(self._spec_file, yaml.safe_dump(facts, sort_keys=False, allow_unicode=True))

    def run_of(self, task: str) -> RunDir:
        """Return the run directory of a task."""
        return RunDir(self.root / "tasks" / task)


def _facts(entry: QueueEntry) -> dict[str, Any]:
    """Return the written form of an entry."""
    facts = asdict(entry)
    return {key: value for key, value in facts.items() if value or key not in _WRITTEN_IF_SET}


def _entry(facts: Mapping[str, Any]) -> QueueEntry:
    """Return the entry from its written form."""
    sharing = facts.get("sharing")
    return QueueEntry(**{**facts, "sharing": None if sharing is None else Sharing(**sharing)})


def _check(entry: QueueEntry) -> None:
    is_text = all(isinstance(text, str) for text in (entry.task, entry.tenant, entry.command, entry.base))
    # A task's name is also the name of its folder inside the queue's folder.
    if not is_text or entry.task in ("", ".", "..") or "/" in entry.task or "\0" in entry.task:
        raise ValueError(f"task name {entry.task!r}")
    for key in ("is_cancelled", "is_unmeasured"):
        if type(getattr(entry, key)) is not bool:
            raise ValueError(f"{key} {getattr(entry, key)!r}")
    if type(entry.num_gpus) is not int or type(entry.priority) is not int or entry.num_gpus < 1:
        raise ValueError(f"num_gpus {entry.num_gpus!r}, priority {entry.priority!r}")
    if not is_number(entry.duration_s, least=MIN_DURATION_S, most=MAX_DURATION_S):
        raise ValueError(f"duration_s {entry.duration_s!r}")
    if entry.sharing is not None:
        numbers = asdict(entry.sharing)
        base = numbers.pop("base")
        is_valid = isinstance(base, str) and bool(base)
        if not is_valid or not all(is_number(number, least=0, most=_MOST) for number in numbers.values()):
            raise ValueError(f"sharing {entry.sharing!r}")


def _check_settings(settings: Mapping[str, Any]) -> None:
    for key in ("method", "strategy", "cluster"):
        if not isinstance(settings[key], str):
            raise ValueError(f"{key} {settings[key]!r}")
    total_gpus, quotas = settings["total_gpus"], settings["quotas"]
    if total_gpus is not None and not _is_count(total_gpus):
        raise ValueError(f"total_gpus {total_gpus!r}")
    if not isinstance(quotas, dict) or not all(isinstance(key, str) and _is_count(quotas[key]) for key in quotas):
        raise ValueError(f"quotas {quotas!r}")


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1
