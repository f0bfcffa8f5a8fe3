"""Which jobs end so that the leading one comes to its end within a budget."""

from __future__ import annotations

import pytest

from alto.search import Need, beyond_budget


@pytest.mark.parametrize(
    ("needs", "ended"),
    [
        ({}, ()),
        ({"a": 0.5, "b": 0.5}, ()),
        ({"a": 0.96, "b": 0.2}, ("b",)),  # the leader needs all that is left
        ({"a": 1.2, "b": 0.5, "c": 1.1}, ("a", "c")),  # cannot be finished any more
        ({"a": 1.2, "b": 0.96, "c": 0.5}, ("a", "c")),
        ({"a": 1.2, "b": 1.1}, ("b",)),  # none can be finished: the best of them trains on
    ],
)
def test_jobs_end_for_the_leader(needs: dict[str, float], ended: tuple[str, ...]) -> None:
    margins = {job: Need(share=share, reserved=share + 0.05) for job, share in needs.items()}
    assert beyond_budget(tuple(needs), margins) == ended
