"""Splits work into micro-batches that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from alto.backbone import is_out_of_memory, release_memory
from alto.data import JobRows, PassSize, split_into_micro_batches
from alto.errors import DeviceMemoryError

Phase: TypeAlias = Literal["forward", "backward", "update", "evaluation", "bank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEvent:
    """An out-of-memory event, with the new limits.

    Attributes:
        slots: Local slots of the jobs whose rows did not fit.
        num_tokens: Tokens of the micro-batch that did not fit; 0 for other work.
        max_tokens_per_pass: Largest number of tokens of a micro-batch from now on.
        jobs: Ids of the resident jobs in ``slots``; empty while no bank holds a job.
        num_slots: Number of slots of the bank from now on; None if it is unchanged.
    """

    phase: Phase
    slots: tuple[int, ...]
    num_tokens: int
    max_tokens_per_pass: int
    jobs: tuple[str, ...] = ()
    num_slots: int | None = None


class NoMemoryError(MemoryError):
    """Internal signal: the work of ``phase`` did not fit into memory."""

    def __init__(self, phase: Phase) -> None:
        super().__init__(phase)
        self.phase: Phase = phase


class JobFailedError(Exception):
    """Internal signal: the job in ``slot`` cannot continue; all others can.

    Attributes:
        evidence: The reason, as numbers or text by name.
    """

    def __init__(self, slot: int, **evidence: float | str) -> None:
        super().__init__(slot, evidence)
        self.slot = slot
        self.evidence = evidence


class RowTooLargeError(JobFailedError):
    """Internal signal: a row of the job in ``slot`` does not fit, even in a micro-batch of its own.

    It is raised only on a single rank, where local slots are the slots of the jobs.
    """

    def __init__(self, slot: int, num_tokens: int, largest: int) -> None:
        super().__init__(slot, row_tokens=num_tokens, largest_micro_batch=largest)


@contextmanager
def watching(phase: Phase) -> Iterator[None]:
    """Turn every out-of-memory error of the enclosed work into :class:`NoMemoryError`.

    A caller that catches it must leave its ``except`` clause before it tries again: until then the error keeps the
    stack frames alive, and with them their tensors.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise NoMemoryError(phase) from error


OnMemoryEvent: TypeAlias = Callable[[MemoryEvent], None]


class MicroBatches:
    """Runs work one micro-batch at a time; if one does not fit into memory, the work starts again with smaller ones.

    Args:
        max_tokens: Initial largest number of tokens of a micro-batch.
        can_retry: Whether the work may start again. It cannot if other ranks have begun the micro-batch too: they wait
            for this rank in a collective, so the executor ends and is started again with smaller micro-batches.
        is_padded: Whether the model computes padded rows; then all token counts here include padding.

    Attributes:
        max_tokens: Largest number of tokens of a micro-batch, halved after one did not fit. A longer row is a
            micro-batch of its own.
        largest: Tokens of the largest micro-batch that fitted; 0 before the first.
    """

    def __init__(
        self, max_tokens: int, on_memory_event: OnMemoryEvent, *, can_retry: bool = True, is_padded: bool = False
    ) -> None:
        self.max_tokens = max_tokens
        self._can_retry = can_retry
        self._is_padded = is_padded
        self.largest = 0
        self._on_memory_event = on_memory_event

    def run(
        self,
        work: Sequence[JobRows],
        run_micro_batch: Callable[[Sequence[JobRows]], None],
        *,
        forget: Callable[[], None],
        prepare: Callable[[], None] = lambda: None,
        split_jobs: bool = False,
        num_micro_batches: int = 0,
    ) -> None:
        """Run ``work``. A single row is tried twice, because the memory released after the first attempt may be enough.

        Args:
            run_micro_batch: Runs one micro-batch; raises :class:`NoMemoryError` if it does not fit.
            forget: Undoes all micro-batches so far.
            prepare: Called before the first micro-batch of every attempt.
            split_jobs: See :func:`alto.data.split_into_micro_batches`.
            num_micro_batches: Smallest number of micro-batches; if ``work`` has fewer, the last ones are empty.

        Raises:
            RowTooLargeError: A single row does not fit; all micro-batches are undone.
            DeviceMemoryError: A micro-batch does not fit, and the work cannot start again.
        """
        refused = set()
        while True:
            prepare()
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
            num_tokens = self.num_tokens(jobs)
            self.max_tokens = max(1, min(self.max_tokens, num_tokens // 2))
            self.report(phase, slots, num_tokens)
            if not self._can_retry:
                raise DeviceMemoryError(
                    f"not enough memory for the {phase} of a micro-batch of {num_tokens:,} tokens; the "
                    f"next attempt uses micro-batches of at most {self.max_tokens:,} tokens"
                )
            if (slots, rows) in refused:  # a single row, which cannot be split further
                raise RowTooLargeError(jobs[0].slot, num_tokens, self.largest)
            refused.add((slots, rows))

    def count(self, work: Sequence[JobRows], *, split_jobs: bool = False) -> int:
        """Return the number of micro-batches of ``work``; ``work`` and ``split_jobs`` as in :meth:`run`."""
        return len(self.split(work, split_jobs=split_jobs))

    def split(self, work: Sequence[JobRows], *, split_jobs: bool = False) -> list[list[JobRows]]:
        """Return the micro-batches of ``work``; ``work`` and ``split_jobs`` as in :meth:`run`."""
        return list(split_into_micro_batches(work, self.max_tokens, split_jobs=split_jobs, is_padded=self._is_padded))

    def fits(self, job: JobRows) -> bool:
        """Return whether the rows of a job fit into one micro-batch, so that they need not be split."""
        return self.num_tokens([job]) <= self.max_tokens

    def num_tokens(self, jobs: Sequence[JobRows]) -> int:
        """Return the tokens of ``jobs`` as one micro-batch."""
        return sum((job.size for job in jobs), start=PassSize()).positions(is_padded=self._is_padded)

    def report(self, phase: Phase, slots: Sequence[int], num_tokens: int = 0) -> None:
        """Report that memory ran out, and the new size of micro-batches.

        Args:
            num_tokens: Tokens of the micro-batch; 0 for other work.
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
        """Return the phase and the jobs of the first micro-batch that does not fit; None if all fit."""
        micro_batches = self.split(work, split_jobs=split_jobs)
        for jobs in [*micro_batches, *[[]] * (num_micro_batches - len(micro_batches))]:
            try:
                run_micro_batch(jobs)
            except NoMemoryError as error:
                return error.phase, jobs
            self.largest = max(self.largest, self.num_tokens(jobs))
        return None
