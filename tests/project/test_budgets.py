"""The order in which several workers run all tests."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from budgets import slowest_first


class Item:
    """What :func:`slowest_first` asks of a test."""

    def __init__(self, file: str, number: int, *, is_slow: bool = False) -> None:
        self.nodeid = f"{file}::test_{number}"
        self.is_slow = is_slow

    def get_closest_marker(self, name: str) -> Any:
        return True if name == "slow" and self.is_slow else None


@pytest.mark.parametrize("num_workers", [2, 3, 5])
def test_every_worker_begins_with_slow_files_and_files_stay_together(num_workers: int) -> None:
    items = [Item(f"light-{file}", number) for file in range(20) for number in range(10)]
    items[100:100] = [Item(f"slow-{file}", number, is_slow=number == 1) for file in range(5) for number in range(3)]
    found = slowest_first(items, num_workers)  # type: ignore[arg-type]
    assert sorted(map(id, found)) == sorted(map(id, items))
    starts = [worker * len(items) // num_workers for worker in range(num_workers)]
    assert all(found[start].nodeid.startswith("slow") for start in starts)
    files = [item.nodeid.partition("::")[0] for item in found]
    changes = sum(one != other for one, other in itertools.pairwise(files))
    assert changes <= 25 + num_workers, "a file is parted at the border of two workers at most"
