"""Records a task in its journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from alto.executor.context import ROUTER_LOSS, JobState, TaskContext
from alto.executor.micro_batches import MemoryEvent
from alto.executor.ranks import Ranks
from alto.executor.recovery import oom_record_event, write_oom_record
from alto.executor.tally import Evaluated
from alto.records import ExitDecision, LossPoint
from alto.runs import Event, Journal, RunDir
from alto.runs.events import (
    BaseEvaluated,
    BestMeasured,
    CheckpointSaved,
    JobAdded,
    JobAdmitted,
    JobCompleted,
    JobDescription,
    JobEvaluated,
    JobExited,
    JobParked,
    JobResumed,
    OutOfMemory,
    SavedJob,
    StartMeasurement,
    TaskCompleted,
    TiedJob,
    TrainSteps,
)
from alto.spec import LOSS


class JournalRecorder:
    """Writes events into the journal. :meth:`append` writes any event; events that are built from other objects have a
    separate method.

    It changes the state of jobs in one way: recorded values are removed from ``unsaved_losses`` and
    ``unsaved_metrics``.

    Args:
        journal: Journal of the run; it writes nothing on ranks other than the first.
        run_dir: The run directory; with several ranks it contains ``oom.json``, the record of the micro-batch that did
            not fit into memory.
    """

    def __init__(self, journal: Journal, run_dir: RunDir, ranks: Ranks) -> None:
        self._journal = journal
        self._run_dir = run_dir
        self._ranks = ranks
        self._unreported: list[MemoryEvent] = []
        self._has_begun = False

    def append(self, event: Event) -> None:
        """Record an event."""
        self._journal.append(event)

    def begin(self, events: Iterable[Event], oom_record: Mapping[str, Any] | None) -> None:
        """Record that the task starts or is resumed, then the memory events until now.

        Args:
            events: Events to record; the first is ``TaskStarted`` or ``TaskResumed``.
            oom_record: Fields of the ``OutOfMemory`` event that ended the previous attempt, which could not record it.
        """
        for event in events:
            self.append(event)
        if oom_record is not None:
            self.append(oom_record_event(oom_record))
        self._has_begun = True
        self._record_memory_events()

    def memory_ran_out(self, event: MemoryEvent) -> None:
        """Record a memory event. An event before the task begins is recorded after the task's first event."""
        if not self._ranks.is_alone and event.phase in ("forward", "backward", "evaluation"):
            write_oom_record(self._run_dir, _out_of_memory(event))  # for the next attempt, because this attempt ends
            return
        self._unreported.append(event)
        if self._has_begun:
            self._record_memory_events()

    def base_evaluated(
        self, found: Iterable[tuple[Sequence[str], Evaluated, Evaluated | None]], context: TaskContext
    ) -> None:
        """Record evaluations of the jobs' starting point.

        Args:
            found: For each evaluation the ids of its jobs, its result on the validation rows and its result on the test
                rows.
        """
        values = tuple(
            StartMeasurement(
                jobs=tuple(jobs),
                validation_loss=value.loss,
                metrics=value.metrics,
                metric_rows=value.rows_of(context.row_metric),
                loss_rows=value.kept_rows(context) or _compact(value.rows_of(LOSS)),
                answers=value.answers,
                **_test_facts(test),
            )
            for jobs, value, test in found
        )
        self.append(BaseEvaluated(values=values))

    def job_admitted(self, job: JobState, reason: str, ranks: Sequence[int]) -> None:
        """Record that a job has entered its slot, for the first time or again.

        Args:
            ranks: The ranks that train the job; recorded only if the executor has several ranks.
        """
        assert job.slot is not None
        kind = JobResumed if job.step else JobAdmitted
        of_several = () if self._ranks.is_alone else tuple(ranks)
        self.append(kind(job=job.id, slot=job.slot, step=job.step, reason=reason, ranks=of_several))

    def job_parked(self, job: JobState, slot: int | None, reason: str) -> None:
        """Record that a job was parked because of ``reason``: it has left ``slot``, and its state is kept."""
        self.append(JobParked(job=job.id, slot=slot, step=job.step, reason=reason))

    def job_completed(self, job: JobState, slot: int | None, best: LossPoint | None) -> None:
        """Record that a job has done all its steps.

        Args:
            slot: The slot that the job has left; None if it was not in a slot.
            best: Its best evaluation; None if no evaluation was finite.
        """
        self.append(JobCompleted(**_ending(job, slot, best)))

    def job_finished(self, job: JobState, slot: int, test: Evaluated | None) -> None:
        """Record that a job without validation has done all its steps; its last adapter is its result.

        Args:
            test: Loss and metrics on the test rows; None if they were not measured.
        """
        tested = {} if test is None else {"test_loss": test.loss, "test_metrics": test.metrics}
        self.append(JobCompleted(**_ending(job, slot, None) | {"best_step": job.step} | tested))

    def job_exited(
        self,
        job: JobState,
        slot: int | None,
        best: LossPoint | None,
        decision: ExitDecision,
        command: str | None = None,
    ) -> None:
        """Record that a job has ended before its last step.

        Args:
            slot, best: See :meth:`job_completed`.
            command: Id of the user's command; None if a rule ended the job.
        """
        ending = _ending(job, slot, best)
        evidence = dict(decision.evidence)
        self.append(JobExited(reason=decision.reason, evidence=evidence, command=command, **ending))

    def job_added(
        self, job: JobState, *, origin: str | None = None, command: str | None = None, replaces: str | None = None
    ) -> None:
        """Record that a job was added while the task runs.

        Args:
            origin: The job that was cloned or forked; None for a suggestion.
            command: Id of the user's command; None if there was none.
            replaces: The ended job that it replaces; None if there is none.
        """
        description = describe_job(job)
        self.append(
            JobAdded(
                origin=origin,
                warm=job.starts_warm,
                command=command,
                forked_at=job.forked_at,
                replaces=replaces,
                values=dict(job.planned.job.values),
                job=description.job,
                config=description.config,
                total_steps=description.total_steps,
                samples_budgeted=description.samples_budgeted,
                num_parameters=description.num_parameters,
            )
        )

    def losses(self, job: JobState) -> None:
        """Record the training losses of a job that are not recorded yet."""
        if job.unsaved_losses:
            first_step = job.step - len(job.unsaved_losses) + 1
            self.append(
                TrainSteps(
                    job=job.id,
                    first_step=first_step,
                    losses=tuple(job.unsaved_losses),
                    router_losses=tuple(job.unsaved_metrics.pop(ROUTER_LOSS, ())),
                    metrics={name: tuple(values) for name, values in job.unsaved_metrics.items()},
                )
            )
            job.unsaved_losses, job.unsaved_metrics = [], {}

    def job_evaluated(
        self, job: JobState, found: Evaluated, train_ema: float, *, is_best: bool, test: Evaluated | None = None
    ) -> None:
        """Record an evaluation of a job."""
        self.append(
            JobEvaluated(
                job=job.id,
                step=job.step,
                total_steps=job.total_steps,
                train_ema=train_ema,
                validation_loss=found.loss,
                is_best=is_best,
                metrics=found.metrics,
                metric_rows=found.rows_of(job.context.row_metric),
                loss_rows=found.kept_rows(job.context)
                or (_compact(found.rows_of(LOSS)) if is_best or job.step in job.planned.ranking_steps else ()),
                answers=found.answers,
                **_test_facts(test),
            )
        )

    def best_measured(self, best: LossPoint, found: Evaluated, context: TaskContext, test: Evaluated | None) -> None:
        """Record the final measurement of a job's best adapter."""
        self.append(
            BestMeasured(
                job=best.job,
                step=best.step,
                validation_loss=found.loss,
                metrics=found.metrics,
                loss_rows=found.kept_rows(context),
                **_test_facts(test),
            )
        )

    def checkpoint(self, jobs: Iterable[JobState], time_s: Mapping[str, float]) -> None:
        """Commit the states of ``jobs`` that are on disk. The event survives a loss of power once this call returns.

        Args:
            time_s: Seconds that the task has spent, by activity.
        """
        saved = {
            job.id: SavedJob(
                step=job.saved_step, slot=job.slot, best_step=job.saved_best_step, is_resumable=job.is_resumable
            )
            for job in jobs
            if job.saved_step
        }
        self.append(CheckpointSaved(jobs=saved, time_s=_rounded(time_s)))
        self._journal.sync()

    def task_completed(
        self, winner: LossPoint, tied: Iterable[LossPoint], jobs: Iterable[JobState], time_s: Mapping[str, float]
    ) -> None:
        """Record the best job and the cost of the task.

        Args:
            winner: Best evaluation of the best job.
            tied: Best evaluations of other jobs whose score by the task's metric is within noise of the winner's.
            time_s: Seconds that the task has spent, by activity.
        """
        jobs = list(jobs)
        self.append(
            TaskCompleted(
                best_job=winner.job,
                best_validation_loss=winner.validation_loss,
                samples_trained=sum(job.samples_until(job.step) for job in jobs),
                samples_budgeted=sum(job.samples_until(job.total_steps) for job in jobs),
                within_noise=tuple(
                    TiedJob(job=point.job, score=point.score, validation_loss=point.validation_loss) for point in tied
                ),
                time_s=_rounded(time_s),
            )
        )
        self._journal.sync()

    def _record_memory_events(self) -> None:
        for event in self._unreported:
            self.append(_out_of_memory(event))
        self._unreported.clear()


def describe_job(job: JobState) -> JobDescription:
    """Return the description of a planned job for the journal."""
    return JobDescription(
        job=job.id,
        config=job.config.model_dump(mode="json"),
        total_steps=job.total_steps,
        samples_budgeted=job.samples_until(job.total_steps),
        num_parameters=job.shape.num_parameters,
        configuration=job.context.task.repetitions.get(job.id),
    )


def _test_facts(test: Evaluated | None) -> dict[str, Any]:
    if test is None:
        return {}
    return {"test_loss": test.loss, "test_rows": _compact(test.rows_of(LOSS)), "test_metrics": test.metrics}


def _rounded(time_s: Mapping[str, float]) -> dict[str, float]:
    return {name: round(seconds, 3) for name, seconds in time_s.items()}


def _compact(rows: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(f"{value:.4g}") for value in rows)


def _ending(job: JobState, slot: int | None, best: LossPoint | None) -> dict[str, Any]:
    return {
        "job": job.id,
        "slot": slot,
        "step": job.step,
        "best_step": best.step if best else 0,
        "best_validation_loss": best.validation_loss if best else None,
        "samples_trained": job.samples_until(job.step),
    }


def _out_of_memory(event: MemoryEvent) -> OutOfMemory:
    return OutOfMemory(
        phase=event.phase,
        residents=event.jobs,
        num_tokens=event.num_tokens,
        max_tokens_per_pass=event.max_tokens_per_pass,
        num_slots=event.num_slots,
    )
