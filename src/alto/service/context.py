"""Objects that the parts of a running service share."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Generic, TypeAlias, TypeVar

from fastapi import Depends, Request

from alto.engine.start import preview_data, with_model_notes
from alto.errors import RunError
from alto.records import DataPreview
from alto.runs import QueueHistory, RunDir, RunHistory, read_history
from alto.service.access import RateLimiter
from alto.service.errors import ApiError
from alto.service.files import Artefacts
from alto.service.settings import ServiceSettings
from alto.service.store import Store
from alto.service.store.store import Refusals
from alto.service.store.tables import JobRow, Tenant
from alto.spec import DataKeys, Task

_LOG = logging.getLogger("alto.service.context")

_MOST_HISTORIES = 64
_MOST_FIGURES = 10_000

T = TypeVar("T")
_State: TypeAlias = tuple[int, ...]


class Histories:
    """A cache of recent run histories, which callers must not change. Thread-safe."""

    def __init__(self) -> None:
        self._histories: _Lately[Path, RunHistory] = _Lately(_MOST_HISTORIES)
        self._figures: _Lately[tuple[Path, Hashable], object] = _Lately(_MOST_FIGURES)

    def read(self, run: Path) -> RunHistory:
        """Return the history of a run; an empty one if it has no journal yet.

        Raises:
            RunError: The journal is damaged.
        """
        state = _state_of(run)
        return RunHistory() if state is None else self._histories.get(run, state, lambda: read_history(run))

    def figures(self, run: Path, of: Hashable, make: Callable[[RunHistory], T]) -> T:
        """Return a few numbers of a run. Many more runs are cached here than histories, so long lists of runs are
        cheap.

        Args:
            of: Anything else that the numbers depend on.
            make: Computes the numbers from the run's history; not called if the journal is unchanged.

        Raises:
            RunError: The journal is damaged.
        """
        state = _state_of(run)
        if state is None:
            return make(RunHistory())
        found: T = self._figures.get((run, of), state, lambda: make(self.read(run)))  # type: ignore[assignment]
        return found


K = TypeVar("K")


class _Lately(Generic[K, T]):
    """A cache of recent values, each with the state of the file that it was computed from. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[K, tuple[_State, T]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K, state: _State, make: Callable[[], T]) -> T:
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        if known is None or known[0] != state:
            known = (state, make())
            with self._lock:
                self._known[key] = known
                self._known.move_to_end(key)
                while len(self._known) > self._most:
                    self._known.popitem(last=False)
        return known[1]


def _state_of(run: Path) -> _State | None:
    """Return a value that changes with the journal of a run; None if it has no journal yet."""
    try:
        found = RunDir(run).journal_file.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


_MOST = 32
_MOST_AT_ONCE = 2
"""Maximum number of drafts whose rows are tokenised at the same time."""
_MOST_WAITING = 8
"""Maximum number of waiting drafts; each occupies a thread of the server."""

_NOT_OF_ROWS = frozenset({"name", "dataset", "validation_dataset", "token_cache"})
"""Data keys that do not change how the rows of given files are shown."""


class Previews:
    """A cache of recent previews. Thread-safe."""

    def __init__(self) -> None:
        self._known: _Lately[str, DataPreview] = _Lately(_MOST)
        self._lock = threading.Lock()
        self._turns = threading.Semaphore(_MOST_AT_ONCE)
        self._num_open = 0

    def preview(self, task: Task, files: Sequence[str], *, num_rows: int) -> DataPreview:
        """Return the first ``num_rows`` rows of ``task`` as the model sees them, and counts over all rows.

        Args:
            files: A digest of the content of each of the task's files.

        Raises:
            AltoError: The rows cannot be used.
            ApiError: Too many previews are being computed.
        """
        key = _key(task, files, num_rows)
        return with_model_notes(self._known.get(key, (), lambda: self._make_preview(key, task, num_rows)), task)

    def _make_preview(self, key: str, task: Task, num_rows: int) -> DataPreview:
        with self._lock:
            if self._num_open >= _MOST_AT_ONCE + _MOST_WAITING:
                raise ApiError(
                    429,
                    f"too many previews are being computed (limit {self._num_open}); retry in a few seconds, or send "
                    "num_rows=0",
                    code="too_many_drafts",
                    headers={"Retry-After": "5"},
                )
            self._num_open += 1
        try:
            with self._turns:  # another thread may have made it meanwhile
                return self._known.get(key, (), lambda: preview_data(task, num_rows=num_rows))
        finally:
            with self._lock:
                self._num_open -= 1


def _key(task: Task, files: Sequence[str], num_rows: int) -> str:
    """Return a cache key: everything that a preview depends on, and the tenant. Without the tenant, response times
    would reveal previews of other tenants."""
    values = task.model_dump(mode="json", include=set(DataKeys.model_fields) - _NOT_OF_ROWS)
    return json.dumps(
        [task.tenant, values, task.base_model.key(), task.method, list(files), num_rows], sort_keys=True, default=str
    )


# Journal folders of a service's control planes. Each leader has its own folder, so a leader that hangs does not block
# the next one.

_CONTROL = "control"


def control_folder(root: Path, epoch: int) -> Path:
    """Return the folder for the leader of an epoch; ``root`` is the data folder."""
    return root / _CONTROL / f"{epoch:08d}"


def newest_journal(root: Path) -> Path | None:
    """Return the journal of the latest leader; None if there was no leader yet."""
    found = sorted((root / _CONTROL).glob("*/journal.jsonl"))
    return found[-1] if found else None


def history_before(root: Path) -> QueueHistory:
    """Return the history of the latest leader's control plane; empty if there was none, or its journal is damaged."""
    journal = newest_journal(root)
    if journal is None:
        return QueueHistory()
    try:
        return QueueHistory.read(journal)
    except RunError as error:
        _LOG.warning("the machines that the cluster had before are not known: %s", error)
        return QueueHistory()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a tenant; None means unlimited."""

    max_gpus: int | None
    max_tasks: int | None
    max_bytes: int | None
    requests_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class Service:
    """A running service, as its request handlers and its coordinator use it.

    Attributes:
        refusals: Requests that were refused while the database did not answer.
        work: Set when the coordinator has something to do.
    """

    settings: ServiceSettings
    store: Store
    artefacts: Artefacts
    rates: RateLimiter = field(default_factory=RateLimiter)
    histories: Histories = field(default_factory=Histories)
    previews: Previews = field(default_factory=Previews)
    refusals: Refusals = field(default_factory=Refusals)
    work: threading.Event = field(default_factory=threading.Event)

    def limits_of(self, tenant: Tenant | None) -> Limits:
        """Return the limits of a tenant; the settings supply limits that it does not have itself."""
        names = ("max_gpus", "max_tasks", "max_bytes", "requests_per_s")
        found = {name: getattr(tenant, name, None) for name in names}
        return Limits(**{name: getattr(self.settings, name) if found[name] is None else found[name] for name in names})

    def run_of(self, job: JobRow) -> Path:
        """Return the run folder of a job. It holds copies of the job's files, so deleted uploads do not affect it."""
        return self.settings.root / "runs" / job.tenant / job.id

    def run_bytes(self, tenant: str) -> int:
        """Return the total size of a tenant's run folders in bytes; files that are removed meanwhile do not count."""
        found = 0
        for folder, _, names in os.walk(self.settings.root / "runs" / tenant):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    found += os.lstat(os.path.join(folder, name)).st_size
        return found


def service_of(request: Request) -> Service:
    """Return the service that a request was sent to."""
    found: Service = request.app.state.service
    return found


ServiceOf = Annotated[Service, Depends(service_of)]
