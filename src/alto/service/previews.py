"""Previews of a draft's rows as the model sees them, tokenised again only if the preview could change."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence

from alto.engine.previewing import preview_data, with_model_notes
from alto.records import DataPreview
from alto.service.errors import ApiError
from alto.spec import Task
from alto.spec.data_keys import DataKeys

__all__ = ["Previews"]

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
        self._known: OrderedDict[str, DataPreview] = OrderedDict()
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
        shown = self._found(key)
        if shown is None:
            shown = self._made(key, task, num_rows)
        return with_model_notes(shown, task)

    def _found(self, key: str) -> DataPreview | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def _made(self, key: str, task: Task, num_rows: int) -> DataPreview:
        with self._lock:
            if self._num_open >= _MOST_AT_ONCE + _MOST_WAITING:
                raise ApiError(
                    429,
                    f"expected at most {self._num_open} drafts that read rows at the same time, found one more; "
                    "send it again in a few seconds, or with num_rows=0",
                    code="too_many_drafts",
                    headers={"Retry-After": "5"},
                )
            self._num_open += 1
        try:
            with self._turns:
                shown = self._found(key)  # another thread may have made it meanwhile
                if shown is None:
                    shown = preview_data(task, num_rows=num_rows)
                    self._keep(key, shown)
        finally:
            with self._lock:
                self._num_open -= 1
        return shown

    def _keep(self, key: str, shown: DataPreview) -> None:
        with self._lock:
            self._known[key] = shown
            while len(self._known) > _MOST:
                self._known.popitem(last=False)


def _key(task: Task, files: Sequence[str], num_rows: int) -> str:
    """Return a key of everything that a preview depends on, and of the tenant: response times must not reveal what
    another tenant has looked at."""
    values = task.model_dump(mode="json", include=set(DataKeys.model_fields) - _NOT_OF_ROWS)
    return json.dumps(
        [task.tenant, values, task.base_model.key(), task.method, list(files), num_rows], sort_keys=True, default=str
    )
