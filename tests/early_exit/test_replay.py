from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.early_exit import Policy, RecordedJob, Recording, policy_from, replay
from alto.records import ExitReason
from alto.spec.early_exit import EarlyExit

TWO_RUNGS = EarlyExit(rungs=((0.025, 0.5), (0.05, 0.2)))
ALTO, PAPER, NONE = EarlyExit(), EarlyExit(policy="paper"), EarlyExit(enabled=False)


def falling(end):
    return lambda progress: end + (4.0 - end) * math.exp(-30 * progress)


@pytest.fixture(scope="module")
def sweep(record) -> Recording:
    """Twenty jobs on small data; the best job's training loss falls far below its validation loss, which still
    falls."""
    curves = {f"poor-{number:02}": (falling(3.0 + number / 20),) * 2 for number in range(16)}
    curves["best"] = (falling(0.6), lambda progress: falling(1.2)(progress) - 0.2 * progress)
    curves["overfits"] = (falling(0.5), lambda progress: falling(1.3)(progress) + 2 * max(0.0, progress - 0.3))
    curves["diverges"] = (lambda progress: 4.0 + 40 * progress,) * 2
    curves["breaks"] = (lambda progress: 3.0 if progress < 0.02 else math.nan, falling(3.0))
    return record(curves)


def test_two_rungs_on_a_sweep_by_hand(sweep) -> None:
    result = replay(sweep, policy_from(TWO_RUNGS), 0.1)
    exits = result.exits
    assert exits["breaks"] == (ExitReason.DIVERGING, 4)
    assert exits["diverges"] == (ExitReason.UNDERPERFORMING, 5)
    assert exits["overfits"][0] is ExitReason.OVERFITTING
    assert 60 < exits["overfits"][1] <= 100
    # 19 jobs reach the first rung, which keeps 10; the second keeps 2 of these.
    assert sorted(step for reason, step in exits.values() if reason is ExitReason.UNDERPERFORMING) == [5] * 9 + [10] * 8
    assert "best" not in exits
    assert (result.winner, result.regret) == ("best", 1.0)
    trained = 2 * (4 + 9 * 5 + 8 * 10 + exits["overfits"][1] + 200)
    assert result.samples_trained == trained
    assert result.samples_budgeted == 20 * 400
    assert result.samples_saved == pytest.approx(1 - trained / 8000)


def test_the_paper_s_gap_test_loses_the_best_job_and_the_default_keeps_it(sweep) -> None:
    paper = replay(sweep, policy_from(PAPER), 0.1)
    assert paper.exits["best"][0] is ExitReason.OVERFITTING
    assert paper.regret > 1.05
    alto = replay(sweep, policy_from(ALTO), 0.1)
    assert alto.best_kept < paper.best_kept
    assert alto.samples_saved > 0.85


def test_savings_add_up_over_patterns(sweep) -> None:
    result = replay(sweep, policy_from(TWO_RUNGS), 0.1)
    assert set(result.saved_by) == {ExitReason.DIVERGING, ExitReason.OVERFITTING, ExitReason.UNDERPERFORMING}
    assert sum(result.saved_by.values()) == pytest.approx(result.samples_saved)


@pytest.mark.parametrize("settings", [ALTO, PAPER, NONE])
def test_the_order_of_jobs_does_not_matter(sweep, settings) -> None:
    shuffled = Recording(
        task=sweep.task, num_train=sweep.num_train, jobs=tuple(random.Random(1).sample(sweep.jobs, len(sweep.jobs)))
    )
    one, two = replay(sweep, policy_from(settings), 0.1), replay(shuffled, policy_from(settings), 0.1)
    assert one.exits == two.exits
    assert (one.winner, one.best_kept, one.samples_trained) == (two.winner, two.best_kept, two.samples_trained)


@pytest.mark.parametrize("settings", [ALTO, PAPER])
def test_a_written_recording_replays_alike(sweep, settings, tmp_path) -> None:
    sweep.write(tmp_path / "r.json.gz")
    read = Recording.read(tmp_path / "r.json.gz")
    assert replay(read, policy_from(settings), 0.1).exits == replay(sweep, policy_from(settings), 0.1).exits


def test_every_job_may_exit(record) -> None:
    broken = record({job: (lambda _: math.nan, falling(1.0)) for job in "ab"})
    result = replay(broken, policy_from(ALTO), 0.1)
    assert result.exits == {"a": (ExitReason.DIVERGING, 1), "b": (ExitReason.DIVERGING, 1)}
    assert (result.winner, result.best_kept, result.regret) == (None, math.inf, 1.0)
    assert [job.best_step for job in result.jobs] == [0, 0]


def test_a_rung_the_recording_has_no_evaluation_for_is_held_at_the_next() -> None:
    jobs = tuple(
        RecordedJob(
            job=job,
            config={},
            total_steps=100,
            rows_per_step=1,
            train_losses=(loss,) * 100,
            evaluations=((10, loss), (100, loss)),
        )
        for job, loss in {"a": 1.0, "b": 2.0}.items()
    )
    policy = policy_from(EarlyExit(rungs=[(0.05, 0.5)]))
    result = replay(Recording(task={}, num_train=100, jobs=jobs), policy, 0.1)
    assert result.exits == {"b": (ExitReason.UNDERPERFORMING, 10)}


@st.composite
def recordings(draw, *, finite=False) -> Recording:
    loss = st.floats(0.01, 10) if finite else st.floats(0.01, 10) | st.sampled_from([math.nan, math.inf])
    num_train, jobs = draw(st.integers(1, 12)), []
    for number in range(draw(st.integers(1, 8))):
        batch_size = draw(st.integers(1, 4))
        total = math.ceil(num_train / batch_size) * draw(st.integers(1, 2))
        evaluated = sorted(draw(st.sets(st.integers(1, total))) | {total})
        jobs.append(
            RecordedJob(
                job=f"job-{number}",
                config={},
                total_steps=total,
                rows_per_step=batch_size,
                train_losses=tuple(draw(st.lists(loss, min_size=total, max_size=total))),
                evaluations=tuple((step, draw(loss)) for step in evaluated),
            )
        )
    return Recording(task={}, num_train=num_train, jobs=tuple(jobs))


@given(recordings(finite=True))
def test_no_policy_saves_nothing_and_regrets_nothing(recording: Recording) -> None:
    result = replay(recording, Policy(), 0.1)
    assert (result.samples_saved, result.regret, result.exits) == (0.0, 1.0, {})


@given(recordings(), st.sampled_from([ALTO, PAPER, NONE, EarlyExit(rungs=[(0.2, 0.5), (0.6, 0.5)])]))
def test_never_more_than_the_budget_and_always_the_same(recording: Recording, settings: EarlyExit) -> None:
    result = replay(recording, policy_from(settings), settings.ema_alpha)
    assert 0 <= result.samples_trained <= result.samples_budgeted
    assert all(0 < job.samples_trained <= job.samples_budgeted for job in result.jobs)
    assert sum(result.saved_by.values()) == pytest.approx(result.samples_saved)
    assert result.regret >= 1.0
    again = replay(recording, policy_from(settings), settings.ema_alpha)
    assert (again.exits, again.winner) == (result.exits, result.winner)
