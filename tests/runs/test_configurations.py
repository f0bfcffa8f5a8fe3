"""Configurations that jobs repeat with other seeds, as a finished run shows them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from alto.records import ExitReason
from alto.runs import RunHistory
from alto.runs.events import (
    JobAdded,
    JobDescription,
    JobEvaluated,
    JobExited,
    JournalEntry,
    TaskCompleted,
    TaskStarted,
)
from alto.runs.lead import lead_of_winner, repeated_configurations
from alto.views import choice_notes

LOSSES = {"a1": 1.0, "a2": 3.0, "b1": 1.6, "b2": 1.5, "c1": 4.0, "c2": 2.2}


def finished(
    losses: Mapping[str, float],
    best: str,
    *,
    failed: Sequence[str] = (),
    clones: Sequence[str] = (),
    metric: str = "loss",
    scores: Mapping[str, float] | None = None,
) -> RunHistory:
    """Return a run; the first letter of a job's name is its configuration, and clones repeat none."""
    events: list[Any] = [
        TaskStarted(
            **{"task": "t", "model": "m", "base_model": "m", "dataset": "d", "method": "sft", "metric": metric},
            **{"num_train": 9, "num_validation": 3, "data": {}, "max_slots": 2, "early_exit": {}, "device": "cpu"},
            **{"num_ranks": 1, "versions": {}},
            jobs=tuple(
                JobDescription(
                    job=job, config={"seed": job[1:]}, total_steps=10, samples_budgeted=10, configuration=f"{job[0]}1"
                )
                for job in losses
                if job not in clones
            ),
        )
    ]
    events += [
        JobAdded(job=job, config={}, total_steps=10, samples_budgeted=10, warm=True, command="1") for job in clones
    ]
    events += [
        JobEvaluated(
            job=job,
            step=5,
            total_steps=10,
            train_ema=1.0,
            validation_loss=loss,
            is_best=math.isfinite(loss),
            metrics={} if scores is None else {metric: scores[job]},
            loss_rows=(loss - 0.5, loss, loss + 0.5),
        )
        for job, loss in losses.items()
    ]
    events += [
        JobExited(
            job=job, reason=ExitReason.DIVERGING, evidence={}, slot=0, step=6, best_step=5, samples_trained=6,
            best_validation_loss=losses[job],
        )
        for job in failed
    ]  # fmt: skip
    events.append(
        TaskCompleted(best_job=best, best_validation_loss=losses[best], samples_trained=1, samples_budgeted=1)
    )
    return RunHistory.of(
        [JournalEntry(seq=index, time=float(index), event=event) for index, event in enumerate(events)]
    )


def names(history: RunHistory) -> list[list[str]]:
    return [[job.job for job in one.jobs] for one in repeated_configurations(history)]


def test_means_and_deviations_are_those_of_a_sample_and_the_best_mean_comes_first() -> None:
    found = repeated_configurations(finished(LOSSES, "b2"))
    assert [[job.job for job in one.jobs] for one in found] == [["b2", "b1"], ["a1", "a2"], ["c2", "c1"]]
    for one in found:
        values = [LOSSES[job.job] for job in one.jobs]
        assert one.mean == pytest.approx(sum(values) / 2)
        assert one.deviation == pytest.approx(math.sqrt(sum((value - one.mean) ** 2 for value in values)))
    assert found[0].metric == "loss"


def test_by_a_metric_a_higher_mean_is_better() -> None:
    scores = {"a1": 0.9, "a2": 0.1, "b1": 0.6, "b2": 0.7, "c1": 0.2, "c2": 0.9}
    history = finished(LOSSES, "b2", metric="accuracy", scores=scores)
    found = repeated_configurations(history)
    assert [one.jobs[0].job for one in found] == ["b2", "c2", "a1"]
    assert [one.mean for one in found] == pytest.approx([0.65, 0.55, 0.5])


def test_a_configuration_of_which_a_job_diverged_comes_after_all_others_as_it_was_ranked() -> None:
    """Its mean, over the adapters before the divergence, is the second best."""
    history = finished(LOSSES, "b2", failed=["a2"])
    assert names(history) == [["b2", "b1"], ["c2", "c1"], ["a1", "a2"]]
    lead = lead_of_winner(history)
    assert lead is not None
    assert lead.runner_up == "c2"
    (note,) = [note for note in choice_notes(history) if "the next best configuration (c2): 3.1" in note]
    assert note.endswith("ranked by their means; configurations with a job that diverged or failed rank last.")
    assert any(note.endswith("ranked by their means.") for note in choice_notes(finished(LOSSES, "b2")))


def test_a_configuration_without_a_known_mean_is_last() -> None:
    history = finished({**LOSSES, "b2": math.inf}, "a1")
    assert names(history) == [["a1", "a2"], ["c2", "c1"], ["b1", "b2"]]
    last = repeated_configurations(history)[-1]
    assert math.isnan(last.mean)
    assert math.isnan(last.deviation)
    winner = finished({**LOSSES, "b2": math.inf}, "b1")
    assert any("configuration: unknown over 2 seeds, as a job has no finite loss" in n for n in choice_notes(winner))


def test_a_clone_is_a_configuration_of_its_own() -> None:
    """The selection ranks a clone as a configuration: it may win, and be the next best."""
    losses = {**LOSSES, "x": 0.9}
    history = finished(losses, "x", clones=["x"])
    assert names(history) == [["x"], ["b2", "b1"], ["a1", "a2"], ["c2", "c1"]]
    lead = lead_of_winner(history)
    assert lead is not None
    assert lead.runner_up == "b2"
    note = choice_notes(history)[0]
    assert note.startswith("loss of x's configuration: 0.9 over 1 seed; the next best configuration (b2): 1.55 ± ")

    second = finished({**LOSSES, "x": 1.9}, "b2", clones=["x"])
    assert names(second)[:2] == [["b2", "b1"], ["x"]]
    lead = lead_of_winner(second)
    assert lead is not None
    assert lead.runner_up == "x"


def test_a_clone_that_diverged_is_ranked_by_its_best_adapter() -> None:
    """Only failed repetitions count against a configuration."""
    history = finished({**LOSSES, "x": 1.9}, "b2", clones=["x"], failed=["x"])
    assert names(history)[:2] == [["b2", "b1"], ["x"]]


def test_without_repetitions_there_are_none() -> None:
    assert repeated_configurations(finished({"x": 1.0, "y": 2.0}, "x", clones=["x", "y"])) == []


def test_the_next_best_job_of_one_configuration_is_another_seed() -> None:
    lead = lead_of_winner(finished({"a1": 1.0, "a2": 1.25}, "a1"))
    assert lead is not None
    assert lead.runner_up == "a2"
    assert lead.difference == pytest.approx(statistics.fmean([0.25] * 3))
