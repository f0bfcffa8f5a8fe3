"""Which way the end of a task is thought to take how long."""

from __future__ import annotations

import pytest

from alto.records import Throughput
from alto.scheduler import LastJob, forecast_last_jobs


def law(*, step_s: float = 0.0, job_s: float = 0.0, token_s: float = 0.0) -> Throughput:
    return Throughput(step_s=step_s, job_s=job_s, token_s=token_s, eval_token_s=0.0, points=())


def test_where_tokens_alone_count_all_gpus_are_as_much_sooner_as_they_are_more() -> None:
    found = forecast_last_jobs([LastJob(num_tokens=100, num_steps=10)], law(token_s=0.01), 4)
    assert found is not None
    assert found.num_gpus == 1
    # A token of a step of four ranks costs a quarter of one on a rank of its own.
    assert found.spread_duration_s == pytest.approx(10 * 100 * 0.01)
    assert found.duration_s == pytest.approx(4 * found.spread_duration_s)


def test_where_steps_cost_what_they_cost_the_other_gpus_are_wasted() -> None:
    found = forecast_last_jobs([LastJob(num_tokens=100, num_steps=10)], law(step_s=0.5), 4)
    assert found is not None
    assert found.duration_s == found.spread_duration_s == pytest.approx(5.0)


def test_jobs_end_one_after_the_other() -> None:
    jobs = [LastJob(num_tokens=30, num_steps=5), LastJob(num_tokens=10, num_steps=20)]
    found = forecast_last_jobs(jobs, law(step_s=1.0, token_s=0.01, job_s=0.1), 4)
    assert found is not None
    assert found.num_gpus == 2
    assert found.duration_s == pytest.approx(5 * (1 + 0.4 + 1.2) + 15 * (1 + 0.4 + 0.4))
    assert found.spread_duration_s == pytest.approx(5 * (1 + 0.8 + 0.4) + 15 * (1 + 0.4 + 0.1))


@pytest.mark.parametrize("count", [0, 2, 3])
def test_no_tail_without_idle_ranks(count: int) -> None:
    assert forecast_last_jobs([LastJob(num_tokens=1, num_steps=1)] * count, law(step_s=1.0), 2) is None


class TestRungsAhead:
    """A rung ends jobs on both ways, so what they would have trained behind it counts on neither."""

    def test_the_one_that_finishes_trains_alone_from_there(self) -> None:
        jobs = [LastJob(num_tokens=10, num_steps=80, step=20)] * 3
        found = forecast_last_jobs(jobs, law(step_s=1.0, token_s=0.01), 4, places=[(0.2, 3), (0.4, 1)])
        assert found is not None
        assert found.num_gpus == 3
        assert found.duration_s == pytest.approx(80 * (1 + 4 * 10 * 0.01))
        assert found.spread_duration_s == pytest.approx(20 * (1 + 3 * 10 * 0.01) + 60 * (1 + 10 * 0.01))

    def test_the_one_with_the_most_work_is_thought_to_finish(self) -> None:
        jobs = [LastJob(num_tokens=10, num_steps=5, step=5), LastJob(num_tokens=40, num_steps=50, step=50)]
        found = forecast_last_jobs(jobs, law(token_s=0.01), 4, places=[(0.6, 1)])
        assert found is not None
        assert found.spread_duration_s == pytest.approx((1 * 10 + 50 * 40) * 0.01)

    def test_a_rung_that_lies_behind_ends_nobody(self) -> None:
        jobs = [LastJob(num_tokens=10, num_steps=10, step=90)] * 2
        found = forecast_last_jobs(jobs, law(step_s=1.0, job_s=0.1), 4, places=[(0.4, 1), (0.9, 1)])
        assert found is not None
        assert found.spread_duration_s == pytest.approx(10 * (1 + 4 * 2 * 0.1))

    def test_a_rung_between_two_steps_lies_at_the_later_one(self) -> None:
        jobs = [LastJob(num_tokens=10, num_steps=7)] * 2
        found = forecast_last_jobs(jobs, law(step_s=1.0, job_s=0.1), 4, places=[(0.5, 1)])
        assert found is not None
        assert found.spread_duration_s == pytest.approx(4 * (1 + 4 * 2 * 0.1) + 3 * (1 + 4 * 0.1))
