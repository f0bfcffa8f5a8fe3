"""Work cut into passes: what happens where some passes do not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from alto.data import EncodedDataset, JobRows
from alto.executor import micro_batches
from alto.executor.micro_batches import MemoryEvent, MicroBatches, NoMemoryError, RowTooLargeError

LENGTHS = (40, 10, 30, 20)
ROWS = tuple(torch.arange(length) for length in LENGTHS)
DATASET = EncodedDataset(input_ids=ROWS, targets=ROWS)
WORK = [JobRows(DATASET, 0, (0, 1)), JobRows(DATASET, 1, (2, 3))]
EVERY_ROW_ONCE = [(0, 0), (0, 1), (1, 2), (1, 3)]
Jobs = Sequence[JobRows]


@pytest.fixture(autouse=True)
def nothing_to_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip releasing memory, which takes long: these passes hold no tensors."""
    monkeypatch.setattr(micro_batches, "release_memory", lambda: None)


class Device:
    """A device that does the passes that ``fits`` accepts; it records the rows done, and the memory events."""

    def __init__(self, fits: Callable[[Jobs], bool]) -> None:
        self.micro_batches = MicroBatches(100, self._note)
        self.events: list[MemoryEvent] = []
        self.done: list[tuple[int, int]] = []
        self._fits = fits

    def run(self, work: Jobs = WORK) -> None:
        self.done.clear()
        self.micro_batches.run(work, self._run_micro_batch, forget=self.done.clear)

    def _note(self, event: MemoryEvent) -> None:
        self.events.append(event)

    def _run_micro_batch(self, jobs: Jobs) -> None:
        if not self._fits(jobs):
            raise NoMemoryError("backward")
        self.done += rows_of(jobs)


def rows_of(jobs: Jobs) -> list[tuple[int, int]]:
    return [(job.slot, row) for job in jobs for row in job.rows]


def num_tokens(jobs: Jobs) -> int:
    return sum(LENGTHS[row] for _, row in rows_of(jobs))


def test_the_limit_halves_until_passes_fit_and_stays() -> None:
    device = Device(lambda jobs: num_tokens(jobs) <= 45)
    device.run()
    assert device.done == EVERY_ROW_ONCE
    assert [(e.phase, e.slots, e.num_tokens, e.max_tokens_per_pass) for e in device.events] == [
        ("backward", (0, 1), 100, 50),
        ("backward", (0,), 50, 25),
    ]
    assert (device.micro_batches.max_tokens, device.micro_batches.largest) == (25, 40)
    device.run()
    assert device.done == EVERY_ROW_ONCE
    assert len(device.events) == 2


def test_a_row_by_itself_may_be_refused_once_in_every_step() -> None:
    tries = 0

    def every_second_time(jobs: Jobs) -> bool:
        nonlocal tries
        if rows_of(jobs) != [(1, 3)]:
            return len(rows_of(jobs)) == 1
        tries += 1
        return tries % 2 == 0

    device = Device(every_second_time)
    for _ in range(3):
        device.run()
        assert device.done == EVERY_ROW_ONCE
    assert tries == 6


def test_rows_by_themselves_may_be_refused_once_each() -> None:
    refused: set[tuple[int, int]] = set()

    def the_second_time(jobs: Jobs) -> bool:
        rows = set(rows_of(jobs))
        is_known = rows <= refused
        refused.update(rows if len(rows) == 1 else ())
        return is_known

    device = Device(the_second_time)
    device.run()
    assert device.done == EVERY_ROW_ONCE


def test_a_row_that_is_refused_twice_in_a_step_is_too_large() -> None:
    device = Device(lambda jobs: (1, 3) not in rows_of(jobs))
    with pytest.raises(RowTooLargeError) as caught:
        device.run()
    assert (caught.value.slot, caught.value.evidence["row_tokens"]) == (1, 20)
    assert device.done == []
    device.run(WORK[:1])
    assert device.done == EVERY_ROW_ONCE[:2]
