from __future__ import annotations

import math
from itertools import product

import pytest
from journals import Journal, config, entries

from alto.report.importance import Comparison, importance_of_settings
from alto.runs import RunHistory

GRID = list(product((1e-4, 1e-3, 1e-2), (4, 8, 16, 32)))


def history_of(loss_of, configs, *, stop_at_rung=(), rungs=((0.1, 0.5),)) -> RunHistory:
    """Return a run whose jobs have the loss of their configuration at 10 %, and the same loss at their end."""
    journal = Journal()
    jobs = {f"job-{index:02d}": config(*pair) for index, pair in enumerate(configs)}
    journal.start(jobs, early_exit={"policy": "alto", "rungs": rungs})
    for index, (job, pair) in enumerate(zip(jobs, configs, strict=True)):
        journal.train_to(job, 10, since=0, validation=loss_of(*pair))
        if index in stop_at_rung:
            journal.end("job_exited", job, 10, best=(10, 1.0), reason="underperforming", evidence={})
        else:
            journal.train_to(job, 100, since=10, validation=0.5)
    return RunHistory.of(entries(journal.events))


def first(history) -> Comparison:
    return importance_of_settings(history).comparisons[0]


def shares(history) -> dict[str, float]:
    return {setting.key: setting.share for setting in first(history).settings}


def test_the_setting_that_decides_has_it_all():
    found = first(history_of(lambda rate, rank: -math.log10(rate), GRID))
    assert [setting.key for setting in found.settings] == ["learning_rate", "r"]
    assert found.settings[0].share == pytest.approx(1.0)
    assert found.settings[1].share == 0.0
    assert (found.settings[0].best, found.settings[0].worst) == ("0.01", "1e-4")
    assert (found.num_jobs, found.progress, found.rest) == (12, 0.1, 0.0)


def test_settings_that_only_matter_together_are_the_rest():
    found = first(history_of(lambda rate, rank: float((rate > 1e-3) == (rank > 8)), GRID))
    assert found.rest > 0.8


def test_stopped_jobs_are_compared_where_all_were_evaluated():
    stopped = history_of(lambda rate, rank: float(rank), GRID, stop_at_rung=range(3, 12))
    assert shares(stopped)["r"] == pytest.approx(1.0)


def test_without_rungs_jobs_are_compared_at_the_last_progress_all_have_reached():
    history = history_of(lambda rate, rank: float(rank), GRID, stop_at_rung=[0], rungs=())
    assert first(history).progress == 0.1
    assert shares(history)["r"] == pytest.approx(1.0)


def test_a_diverging_job_ranks_last_and_distorts_nothing():
    def loss(rate, rank):
        return math.nan if rate == 1e-2 else rank + 1e-3 * rate

    found = first(history_of(loss, GRID))
    assert found.num_jobs == 12
    assert found.settings[0].key == "learning_rate"
    assert found.settings[0].worst == "0.01"


def test_a_job_that_diverged_before_it_was_evaluated_ranks_last_too():
    history = history_of(lambda rate, rank: float(rank), GRID)
    diverged, stopped = history.jobs["job-00"], history.jobs["job-01"]
    for job, reason in ((diverged, "diverging"), (stopped, "stopped")):
        job.evaluations, job.exit_reason = [], reason
    found = first(history)
    # The user's stop says nothing about the loss.
    assert (found.num_jobs, found.num_left_out) == (11, 1)


def test_chance_explains_little():
    # Losses without any pattern: eta squared of four groups among twelve jobs would still be 3/11 on average.
    noise = [0.1, 0.9, 0.5, 0.3, 0.8, 0.2, 0.6, 1.0, 0.4, 0.7, 0.0, 1.1]
    losses = dict(zip(GRID, noise, strict=True))
    found = first(history_of(lambda *pair: losses[pair], GRID))
    assert max(setting.share for setting in found.settings) < 0.15


def test_sampled_numbers_are_compared_in_three_ranges():
    sampled = [(1e-4 * 1.3**index, 8) for index in range(12)]
    found = first(history_of(lambda rate, rank: -rate, sampled))
    (setting,) = found.settings
    assert setting.share > 0.8
    assert setting.best == "8.16e-4 to 1.79e-3"


@pytest.mark.parametrize("num_jobs", [0, 1, 7])
def test_too_few_jobs_say_nothing(num_jobs):
    assert importance_of_settings(history_of(lambda rate, rank: 1.0 + rank, GRID[:num_jobs])) is None


def test_equal_losses_say_nothing():
    assert importance_of_settings(history_of(lambda rate, rank: 1.0, GRID)) is None


def test_clones_are_left_out():
    history = history_of(lambda rate, rank: float(rank), GRID)
    history.jobs["job-00"].origin = "job-01"
    found = first(history)
    assert (found.num_jobs, found.num_left_out) == (11, 1)


def test_jobs_are_ranked_by_what_the_task_chooses_by():
    journal = Journal()
    jobs = {f"job-{index:02d}": config(*pair) for index, pair in enumerate(GRID)}
    journal.start(jobs, method="dpo", metric="reward_accuracy")
    for job, (rate, rank) in zip(jobs, GRID, strict=True):
        journal.train_to(job, 10, since=0, validation=rate, metrics={"reward_accuracy": rank / 64})
    found = first(RunHistory.of(entries(journal.events)))
    assert found.settings[0].key == "r"
    assert (found.settings[0].best, found.settings[0].worst) == ("32", "4")


def fast_and_slow(num_kept: int = 12) -> RunHistory:
    """Return a sweep whose high rate leads after 10 % of the steps, while a low one is best at 50 % and wins."""
    grid = list(product((1e-4, 1e-3, 1e-2), (4, 8, 16, 32, 64, 128)))
    journal = Journal()
    jobs = {f"job-{index:02d}": config(*pair) for index, pair in enumerate(grid)}
    journal.start(jobs, early_exit={"policy": "alto", "rungs": [[0.1, 0.7], [0.5, 0.5]]})
    at_first = {1e-4: 4.0, 1e-3: 3.0, 1e-2: 2.0}
    later = {1e-4: 1.8, 1e-3: 1.0, 1e-2: 1.5}
    for job, (rate, rank) in zip(jobs, grid, strict=True):
        journal.train_to(job, 10, since=0, validation=at_first[rate] + rank / 1000)
    # The same number of jobs continues for each rate.
    kept = [job for index, job in enumerate(jobs) if index % 6 < num_kept // 3]
    for job in kept:
        rate, rank = jobs[job]["learning_rate"], jobs[job]["r"]
        journal.train_to(job, 50, since=10, validation=later[rate] + rank / 1000)
    for job in kept[4:6]:
        journal.train_to(job, 100, since=50, validation=later[jobs[job]["learning_rate"]] - 0.5)
    return RunHistory.of(entries(journal.events))


def test_a_value_that_leads_early_but_differs_from_the_winners_is_explained():
    """The first rung alone says that the rate 0.01 is best, though the winner has 1e-3."""
    history = fast_and_slow()
    found = importance_of_settings(history)
    early, late = found.comparisons
    assert history.best.config["learning_rate"] == 1e-3
    assert (early.progress, early.num_jobs, early.of("learning_rate").best) == (0.1, 18, "0.01")
    assert (late.progress, late.num_jobs, late.of("learning_rate").best) == (0.5, 12, "1e-3")
    assert found.winner["learning_rate"] == "1e-3"
    assert [one.key for one in found.overturned] == ["learning_rate"]
    assert late.of("learning_rate").is_winners
    assert late.num_left_out == 6


def test_too_few_jobs_that_continued_are_not_compared_again():
    assert [one.progress for one in importance_of_settings(fast_and_slow(6)).comparisons] == [0.1]


def test_what_agrees_with_the_winner_is_not_overturned():
    found = importance_of_settings(history_of(lambda rate, rank: -math.log10(rate) - 9 + rank / 1e4, GRID))
    assert (found.comparisons[0].settings[0].best, found.overturned) == ("0.01", ())
    assert found.winner == {"learning_rate": "0.01", "r": "4"}
