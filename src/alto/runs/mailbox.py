"""Commands from other processes to a running task or queue: one file per command in ``control/``, with the answer
next to it.

A command stays there until its effect is committed, so it is not lost if the working process dies or restarts. The
journal records its id, so that it takes effect only once.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from alto.base import read_json, replace_file, writing
from alto.errors import JobCommandError, MailboxFullError, QueueCommandError, RunError
from alto.runs.result import check_can_continue
from alto.runs.run_dir import RunDir

_COMMAND = ".command.json"
_ANSWER = ".answer.json"
_POLL_S = 0.05

MOST_KEPT = 256
"""Largest number of waiting commands to the jobs of a run, and of answers that nobody has read."""

_NUM_DIGITS = 20
"""Digits of the time in nanoseconds at the start of a command's id."""


class JobAction(StrEnum):
    """Actions of a command to a job."""

    STOP = "stop"
    RESUME = "resume"
    CLONE = "clone"


_EXTENDING = (JobAction.RESUME, JobAction.CLONE)
"""Actions that a finished run can carry out."""


class QueueAction(StrEnum):
    """Actions of a command to a queue."""

    SUBMIT = "submit"
    CANCEL = "cancel"
    FINISH = "finish"
    """Accept no more tasks, and stop when all tasks have ended."""
    DRAIN = "drain"
    """Ask every running task to save and stop, then stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command to a job.

    Attributes:
        id: Id that sorts commands by the time they were given.
        changes: A clone's settings that differ from the job's, by canonical key.
        warm: Whether a clone starts from the job's best adapter instead of a new one.
    """

    id: str
    action: JobAction
    job: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    warm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCommand:
    """A command to a queue.

    Attributes:
        id: Id that sorts commands by the time they were given.
        task: Name in the queue of the task to cancel.
        values: Values of a submitted task, in the form that :class:`alto.spec.Task` takes; paths are absolute.
    """

    id: str
    action: QueueAction
    task: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandAnswer:
    """Whether a command took effect, and a message."""

    done: bool
    message: str


C = TypeVar("C", Command, QueueCommand)


class _Mailbox(ABC, Generic[C]):
    """The commands of one kind for a run or queue, in one folder."""

    _error: ClassVar[type[RunError]]
    _writers: ClassVar[str]
    """The CLI commands that write these commands, for error messages."""
    _answerer: ClassVar[str]
    _remedy: ClassVar[str]
    """The CLI command that shows whether a command took effect, for error messages."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._folder = run.control

    @staticmethod
    @abstractmethod
    def _parse(facts: dict[str, Any]) -> C:
        """Return the command with these fields.

        Raises:
            ValueError, TypeError, KeyError: ``facts`` are not the fields of a command.
        """

    def _send(self, facts: Mapping[str, Any]) -> str:
        if self._folder.exists() and not self._folder.is_dir():
            raise self._error(
                f"expected a folder for commands at {self._folder}, found a file; move it away and try again"
            )
        with writing(self._run.root, self._folder):
            self._folder.mkdir(exist_ok=True)
            command_id = f"{max(time.time_ns(), self._latest_ns() + 1):0{_NUM_DIGITS}d}-{secrets.token_hex(4)}"
            replace_file(self._folder / (command_id + _COMMAND), json.dumps({**facts, "id": command_id}) + "\n")
        return command_id

    @property
    def num_pending(self) -> int:
        """Number of commands not answered yet; reading it changes nothing."""
        return len(self._names())

    def _latest_ns(self) -> int:
        """Return the time of the latest pending command, in nanoseconds.

        It may lie in the future: the clock may have been set back since, or another machine's clock may differ.
        """
        given = (path.name.partition("-")[0] for path in self._folder.iterdir() if path.name.endswith(_COMMAND))
        return max((int(number) for number in given if number.isdecimal() and len(number) == _NUM_DIGITS), default=0)

    def pending(self) -> list[C]:
        """Return the commands not answered yet, oldest first; an invalid file is answered with an error.

        Empty if there is no folder, or it cannot be read.
        """
        commands = []
        for name in self._names():
            try:
                commands.append(self._read(name.removesuffix(_COMMAND), self._folder / name))
            except RunError as error:
                self.answer(name.removesuffix(_COMMAND), CommandAnswer(done=False, message=str(error)))
        return commands

    def _names(self, ending: str = _COMMAND) -> list[str]:
        """Return the names of the files of commands, or of answers, oldest first."""
        try:
            return sorted(path.name for path in self._folder.iterdir() if path.name.endswith(ending))
        except OSError:
            return []

    def answer(self, command_id: str, answer: CommandAnswer) -> None:
        """Answer a command and remove it.

        Raises:
            RunBusyError: See :meth:`RunDir.check_lock`.
            RunWriteError: The run directory cannot be written.
        """
        self._run.check_lock()
        with writing(self._run.root, self._folder):
            path = self._folder / (command_id + _ANSWER)
            if path.is_dir():  # a folder cannot be replaced by a file
                _remove(path)
            replace_file(path, json.dumps(asdict(answer)) + "\n")
            _remove(self._folder / (command_id + _COMMAND))

    def wait_for_answer(
        self, command_id: str, timeout_s: float, *, sleep: Callable[[float], object] = time.sleep
    ) -> CommandAnswer | None:
        """Read and remove the answer; return None if there is none within ``timeout_s``.

        Args:
            sleep: Called between two checks, with seconds.

        Raises:
            JobCommandError, QueueCommandError: The file is not a valid answer.
            RunWriteError: The file cannot be removed.
        """
        path = self._folder / (command_id + _ANSWER)
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() >= deadline:
                return None
            sleep(_POLL_S)
        answer = self._read_answer(path)
        with writing(self._run.root, path):
            _remove(path)
        return answer

    def _read(self, command_id: str, path: Path) -> C:
        try:
            return self._parse({**read_json(path), "id": command_id})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise self._error(
                f"expected a command as {self._writers} writes it, found invalid content ({error!s:.200}); "
                f"use {self._writers}"
            ) from None

    def _read_answer(self, path: Path) -> CommandAnswer:
        try:
            answer = CommandAnswer(**read_json(path))
            _check_types(done=(answer.done, bool), message=(answer.message, str))
        except (OSError, ValueError, TypeError) as error:
            raise self._error(
                f"expected the answer of the {self._answerer} at {path}, found invalid content ({error!s:.200}); "
                f"remove the file and check with {self._remedy} whether the command took effect"
            ) from None
        return answer


class Mailbox(_Mailbox[Command]):
    """The commands of one run and the latest answers, at most :data:`MOST_KEPT` of each."""

    _error = JobCommandError
    _writers = "`alto job`"
    _answerer = "task"
    _remedy = "alto show"

    def send(self, action: JobAction, job: str, *, changes: Mapping[str, Any] | None = None, warm: bool = False) -> str:
        """Write a command (see :class:`Command`) and return its id.

        Raises:
            MailboxFullError: :data:`MOST_KEPT` commands wait already.
            JobCommandError: The mailbox's path is a file, or the command asks a finished run to train additional jobs
                but the run has not kept all states.
            RunWriteError: The run directory cannot be written.
        """
        if (found := self.num_pending) >= MOST_KEPT:
            raise MailboxFullError(
                f"expected fewer than {MOST_KEPT} commands that wait for this task, found {found}; let it run, so that "
                "it carries them out"
            )
        if action in _EXTENDING:
            check_can_continue(self._run)
        return self._send({"action": action, "job": job, "changes": changes or {}, "warm": warm})

    def answer(self, command_id: str, answer: CommandAnswer) -> None:
        super().answer(command_id, answer)
        # Delete the oldest answers: some are never read, because the sender no longer waits.
        for name in self._names(_ANSWER)[:-MOST_KEPT]:
            with writing(self._run.root, self._folder):
                _remove(self._folder / name)

    def num_waiting(self, *actions: JobAction) -> int:
        """Return the number of unanswered commands that ask for one of ``actions``; change nothing."""
        found = 0
        for name in self._names():
            with contextlib.suppress(RunError):  # the run answers an invalid file with an error
                found += self._read(name.removesuffix(_COMMAND), self._folder / name).action in actions
        return found

    @property
    def extends_run(self) -> bool:
        """Whether a waiting command makes a finished run continue to train (a clone or a resumed job). Reading this
        property changes nothing."""
        return self.num_waiting(*_EXTENDING) > 0

    @staticmethod
    def _parse(facts: dict[str, Any]) -> Command:
        command = Command(**{**facts, "action": JobAction(facts["action"])})
        _check_types(job=(command.job, str), changes=(command.changes, dict), warm=(command.warm, bool))
        return command


class QueueMailbox(_Mailbox[QueueCommand]):
    """The commands of one queue."""

    _error = QueueCommandError
    _writers = "`alto submit` or `alto cancel`"
    _answerer = "queue"
    _remedy = "alto list"

    def submit(self, values: Mapping[str, Any], *, tenant: str = "", priority: int = 0) -> str:
        """Submit a task for a tenant, with a priority, and return the command's id. Errors as in :meth:`ask`."""
        return self._send({"action": QueueAction.SUBMIT, "values": values, "tenant": tenant, "priority": priority})

    def ask(self, action: QueueAction, task: str = "") -> str:
        """Write any other command and return its id.

        Raises:
            QueueCommandError: The mailbox's path is a file.
            RunWriteError: The queue's folder cannot be written.
        """
        return self._send({"action": action, "task": task})

    @staticmethod
    def _parse(facts: dict[str, Any]) -> QueueCommand:
        # The file stores tenant and priority separately from the task's values, which they replace.
        given = {"tenant": facts.pop("tenant", ""), "priority": facts.pop("priority", 0)}
        command = QueueCommand(**{**facts, "action": QueueAction(facts["action"])})
        _check_types(
            task=(command.task, str),
            values=(command.values, dict),
            tenant=(given["tenant"], str),
            priority=(given["priority"], int),
        )
        return replace(command, values={**command.values, **given})


def _check_types(**fields: tuple[object, type[object]]) -> None:
    """Check that every field, given as its value and its type, has exactly that type.

    Raises:
        TypeError: A field has another type.
    """
    for name, (value, expected) in fields.items():
        if type(value) is not expected:
            raise TypeError(f"{name}: expected {expected.__name__}, found {type(value).__name__}")


def _remove(path: Path) -> None:
    """Remove a file, a folder or a symbolic link (not its target)."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
