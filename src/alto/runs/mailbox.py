"""What other processes ask of a running task: one file a command in ``control/``, and the answer beside it.

A command is there until its effect is committed, so that neither the task's death nor its own restart loses it; and it
carries an id that the journal remembers, so that it takes effect once.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from alto.errors import JobCommandError
from alto.runs.files import replace_file, writing
from alto.runs.run_dir import RunDir
from alto.spec.outside import read_json

__all__ = ["Action", "Answer", "Command", "Mailbox"]

_COMMAND = ".command.json"
_ANSWER = ".answer.json"


class Action(StrEnum):
    """What can be asked of a job."""

    STOP = "stop"
    RESUME = "resume"
    CLONE = "clone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Something asked of a job.

    Attributes:
        id: Sorts commands by when they were given.
        changes: A clone's settings that differ from the job's, canonical keys.
        warm: A clone starts from the job's best adapter instead of a new one.
    """

    id: str
    action: Action
    job: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    warm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Whether a command took effect, and what it did or why not."""

    done: bool
    message: str


class Mailbox:
    """The commands of one run."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._folder = run.control

    def send(self, action: Action, job: str, *, changes: Mapping[str, Any] | None = None, warm: bool = False) -> str:
        """Ask something; returns the command's id.

        Raises:
            JobCommandError: Something else is where the mailbox would be.
            RunWriteError: The run directory cannot be written.
        """
        if self._folder.exists() and not self._folder.is_dir():
            raise JobCommandError(
                f"expected a folder for commands at {self._folder}, found a file; move it away and ask again"
            )
        command = Command(
            id=f"{time.time_ns():020d}-{secrets.token_hex(4)}", action=action, job=job, changes=changes or {}, warm=warm
        )
        with writing(self._run.root, self._folder):
            self._folder.mkdir(exist_ok=True)
            replace_file(self._folder / (command.id + _COMMAND), json.dumps(asdict(command)) + "\n")
        return command.id

    def pending(self) -> list[Command]:
        """Commands not answered yet, oldest first; a file that is none is answered so.

        Where there is no folder, or none that can be read, nothing can have been asked.
        """
        commands = []
        try:
            names = sorted(path.name for path in self._folder.iterdir() if path.name.endswith(_COMMAND))
        except OSError:
            return []
        for name in names:
            try:
                commands.append(_command(name.removesuffix(_COMMAND), self._folder / name))
            except JobCommandError as error:
                self.answer(name.removesuffix(_COMMAND), Answer(done=False, message=str(error)))
        return commands

    def answer(self, command_id: str, answer: Answer) -> None:
        """Answer a command and forget it.

        Raises:
            RunBusyError: As of :meth:`RunDir.check_lock`.
            RunWriteError: The run directory cannot be written.
        """
        self._run.check_lock()
        with writing(self._run.root, self._folder):
            path = self._folder / (command_id + _ANSWER)
            if path.is_dir():  # nothing can be put in the place of a folder
                _remove(path)
            replace_file(path, json.dumps(asdict(answer)) + "\n")
            _remove(self._folder / (command_id + _COMMAND))

    def wait_for_answer(self, command_id: str, timeout_s: float) -> Answer | None:
        """The answer, taken out of the mailbox; None if there is none within ``timeout_s``.

        Raises:
            JobCommandError: There is a file in its place that is none.
            RunWriteError: It cannot be taken out.
        """
        path = self._folder / (command_id + _ANSWER)
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)
        answer = _answer(path)
        with writing(self._run.root, path):
            _remove(path)
        return answer


def _remove(path: Path) -> None:
    """Whatever it is; of a symbolic link the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _answer(path: Path) -> Answer:
    try:
        answer = Answer(**read_json(path))
        if not (isinstance(answer.done, bool) and isinstance(answer.message, str)):
            raise TypeError("a field of another type")
    except (OSError, ValueError, TypeError) as error:
        raise JobCommandError(
            f"expected the answer of the task at {path}, found another file ({error!s:.200}); remove it and see with "
            "alto show whether the command took effect"
        ) from None
    return answer


def _command(command_id: str, path: Path) -> Command:
    try:
        facts = read_json(path)
        command = Command(**{**facts, "id": command_id, "action": Action(facts["action"])})
        if not (isinstance(command.job, str) and isinstance(command.changes, dict) and isinstance(command.warm, bool)):
            raise TypeError("a field of another type")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise JobCommandError(
            f"expected a command as `alto job` writes it, found another file ({error!s:.200}); use `alto job`"
        ) from None
    return command
