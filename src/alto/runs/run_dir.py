"""The folder of a run.

::

    runs/<name>-<id>/
        task.yaml            the resolved task
        journal.jsonl        all events
        jobs/<job>/best/     adapter with the job's best validation loss, PEFT format
        jobs/<job>/last/     adapter and optimizer state of the job's last checkpoint, while it can be resumed
        jobs/<job>/start/    adapter from which a cloned job starts
        control/             commands from other processes
        best/                the task's best adapter, with tokenizer and chat template
        logs/                output and exit of every executor started by a queue
        report.html
        run.lock             held by the process that works on the run
        lease                number of the latest lease, if a service gave one

When the task ends, its key ``keep`` decides which files stay in ``jobs``, see :mod:`alto.runs.result`.
``best.previous`` and ``last.previous`` belong to the last committed checkpoint while a newer one is written; they are
removed once the newer one is committed.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from alto.base import LockFile, replace_file, resume_command, sync_folder, writing
from alto.errors import RunBusyError, RunError, RunExistsError, RunNotFoundError, UntrustedCodeError
from alto.spec import Task, read_run_task

METRICS_NAME = "metrics.json"
"""File of an adapter's folder that holds how it was trained and its evaluations."""

# Long enough to outlast a process that takes the lock for an instant, only to test it.
LOCK_TIMEOUT_S = 1.0


class RunDir:
    """Names of the files of a run, and the lock that lets only one process at a time work on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.task_file = root / "task.yaml"
        self.journal_file = root / "journal.jsonl"
        self.best = root / "best"
        self.control = root / "control"
        self.report_file = root / "report.html"
        self._lock_file = root / "run.lock"
        self._lease_file = root / "lease"
        self._lock: LockFile | None = None
        self._lease = ""

    @classmethod
    def create(cls, output_dir: str | Path, task: Task) -> RunDir:
        """Make a new run directory ``<output_dir>/<name>-<id>`` with the resolved task and an empty journal.

        Raises:
            RunError: The folder cannot be made.
        """
        return cls(new_folder(output_dir, task.name, lambda partial: cls(partial).begin(task)))

    def begin(self, task: Task) -> None:
        """Make the folder with the task and an empty journal; the executor adds the rest."""
        self.root.mkdir(parents=True)
        replace_file(self.task_file, task.to_yaml())
        self.journal_file.touch()

    def resolve(self, task: Task) -> None:
        """Replace the task by ``task``, which has resolved settings."""
        self.check_lock()
        with writing(self.root, self.task_file):
            replace_file(self.task_file, task.to_yaml())

    @classmethod
    def open(cls, root: str | Path) -> RunDir:
        """Open the run directory at ``root``.

        Raises:
            RunNotFoundError: There is no run.
        """
        run = cls(Path(root).resolve())
        # A task.yaml alone does not make a run: users write such files.
        if not run.task_file.is_file() or not (run.journal_file.exists() or (run.root / "jobs").exists()):
            raise RunNotFoundError(
                f"expected the folder of a run, found none of its files in {root}; give a folder such as "
                "runs/<name>-<id>"
            )
        return run

    def job(self, job: str, kind: str) -> Path:
        """Return the folder of a job's adapter; ``kind`` is ``best``, ``last`` or ``start``."""
        return self.root / "jobs" / job / kind

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run's lock for the block; it is released however this process ends.

        Raises:
            RunBusyError: Another process works on the run.
            RunWriteError: The folder cannot be written.
        """
        lock = LockFile(self._lock_file)
        with writing(self.root, self._lock_file):
            if not lock.acquire(LOCK_TIMEOUT_S):
                raise RunBusyError(
                    f"expected a run that no other process works on, found that another process works on {self.root}; "
                    f"watch it with: alto show --watch {self.root}"
                )
        outer, self._lock = self._lock, lock
        try:
            self._lease = self._read_lease()
            yield
        finally:
            self._lock = outer
            lock.release()

    def check_lock(self) -> None:
        """Check before a write that this process still holds the lock of the run.

        If the lock file was deleted, it is not created again: another process may have changed the run in the meantime.

        Raises:
            RunBusyError: The lock file was removed or replaced, or the run was leased to another process.
        """
        if self._lock is not None and (found := self._read_lease()) != self._lease:
            raise RunBusyError(
                f"expected lease {self._lease or 'none'} of {self.root} as when this process began, found {found}: "
                "another process was given the run; what was committed is intact, and this process ends"
            )
        if self._lock is not None and not self._lock.is_held():
            raise RunBusyError(
                f"expected {self._lock_file} as this process made it, found it removed or replaced, so another "
                f"process may work on the run. Saved data is intact. Leave the file alone, make sure that no process "
                f"works on the run, and continue with: {resume_command(self.root)}"
            )

    def lease(self, number: int) -> None:
        """Take the run away from processes that already work on it: each of them ends at its next write.

        Args:
            number: Number of the new lease, larger than all earlier ones.

        Raises:
            RunWriteError: The folder cannot be written.
        """
        with writing(self.root, self._lease_file):
            replace_file(self._lease_file, f"{number}\n")

    def _read_lease(self) -> str:
        try:
            return self._lease_file.read_text("ascii").strip()
        except FileNotFoundError:
            return ""

    def is_locked(self) -> bool:
        """Return whether a process works on the run."""
        try:
            return not LockFile(self._lock_file).is_free()
        except OSError:
            # This user has no permission to open the lock file.
            return False


def new_folder(output_dir: str | Path, name: str, fill: Callable[[Path], None]) -> Path:
    """Make a new folder ``<output_dir>/<name>-<time>``, completely or not at all, and return it.

    Args:
        fill: Makes the folder at the temporary path that it is given, with its files.

    Raises:
        RunError: The folder cannot be made.
    """
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    partial = Path(output_dir) / f".{stem}.{secrets.token_hex(8)}.new"
    try:
        fill(partial)
        return claim(partial, Path(output_dir), stem)
    except RunExistsError:
        raise
    except OSError as error:
        raise RunError(
            f"output_dir: expected a folder that can be written, found {output_dir} ({error.strerror}); "
            "choose another with --output-dir"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def claim(partial: Path, folder: Path, stem: str) -> Path:
    """Move ``partial`` to ``folder / stem``, atomically, so that two processes never share a run.

    Args:
        stem: Name of the final folder; a number is added if the name is taken.

    Raises:
        RunExistsError: The names with all numbers up to 999 are taken.
    """
    for attempt in range(1000):
        root = folder / (stem if attempt == 0 else f"{stem}-{attempt}")
        if root.exists():  # renaming onto an empty folder would succeed
            continue
        try:
            partial.rename(root)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                continue
            raise
        sync_folder(folder)
        return root.resolve()
    raise RunExistsError(
        f"expected a free name for the run, found {stem} and 999 others taken; remove old runs from {folder}"
    )


# Keeps the files of a run from deciding whether foreign Python code is run, or where rows are sent.
#
# A task file that a user submits is the user's own decision. A run directory may belong to a colleague, or may have
# been downloaded. So the user who works on a run must give the permission each time.


def load_run_task(run: RunDir, *, trust_remote_code: bool, is_trained: bool = True) -> Task:
    """Return the task of a run whose base model is about to be loaded.

    Args:
        trust_remote_code: The caller's permission to run the Python code that comes with the base model. The code runs
            only if the task's own key is set too. The permission also covers scorers and rewards that run code or send
            rows to a server.
        is_trained: Whether the run will be trained, so that its scorers may be used.

    Raises:
        UntrustedCodeError: The task sets the key, or has such a scorer, and the caller has not allowed it.
        SpecError: The task cannot be read.
    """
    task = read_run_task(run.task_file)
    if task.trust_remote_code and not trust_remote_code:
        raise UntrustedCodeError(
            f"trust_remote_code: expected permission from you to run the Python code of the base model {task.model!r}, "
            f"found it only in {run.task_file}, which may come from another person; that code would run with all your "
            "rights: review it, then add --trust-remote-code (in Python: trust_remote_code=True)"
        )
    scorers = [("select_by", task.scoring), *(("reward_funcs", scoring) for scoring in task.reward_funcs)]
    for key, scoring in scorers if is_trained and not trust_remote_code else ():
        if scoring is None or not scoring.reaches_outside:
            continue
        what = f"call the Python function {scoring.function}" if scoring.function else f"send rows to {scoring.address}"
        raise UntrustedCodeError(
            f"{key}: expected permission from you to {what}, found it only in {run.task_file}, which may come from "
            "another person; if you trust it, add --trust-remote-code (in Python: trust_remote_code=True)"
        )
    return task
