"""The audit agrees with the journal of a small live run, played from a recording in slots and waves."""

from __future__ import annotations

import json
import math

import pytest
from journals import entries

from alto.early_exit import Recording, Selection, audit, exits_of, policy_from, replay, selection_of
from alto.errors import RunError
from alto.records import ExitReason
from alto.spec.early_exit import EarlyExit


def journal_of_a_live_run(recording: Recording, settings: EarlyExit) -> list[dict]:
    """Return the journal of an executor that trains job after job; losses pass through JSON."""
    events: list[dict] = []

    def write(event: str, **fields: object) -> None:
        events.append(json.loads(json.dumps({"seq": len(events), "event": event, **fields})))

    entries = [
        {"job": job.job, "config": job.config, "total_steps": job.total_steps, "samples_budgeted": 200}
        for job in recording.jobs
    ]
    early_exit = settings.resolved().model_dump()
    write("task_started", task="t", num_train=100, num_validation=10, early_exit=early_exit, jobs=entries)
    tapes = {job.job: job for job in recording.jobs}
    selection = Selection(
        policy_from(settings),
        ema_alpha=settings.ema_alpha,
        total_steps={job.job: job.total_steps for job in recording.jobs},
    )
    while selection.training:
        for job in reversed(selection.training):
            while selection.is_training(job) and not selection.rungs.is_waiting(job):
                done = selection.history(job)[-1].step if selection.history(job) else 0
                due = [step for step, _ in tapes[job].evaluations if step > done]
                losses = tapes[job].train_losses[done : due[0] if due else None]
                write("train", job=job, first_step=done + 1, losses=losses)
                verdict = selection.observe_losses(job, done + 1, losses)
                if verdict is None:
                    loss = dict(tapes[job].evaluations)[due[0]]
                    write("eval", job=job, step=due[0], validation_loss=loss)
                    verdict = selection.observe(job, due[0], loss)
                if verdict is not None:
                    write("job_exited", job=job, step=verdict.step, reason=verdict.reason)
        while selection.rungs.is_ready():
            index = selection.rungs.held
            rung_result = selection.select()
            write("warmup_ended", rung=index, kept=rung_result.kept)
            for decision in rung_result.dropped:
                write("job_exited", job=decision.job, step=decision.step, reason=decision.reason)
    return events


@pytest.fixture(scope="module")
def recording(record) -> Recording:
    def falling(end: float):
        return lambda progress: end + math.exp(-20 * progress)

    curves = {f"job-{number}": (falling(1 + number / 10), falling(1.2 + number / 10)) for number in range(8)}
    curves["breaks"] = (lambda progress: 3.0 if progress < 0.03 else math.nan, falling(0.9))
    curves["overfits"] = (falling(0.2), lambda progress: falling(0.8)(progress) + max(0.0, progress - 0.2))
    return record(curves)


@pytest.mark.parametrize("settings", [EarlyExit(), EarlyExit(policy="paper"), EarlyExit(enabled=False)])
def test_live_run_replay_and_audit_agree(recording, settings) -> None:
    events = journal_of_a_live_run(recording, settings)
    replayed = replay(recording, policy_from(settings), settings.ema_alpha)
    assert exits_of(entries(events)) == replayed.exits
    assert replayed.exits["breaks"][0] is ExitReason.DIVERGING
    assert audit(entries(events)) == ()
    assert selection_of(entries(events)).winner().job == replayed.winner


def test_the_audit_notices_other_exits(recording) -> None:
    events = journal_of_a_live_run(recording, EarlyExit())
    index = next(index for index, event in enumerate(events) if event["event"] == "job_exited")
    job = events[index]["job"]
    (late,) = audit(entries([*events[:index], {**events[index], "step": 99}, *events[index + 1 :]]))
    assert (late.job, late.journalled[1]) == (job, 99)
    (missing,) = audit(entries(events[:index] + events[index + 1 :]))
    assert (missing.job, missing.journalled) == (job, None)
    assert missing.derived is not None


def test_exits_from_outside_are_taken_over(recording) -> None:
    events = journal_of_a_live_run(recording, EarlyExit())
    started = events[0]
    stopped = [started, {"event": "job_exited", "job": "job-0", "step": 0, "reason": "stopped", "evidence": {}}]
    assert audit(entries(stopped)) == ()
    assert not selection_of(entries(stopped)).is_training("job-0")


def test_half_a_journal_gives_the_race_as_it_stood(recording) -> None:
    events = journal_of_a_live_run(recording, EarlyExit())
    held = next(index for index, event in enumerate(events) if event["event"] == "warmup_ended")
    before, after = selection_of(entries(events[:held])), selection_of(entries(events[: held + 1]))
    assert before.rungs.is_ready()
    assert (before.rungs.held, after.rungs.held) == (0, 1)
    assert set(after.training) == set(events[held]["kept"])


def test_impossible_journals_are_refused(recording) -> None:
    events = journal_of_a_live_run(recording, EarlyExit())
    with pytest.raises(RunError, match="begins with task_started"):
        selection_of(entries(events[1:]))
    without_losses = [events[0], *events[2:]]
    with pytest.raises(RunError, match=r"Journal, event 2 \(eval\): Early exit: expected an evaluation"):
        selection_of(entries(without_losses))


def test_clones_and_reopened_jobs_are_part_of_the_story() -> None:
    """Two jobs; one is stopped and reopened, one is a clone that joins before the only rung."""
    entry = {"config": {}, "total_steps": 4, "samples_budgeted": 8}
    early_exit = EarlyExit(rungs=((0.5, 0.5),), detect_divergence=False, detect_overfitting=False).resolved()
    events: list[dict] = []

    def write(event: str, **fields: object) -> None:
        events.append({"seq": len(events), "event": event, **fields})

    def train(job: str, first: int, last: int, validation: float) -> None:
        write("train", job=job, first_step=first, losses=[1.0] * (last - first + 1))
        write("eval", job=job, step=last, validation_loss=validation)

    jobs = [{"job": "a", **entry}, {"job": "b", **entry}]
    write("task_started", task="t", num_train=8, num_validation=1, early_exit=early_exit.model_dump(), jobs=jobs)
    train("a", 1, 2, 1.0)
    write("job_exited", job="b", step=0, reason="stopped", evidence={})
    write("job_added", job="c", origin="a", **entry)
    write("job_reopened", job="b", step=0)
    train("b", 1, 2, 3.0)
    train("c", 1, 2, 2.0)
    write("warmup_ended", rung=0, kept=["a", "c"])
    write("job_exited", job="b", step=2, reason="underperforming")
    assert audit(entries(events)) == ()
    selection = selection_of(entries(events))
    assert selection.training == ("a", "c")
    assert exits_of(entries(events)) == {"b": (ExitReason.UNDERPERFORMING, 2)}
    without_clone = [event for event in events if event.get("job") != "c"]
    assert exits_of(entries(without_clone)) == {"b": (ExitReason.UNDERPERFORMING, 2)}
    assert audit(entries(without_clone)) == ()
