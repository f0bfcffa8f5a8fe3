"""Rows of drafts as the model sees them, tokenised again only where that could change them."""

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
"""Drafts that tokenise rows at a time."""
_MOST_WAITING = 8
"""Each that waits has a thread of the server."""

_NOT_OF_ROWS = frozenset({"name", "dataset", "validation_dataset", "token_cache"})
"""Keys about data that do not change what is shown of the same files."""


class Previews:
    """Previews that were made lately. Used by any thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, DataPreview] = OrderedDict()
        self._lock = threading.Lock()
        self._turns = threading.Semaphore(_MOST_AT_ONCE)
        self._num_open = 0

    def preview(self, task: Task, files: Sequence[str], *, num_rows: int) -> DataPreview:
        """The first ``num_rows`` rows of ``task``, and counts of all.

        Args:
            task: The task.
            files: A digest of the content of each of its files.
            num_rows: Number of rows that are shown.

        Raises:
            AltoError: What is wrong with the rows.
            ApiError: Too many others are being made.
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
                    f"expected at most {self._num_open} drafts whose rows are read at a time, found another one; send "
                    "it again in some seconds, or with num_rows=0",
                    code="too_many_drafts",
                    headers={"Retry-After": "5"},
                )
            self._num_open += 1
        try:
            with self._turns:
                shown = self._found(key)  # another one may have made it meanwhile
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
    """Everything that a preview depends on, and whose it is: what another tenant has looked at takes as long again."""
    values = task.model_dump(mode="json", include=set(DataKeys.model_fields) - _NOT_OF_ROWS)
    return json.dumps(
        [task.tenant, values, task.base_model.key(), task.method, list(files), num_rows], sort_keys=True, default=str
    )
