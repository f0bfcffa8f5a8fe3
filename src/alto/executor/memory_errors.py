"""Out-of-memory errors, as events for the training loop of a task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from alto.backbone import is_out_of_memory

__all__ = [
    "MemoryEvent",
    "NoMemoryError",
    "Phase",
    "RowTooLargeError",
    "watching",
]

Phase: TypeAlias = Literal["forward", "backward", "update", "evaluation", "bank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEvent:
    """An out-of-memory event, with the new limits.

    Attributes:
        phase: The work that did not fit.
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


class RowTooLargeError(Exception):
    """Internal signal: a row of the job in ``slot`` does not fit, even in a micro-batch of its own."""

    def __init__(self, slot: int, num_tokens: int) -> None:
        super().__init__(slot, num_tokens)
        self.slot = slot
        self.num_tokens = num_tokens


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
