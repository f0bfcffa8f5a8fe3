"""Work cut into micro-batches that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from alto.backbone import release_memory
from alto.data import JobRows, split_into_micro_batches
from alto.errors import DeviceMemoryError
from alto.executor.memory_errors import MemoryEvent, NoMemoryError, Phase, RowTooLargeError

__all__ = ["MicroBatches", "OnMemoryEvent"]

OnMemoryEvent: TypeAlias = Callable[[MemoryEvent], None]


class MicroBatches:
    """Runs work one micro-batch at a time; where one does not fit into memory, again from the beginning in smaller
    ones.

    Args:
        max_tokens: Most tokens of a micro-batch to begin with.
        on_memory_event: Is told whenever memory ran out.
        can_retry: Whether it may begin again. It cannot where other ranks have begun the micro-batch too: they wait for
            this one in the middle of it, so the executor ends, and is started again with smaller micro-batches.

    Attributes:
        max_tokens: Most tokens of a micro-batch, half of those that did not fit. A row that has more is a micro-batch
            of its own.
        largest: Tokens of the largest micro-batch that fitted; 0 before the first.
    """

    def __init__(self, max_tokens: int, on_memory_event: OnMemoryEvent, *, can_retry: bool = True) -> None:
        self.max_tokens = max_tokens
        self._can_retry = can_retry
        self.largest = 0
        self._on_memory_event = on_memory_event

    def run(
        self,
        work: Sequence[JobRows],
        run_micro_batch: Callable[[Sequence[JobRows]], None],
        *,
        forget: Callable[[], None],
        split_jobs: bool = False,
        num_micro_batches: int = 0,
    ) -> None:
        """Do ``work``; a row by itself is tried twice, as what is released after the first time may be enough.

        Args:
            work: Rows by slot.
            run_micro_batch: Does one micro-batch; raises :class:`NoMemoryError` where it does not fit.
            forget: Undoes all micro-batches so far.
            split_jobs: See :func:`alto.data.split_into_micro_batches`.
            num_micro_batches: How many there are at least: where ``work`` has fewer, the last ones are empty.

        Raises:
            RowTooLargeError: A row does not fit by itself; all micro-batches are undone.
            DeviceMemoryError: A micro-batch does not fit, and it cannot begin again.
        """
        refused = set()
        while True:
            failure = self._first_failure(
                work, run_micro_batch, split_jobs=split_jobs, num_micro_batches=num_micro_batches
            )
            if failure is None:
                return
            phase, jobs = failure
            forget()
            release_memory()
            slots = tuple(job.slot for job in jobs)
            rows = tuple(row for job in jobs for row in job.rows)
            num_tokens = _num_tokens(jobs)
            self.max_tokens = max(1, min(self.max_tokens, num_tokens // 2))
            self.report(phase, slots, num_tokens)
            if not self._can_retry:
                raise DeviceMemoryError(
                    f"expected memory for the {phase} of a pass of {num_tokens:,} tokens, found less; the next attempt "
                    f"makes passes of at most {self.max_tokens:,}"
                )
            if (slots, rows) in refused:  # nothing was left to be cut
                raise RowTooLargeError(jobs[0].slot, num_tokens)
            refused.add((slots, rows))

    def count(self, work: Sequence[JobRows], *, split_jobs: bool = False) -> int:
        """How many micro-batches ``work`` is cut into; ``work`` and ``split_jobs`` as of :meth:`run`."""
        return sum(1 for _ in split_into_micro_batches(work, self.max_tokens, split_jobs=split_jobs))

    def report(self, phase: Phase, slots: Sequence[int], num_tokens: int = 0) -> None:
        """Say that memory ran out, and how large micro-batches are from now on.

        Args:
            phase: What did not fit.
            slots: Local slots of the jobs that had a part in it.
            num_tokens: Tokens of the micro-batch; 0 where it was none.
        """
        self._on_memory_event(
            MemoryEvent(phase=phase, slots=tuple(slots), num_tokens=num_tokens, max_tokens_per_pass=self.max_tokens)
        )

    def _first_failure(
        self,
        work: Sequence[JobRows],
        run_micro_batch: Callable[[Sequence[JobRows]], None],
        *,
        split_jobs: bool,
        num_micro_batches: int,
    ) -> tuple[Phase, list[JobRows]] | None:
        """The first micro-batch that does not fit, and what it was about; None when all is done."""
        micro_batches = list(split_into_micro_batches(work, self.max_tokens, split_jobs=split_jobs))
        for jobs in [*micro_batches, *[[]] * (num_micro_batches - len(micro_batches))]:
            try:
                run_micro_batch(jobs)
            except NoMemoryError as error:
                return error.phase, jobs
            self.largest = max(self.largest, _num_tokens(jobs))
        return None


def _num_tokens(jobs: Sequence[JobRows]) -> int:
    return sum(job.num_tokens for job in jobs)
