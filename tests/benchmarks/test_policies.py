"""The replay of policies at its smallest scale, its gate, and other tools' policies on hand-made curves."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib", reason="recordings are read with the bench extra: pip install -e '.[bench]'")

from alto.early_exit import RecordedJob, Recording
from alto.records import SplitLoss, StartValue
from benchmarks.policies import program as policies
from benchmarks.policies import times
from benchmarks.policies.outcomes import improvement_lost, interval, outcome_of, resampled
from benchmarks.policies.peers import PEERS, Kept, asha, hyperband, median, synchronous_halving

pytestmark = pytest.mark.slow("benchmarks")


def test_the_smallest_scale_passes_its_gate(tmp_path):
    assert policies.main(["--scale", "smoke", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "policies-smoke.json").read_text(encoding="utf-8"))
    assert found["gate"] == "passed"
    assert set(policies.GOALS) <= set(found["figures"])
    recordings = {row["recording"] for row in found["rows"]}
    assert len(found["rows"]) == len(recordings) * len(policies.POLICIES)
    assert {"ASHA", "Hyperband", "median pruner", "halving, eta 2", "paper"} <= {row["policy"] for row in found["rows"]}


def test_a_recording_that_does_not_know_the_base_fails_the_gate(tmp_path, monkeypatch):
    read = policies.Recording.read

    def forgetful(path):
        found = read(path)
        return replace(found, jobs=(*found.jobs[:-1], replace(found.jobs[-1], start=None)))

    monkeypatch.setattr(policies.Recording, "read", forgetful)
    assert policies.main(["--scale", "cpu", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "policies-cpu.json").read_text(encoding="utf-8"))
    assert found["figures"] == {}
    assert "the base's validation loss of every job" in " ".join(found["notes"])


def test_in_time_a_share_for_evaluations_takes_less_than_all_rows(tmp_path):
    assert times.main(["--scale", "smoke", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "times-smoke.json").read_text(encoding="utf-8"))
    assert found["gate"] == "passed"
    by = {(row["recording"], row["ratio"], row["policy"]): row for row in found["rows"]}
    for (recording, ratio, policy), row in by.items():
        if policy == "default":
            assert row["evaluating"] < by[recording, ratio, "all rows"]["evaluating"]


def test_another_winner_than_that_of_the_executor_fails_the_gate_of_times(tmp_path, monkeypatch):
    monkeypatch.setattr(times, "planned", lambda job, settings, num_rows: [(*job.evaluations[-1], num_rows)])
    assert times.main(["--scale", "smoke", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "times-smoke.json").read_text(encoding="utf-8"))
    assert found["figures"] == {}


STEPS = 40


def recorded(job: str, final: float, *, late: bool = False) -> RecordedJob:
    """Return a job whose loss falls linearly from 3 to ``final``; with ``late``, only in the second half."""
    losses = []
    for step in range(1, STEPS + 1):
        share = max(0.0, 2 * step / STEPS - 1) if late else step / STEPS
        losses.append(3 - share * (3 - final))
    return RecordedJob(
        job=job,
        config={},
        total_steps=STEPS,
        rows_per_step=1,
        train_losses=tuple(losses),
        evaluations=tuple(enumerate(losses, start=1)),
        start=StartValue(validation_loss=3.0),
        tests={
            0: SplitLoss(loss=3.0, rows=(2.0, 4.0)),
            **{step: SplitLoss(loss=loss + 0.1, rows=(loss, loss + 0.2)) for step, loss in enumerate(losses, start=1)},
        },
    )


def recording(*jobs: RecordedJob) -> Recording:
    return Recording(task={}, num_train=STEPS, jobs=jobs)


FIELD = recording(*(recorded(f"job-{index}", 1 + 0.1 * index) for index in range(8)))
BEST = Kept(job="job-0", step=STEPS, samples_trained=8 * STEPS)


@pytest.mark.parametrize("name", PEERS)
def test_where_the_order_never_changes_each_keeps_the_best_and_saves(name: str) -> None:
    outcomes = [outcome_of(FIELD, kept, BEST) for kept in PEERS[name](FIELD)]
    assert max(outcome.saved for outcome in outcomes) > 0.1
    for outcome in outcomes:
        if name != "Hyperband":  # its brackets are random
            assert (outcome.job, outcome.regret, outcome.lost) == ("job-0", 1.0, 0.0)


def test_halving_costs_what_its_rungs_say() -> None:
    """Eight jobs to 2.5 % (1 step), four to 5 %, two to 10 %, one to the end."""
    assert synchronous_halving(FIELD, 2).samples_trained == 4 * 1 + 2 * 2 + 1 * 4 + 40


def test_a_job_that_falls_late_is_lost_by_all_that_rank_early() -> None:
    jobs = recording(*FIELD.jobs, recorded("late", 0.5, late=True))
    best = Kept(job="late", step=STEPS, samples_trained=9 * STEPS)
    kept = synchronous_halving(jobs, 2)
    assert kept.job == "job-0"
    assert improvement_lost(jobs, kept, best) == pytest.approx((1.1 - 0.6) / (3.0 - 0.6))
    outcome = outcome_of(jobs, kept, best)
    assert outcome.regret == pytest.approx(2.0)
    assert outcome.test_regret == pytest.approx(1.1 / 0.6)
    assert outcome.within_error is False


@pytest.mark.parametrize("policy", [asha, hyperband, median])
def test_what_draws_depends_on_its_seed_alone(policy) -> None:
    assert policy(FIELD, seed=1) == policy(FIELD, seed=1)
    assert len({policy(FIELD, seed=seed).samples_trained for seed in range(8)}) > 1


def test_drawn_jobs_are_as_many_and_have_names_of_their_own() -> None:
    drawn = resampled(FIELD, 3)
    assert len({job.job for job in drawn.jobs}) == len(FIELD.jobs)
    low, high = interval(FIELD, lambda found: min(job.evaluations[-1][1] for job in found.jobs), 200)
    assert low == pytest.approx(1.0)
    assert 1.0 < high < 1.8
