"""Job states on disk. A committed set of states survives the death of the process at any time.

A job has up to two states: ``best``, the adapter of its best evaluation, and ``last``, the adapter and optimizer state
at its last save, which exists while the job can be resumed. A state is a folder in PEFT's own format; ``last`` adds
``optimizer.safetensors``, the tensors of :class:`alto.lora.OptimizerState`. ``state.json`` holds the step and, once the
state is sealed, the other files' digests.

A checkpoint of the run refers to states by job, kind and step. A state is only sealed, and its files made durable, for
a checkpoint (:meth:`StateStore.seal`): most states are replaced or removed before the next one. Saving never overwrites
a state that the last committed checkpoint refers to: it moves this state to ``<kind>.previous``, which is removed once
the next checkpoint is in the journal (:meth:`StateStore.remove_predecessors`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from alto.base import open_regular, read_json, replace_file, sync_folder, writing
from alto.lora import AdapterWeights, OptimizerState, read_adapter
from alto.runs import RunDir

Kind: TypeAlias = Literal["best", "last"]
KINDS: tuple[Kind, ...] = ("best", "last")

_OPTIMIZER_FILE = "optimizer.safetensors"
_STATE_FILE = "state.json"


class StateStore:
    """The states of all jobs of one run.

    Only one executor may use it at a time. Each of its ranks has its own store and saves the states of its own jobs.
    States saved by other ranks are reported with :meth:`saved_elsewhere`, so every store knows all uncommitted states.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._uncommitted: set[Path] = set()
        self._unsealed: dict[Path, int] = {}  # steps by folder

    def save(self, job: str, kind: Kind, step: int, fill: Callable[[Path], None]) -> None:
        """Save a state in :meth:`folder`, atomically. It becomes part of a checkpoint at the next :meth:`seal` and
        :meth:`commit`.

        Args:
            fill: Writes the state's files into an empty folder.

        Raises:
            RunBusyError: The lock is lost; see :meth:`alto.runs.RunDir.check_lock`.
            RunWriteError: The disk is full or cannot be written.
        """
        self._run.check_lock()
        folder = self.folder(job, kind)
        fresh, previous = _sibling(folder, "new"), _sibling(folder, "previous")
        with _saving(self._run.root, folder):
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
            try:
                fill(fresh)
                (fresh / _STATE_FILE).write_text(json.dumps({"step": step}), encoding="utf-8")
            except BaseException:
                shutil.rmtree(fresh, ignore_errors=True)
                raise
            if folder in self._uncommitted:
                shutil.rmtree(folder)
            elif folder.exists():
                shutil.rmtree(previous, ignore_errors=True)
                folder.rename(previous)
            self._uncommitted.add(folder)
            fresh.rename(folder)
            self._unsealed[folder] = step

    def seal(self, unneeded: Iterable[tuple[str, Kind]] = ()) -> None:
        """Make every state that was saved here durable, and record the digests of its files.

        Args:
            unneeded: States that the checkpoint does not refer to; they are not sealed.

        Raises:
            RunWriteError: The disk is full or cannot be written.
        """
        for key in unneeded:
            self._unsealed.pop(self.folder(*key), None)
        for folder, step in list(self._unsealed.items()):
            with _saving(self._run.root, folder):
                _seal(folder, step)
                sync_folder(folder.parent)
            del self._unsealed[folder]

    def saved_elsewhere(self, job: str, kind: Kind) -> None:
        """Note that another rank saves a state."""
        self._uncommitted.add(self.folder(job, kind))
        self._unsealed.pop(self.folder(job, kind), None)

    def remove_predecessors(self) -> None:
        """Remove the states that the saved ones replace. Call it on one rank, after the checkpoint is durable and
        before any rank commits."""
        for folder in self._uncommitted:
            shutil.rmtree(_sibling(folder, "previous"), ignore_errors=True)

    def remove(self, job: str, kind: Kind) -> None:
        """Remove a state that no durable checkpoint refers to; no error if absent."""
        self._unsealed.pop(self.folder(job, kind), None)
        shutil.rmtree(self.folder(job, kind), ignore_errors=True)

    def commit(self) -> None:
        """Make every saved state part of the checkpoint."""
        self._uncommitted.clear()

    def folder(self, job: str, kind: Kind) -> Path:
        """Return the folder of a state."""
        return self._run.job(job, kind)

    def restore(self, steps: Mapping[tuple[str, Kind], int]) -> bool:
        """Restore the checkpoint that refers to ``steps``, and delete states saved later.

        Returns:
            False, with nothing changed, if one of its states is missing or damaged.
        """
        found = {key: self._find(*key, step) for key, step in steps.items()}
        if None in found.values():
            return False
        with _saving(self._run.root, self._run.root / "jobs"):
            for (job, kind), state in found.items():
                folder = self.folder(job, kind)
                if state is not None and state != folder:
                    shutil.rmtree(folder, ignore_errors=True)
                    state.rename(folder)
            for job_folder in (self._run.root / "jobs").glob("*"):
                for kind in KINDS:
                    for suffix in ("new", "previous"):
                        shutil.rmtree(job_folder / f"{kind}.{suffix}", ignore_errors=True)
                    if (job_folder.name, kind) not in steps:
                        shutil.rmtree(job_folder / kind, ignore_errors=True)
        self._uncommitted.clear()
        self._unsealed.clear()
        return True

    def _find(self, job: str, kind: Kind, step: int) -> Path | None:
        folder = self.folder(job, kind)
        candidates = (folder, _sibling(folder, "previous"))
        return next((candidate for candidate in candidates if _is_intact(candidate, step)), None)


def write_state(folder: Path, optimizer: OptimizerState) -> None:
    """Add the optimizer state to an adapter folder."""
    save_file(dict(optimizer.tensors), folder / _OPTIMIZER_FILE)


def read_state(folder: Path) -> tuple[AdapterWeights, OptimizerState]:
    """Return the adapter and the optimizer state in a ``last/`` folder."""
    step = read_json(folder / _STATE_FILE)["step"]
    return read_adapter(folder), OptimizerState(step=step, tensors=load_file(folder / _OPTIMIZER_FILE))


def _seal(folder: Path, step: int) -> None:
    """Make the files durable and record their digests."""
    digests = {}
    for path in sorted(folder.iterdir()):
        if path.name != _STATE_FILE:
            with path.open("rb") as file:
                digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
    replace_file(folder / _STATE_FILE, json.dumps({"step": step, "sha256": digests}))


def _is_intact(folder: Path, step: int) -> bool:
    """Return whether ``folder`` holds the state of ``step`` and every file matches its digest."""
    try:
        state = read_json(folder / _STATE_FILE)
        if state["step"] != step:
            return False
        for name, digest in state["sha256"].items():
            with open_regular(folder / name) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


@contextlib.contextmanager
def _saving(run: Path, what: Path) -> Iterator[None]:
    with writing(run, what):
        try:
            yield
        except SafetensorError as error:  # the writer raises its own error classes
            raise OSError(str(error)) from error


def _sibling(folder: Path, suffix: str) -> Path:
    return folder.with_name(f"{folder.name}.{suffix}")
