"""Replays a recording under a policy and reports which jobs exit, how many samples are saved, and the regret."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from alto.early_exit.policy import Policy
from alto.early_exit.recording import RecordedJob, Recording
from alto.early_exit.selection import Selection
from alto.records import JobResult
from alto.spec import loss_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """The outcome of a policy on a recording.

    Attributes:
        winner: Job with the best evaluation that the policy lets the jobs reach; None if no evaluation was finite.
        winner_step: Step of that evaluation; 0 if there is none.
        best_kept: Validation loss of that evaluation; infinity if there is none.
        best_of_all: Validation loss of the best evaluation of the whole recording.
    """

    jobs: tuple[JobResult, ...]
    winner: str | None
    winner_step: int
    best_kept: float
    best_of_all: float

    @property
    def samples_trained(self) -> int:
        return sum(job.samples_trained for job in self.jobs)

    @property
    def samples_budgeted(self) -> int:
        return sum(job.samples_budgeted for job in self.jobs)

    @property
    def samples_saved(self) -> float:
        """Fraction of the budgeted samples that were not trained."""
        return 1.0 - self.samples_trained / self.samples_budgeted

    @property
    def saved_by(self) -> Mapping[str, float]:
        """Fraction of the budgeted samples that were not trained, by the pattern that saved them; the sum is
        `samples_saved`."""
        saved: dict[str, float] = {}
        for job in self.jobs:
            if job.exit_reason is not None:
                fraction = (job.samples_budgeted - job.samples_trained) / self.samples_budgeted
                saved[job.exit_reason] = saved.get(job.exit_reason, 0.0) + fraction
        return saved

    @property
    def exits(self) -> Mapping[str, tuple[str, int]]:
        """Reason and step of every job that was stopped early, by job id."""
        return {job.job: (job.exit_reason, job.steps) for job in self.jobs if job.exit_reason is not None}

    @property
    def regret(self) -> float:
        """Best loss kept, divided by the best loss of all: 1 if the winner was kept, larger if a worse job was.

        Infinite if the best of all is not above zero, which the losses of some preference methods allow. It compares
        losses, so for a task that selects by another metric it says nothing about the winner.
        """
        if self.best_kept == self.best_of_all:
            return 1.0
        return self.best_kept / self.best_of_all if self.best_of_all > 0 else math.inf


def replay(recording: Recording, policy: Policy, ema_alpha: float) -> ReplayResult:
    """Run ``policy`` over ``recording`` as the executor would.

    A rung is decided at the first recorded evaluation at or after its step. Therefore a recording without an evaluation
    at a rung delays the policy and does not improve it. If a job has no recorded evaluation before its first step, a
    rung before its first evaluation ranks it by that evaluation.
    """
    selection = Selection(
        policy,
        ema_alpha=ema_alpha,
        total_steps={job.job: job.total_steps for job in recording.jobs},
        loss_scales={job.job: loss_scale(job.config) for job in recording.jobs},
        configuration_of={job.job: job.configuration for job in recording.jobs if job.configuration is not None},
    )
    for recorded in recording.jobs:
        if recorded.start is not None:
            selection.observe_base(recorded.job, recorded.start)
    tapes = {job.job: _tape(job, selection) for job in recording.jobs}
    while selection.training:
        for job in selection.training:
            while selection.is_training(job) and not selection.rungs.is_waiting(job):
                next(tapes[job])
        while selection.rungs.is_ready():
            selection.select()
    winner = selection.winner()
    everything = (
        (-score, loss) for job in recording.jobs for _, loss, score, _ in job.scored_evaluations if math.isfinite(loss)
    )
    _, best_of_all = min(everything, default=(0.0, math.inf))
    return ReplayResult(
        jobs=tuple(_result(recording, job, selection) for job in recording.jobs),
        winner=None if winner is None else winner.job,
        winner_step=0 if winner is None else winner.step,
        best_kept=math.inf if winner is None else winner.validation_loss,
        best_of_all=best_of_all,
    )


def _tape(recorded: RecordedJob, selection: Selection) -> Iterator[None]:
    """Feed one recorded job into ``selection``, one evaluation at a time."""
    job, played = recorded.job, 0
    for step, validation_loss, score, rows in (
        *recorded.scored_evaluations,
        (len(recorded.train_losses), None, 0.0, ()),
    ):
        verdict = selection.observe_losses(job, played + 1, recorded.train_losses[played:step])
        played = step
        if verdict is None:
            assert validation_loss is not None, f"{job} was not recorded to its end"
            selection.observe(job, step, validation_loss, score, rows)
        yield


def _result(recording: Recording, job: RecordedJob, selection: Selection) -> JobResult:
    decision = selection.decision_on(job.job)
    best = selection.best(job.job)
    steps = job.total_steps if decision is None else decision.step
    return JobResult(
        job=job.job,
        config=job.config,
        steps=steps,
        total_steps=job.total_steps,
        exit_reason=None if decision is None else decision.reason,
        exit_evidence={} if decision is None else decision.evidence,
        best_step=0 if best is None else best.step,
        best_validation_loss=math.inf if best is None else best.validation_loss,
        samples_trained=recording.samples_after(job, steps),
        samples_budgeted=recording.samples_after(job, job.total_steps),
    )
