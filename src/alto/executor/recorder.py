"""Records a task in its journal: one method for each event."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from alto.executor.context import TaskContext
from alto.executor.job_state import JobState
from alto.executor.memory_errors import MemoryEvent
from alto.executor.ranks import Ranks
from alto.executor.recovery import note_refusal, refusal_event
from alto.executor.tally import Evaluated
from alto.records import AdapterCheck, ExitDecision, FinalistScore, Judgement, LossPoint, Rung, RungResult, Samples
from alto.runs import Event, Journal, RunDir
from alto.runs.events import (
    AdapterChecked,
    BaseEvaluated,
    BestMeasured,
    CheckpointSaved,
    CommandRefused,
    FinalistsJudged,
    GpusOffered,
    JobAdded,
    JobAdmitted,
    JobCompleted,
    JobDescription,
    JobEvaluated,
    JobExited,
    JobParked,
    JobReopened,
    JobResumed,
    KernelsCompiled,
    OutOfMemory,
    RungScored,
    SamplesGenerated,
    SavedJob,
    ShareReceived,
    StartMeasurement,
    TaskCompleted,
    TaskInterrupted,
    TiedJob,
    TrainSteps,
    WarmupEnded,
)
from alto.scheduler import LastJobsForecast, ReceivedShare
from alto.spec.metric import LOSS

__all__ = ["JournalRecorder", "describe_job"]


class JournalRecorder:
    """Writes events into the journal. It changes the jobs' states in one way: recorded losses are removed from
    ``unsaved_losses`` and ``unsaved_router_losses``.

    Args:
        journal: Of the run; a silent one on all ranks but the first.
        run_dir: Holds, with several ranks, a note of the micro-batch that did not fit into memory.
        ranks: This process among those that train the task.
    """

    def __init__(self, journal: Journal, run_dir: RunDir, ranks: Ranks) -> None:
        self._journal = journal
        self._run_dir = run_dir
        self._ranks = ranks
        self._unreported: list[MemoryEvent] = []
        self._has_begun = False

    def begin(self, events: Iterable[Event], refusal: Mapping[str, Any] | None) -> None:
        """Record that the task begins or is resumed, then the memory events until now.

        Args:
            events: ``TaskStarted`` or ``TaskResumed`` first.
            refusal: Facts of the ``OutOfMemory`` that ended the previous attempt, which could not record it.
        """
        for event in events:
            self._journal.append(event)
        if refusal is not None:
            self._journal.append(refusal_event(refusal))
        self._has_begun = True
        self._record_memory_events()

    def memory_ran_out(self, event: MemoryEvent) -> None:
        """Record a memory event; one before the task begins is recorded after its first event."""
        if not self._ranks.is_alone and event.phase in ("forward", "backward", "evaluation"):
            note_refusal(self._run_dir, _out_of_memory(event))  # for the next attempt: this one ends
            return
        self._unreported.append(event)
        if self._has_begun:
            self._record_memory_events()

    def base_evaluated(
        self, found: Iterable[tuple[Sequence[str], Evaluated, Evaluated | None]], context: TaskContext
    ) -> None:
        """The evaluations of the frozen base.

        Args:
            found: Ids of the jobs that one applies to, and what it gives on the validation rows and on the test rows.
            context: The task.
        """
        values = tuple(
            StartMeasurement(
                jobs=tuple(jobs),
                validation_loss=value.loss,
                metrics=value.metrics,
                metric_rows=value.rows_of(context.row_metric),
                loss_rows=context.kept_rows(value) or _compact(value.rows_of(LOSS)),
                **_test_facts(test),
            )
            for jobs, value, test in found
        )
        self._journal.append(BaseEvaluated(values=values))

    def kernels_compiled(self, done: int, total: int, duration_s: float) -> None:
        """Record how many kernels of the task are compiled."""
        self._journal.append(KernelsCompiled(done=done, total=total, duration_s=duration_s))

    def job_admitted(self, job: JobState, reason: str, ranks: Sequence[int]) -> None:
        """A job has entered its slot, for the first time or again.

        Args:
            job: The job, with its slot.
            reason: Why this job was chosen.
            ranks: The ranks that train it; recorded where there are several in all.
        """
        assert job.slot is not None
        kind = JobResumed if job.step else JobAdmitted
        of_several = () if self._ranks.is_alone else tuple(ranks)
        self._journal.append(kind(job=job.id, slot=job.slot, step=job.step, reason=reason, ranks=of_several))

    def job_parked(self, job: JobState, slot: int | None, reason: str) -> None:
        """A job was parked: it has left ``slot`` and its state is kept; ``reason`` is why."""
        self._journal.append(JobParked(job=job.id, slot=slot, step=job.step, reason=reason))

    def job_completed(self, job: JobState, slot: int | None, best: LossPoint | None) -> None:
        """A job has done all its steps.

        Args:
            job: The job.
            slot: The one that it has left; None where it was in none.
            best: Its best evaluation; None without one that is finite.
        """
        self._journal.append(JobCompleted(**_ending(job, slot, best)))

    def job_finished(self, job: JobState, slot: int, test: Evaluated | None) -> None:
        """A job that there is no validation for has done all its steps.

        Args:
            job: The job; its last adapter is the one that counts.
            slot: The one that it has left.
            test: Loss and metrics on the test rows; None where they were not measured.
        """
        self._journal.append(
            JobCompleted(
                job=job.id,
                slot=slot,
                step=job.step,
                best_step=job.step,
                best_validation_loss=None,
                samples_trained=job.samples_until(job.step),
                test_loss=None if test is None else test.loss,
                test_metrics={} if test is None else test.metrics,
            )
        )

    def job_exited(
        self,
        job: JobState,
        slot: int | None,
        best: LossPoint | None,
        decision: ExitDecision,
        command: str | None = None,
    ) -> None:
        """A job has ended before its last step.

        Args:
            job: The job.
            slot, best: As of :meth:`job_completed`.
            decision: Why.
            command: Id of the user's command; None where a rule ended the job.
        """
        ending = _ending(job, slot, best)
        evidence = dict(decision.evidence)
        self._journal.append(JobExited(reason=decision.reason, evidence=evidence, command=command, **ending))

    def job_added(
        self, job: JobState, *, origin: str | None = None, command: str | None = None, replaces: str | None = None
    ) -> None:
        """A job was added while the task runs.

        Args:
            job: The new job.
            origin: The job that it is a clone or a copy of; None of a suggestion.
            command: Id of the user's command; None where there was none.
            replaces: The job that ended for it; None where there is none.
        """
        description = describe_job(job)
        self._journal.append(
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

    def job_reopened(self, job: JobState, command: str) -> None:
        """A job that was ended is resumed."""
        self._journal.append(JobReopened(job=job.id, step=job.step, command=command))

    def losses(self, job: JobState) -> None:
        """The training losses of a job that are not recorded yet."""
        if job.unsaved_losses:
            first_step = job.step - len(job.unsaved_losses) + 1
            self._journal.append(
                TrainSteps(
                    job=job.id,
                    first_step=first_step,
                    losses=tuple(job.unsaved_losses),
                    router_losses=tuple(job.unsaved_router_losses),
                )
            )
            job.unsaved_losses, job.unsaved_router_losses = [], []

    def job_evaluated(
        self, job: JobState, found: Evaluated, train_ema: float, *, is_best: bool, test: Evaluated | None = None
    ) -> None:
        """An evaluation of a job.

        Args:
            job: The job, at the step of the evaluation.
            found: Loss and metrics on the validation rows.
            train_ema: Exponentially smoothed training loss.
            is_best: Whether it is the best of the job so far.
            test: Loss on the test rows; None where it was not measured.
        """
        self._journal.append(
            JobEvaluated(
                job=job.id,
                step=job.step,
                total_steps=job.total_steps,
                train_ema=train_ema,
                validation_loss=found.loss,
                is_best=is_best,
                metrics=found.metrics,
                metric_rows=found.rows_of(job.context.row_metric),
                loss_rows=job.context.kept_rows(found)
                or (_compact(found.rows_of(LOSS)) if is_best or job.step in job.planned.ranking_steps else ()),
                **_test_facts(test),
            )
        )

    def best_measured(self, best: LossPoint, found: Evaluated, context: TaskContext, test: Evaluated | None) -> None:
        """Record that the best adapter of a job was measured in the end.

        Args:
            best: Its best evaluation.
            found: Loss and metrics on the rows of the measurement.
            context: The task.
            test: Loss on the test rows; None where it was not measured.
        """
        self._journal.append(
            BestMeasured(
                job=best.job,
                step=best.step,
                validation_loss=found.loss,
                metrics=found.metrics,
                loss_rows=context.kept_rows(found),
                **_test_facts(test),
            )
        )

    def rung_held(self, index: int, rung: Rung, result: RungResult) -> None:
        """Jobs were ranked at ``rung``, number ``index`` from 0; ``result`` has those that continue."""
        self._journal.append(
            WarmupEnded(
                rung=index,
                progress=rung.progress,
                kept=tuple(result.kept),
                dropped=tuple(decision.job for decision in result.dropped),
            )
        )

    def command_refused(self, command: str, job: str, why: str) -> None:
        """A user's command could not be carried out.

        Args:
            command: Its id.
            job: The job that it names.
            why: The reason, as a sentence.
        """
        self._journal.append(CommandRefused(command=command, job=job, why=why))

    def gpus_offered(self, forecast: LastJobsForecast) -> None:
        """Fewer jobs are left than ranks."""
        self._journal.append(
            GpusOffered(
                num_gpus=forecast.num_gpus,
                duration_s=forecast.duration_s,
                data_parallel_duration_s=forecast.spread_duration_s,
            )
        )

    def checkpoint(self, jobs: Iterable[JobState], time_s: Mapping[str, float]) -> None:
        """Commit what is on disk of ``jobs``: this event survives a loss of power when the call returns.

        Args:
            jobs: All of the task.
            time_s: Seconds that the task has spent, by what on.
        """
        saved = {
            job.id: SavedJob(
                step=job.saved_step, slot=job.slot, best_step=job.saved_best_step, is_resumable=job.is_resumable
            )
            for job in jobs
            if job.saved_step
        }
        self._journal.append(CheckpointSaved(jobs=saved, time_s=_rounded(time_s)))
        self._journal.sync()

    def share_received(self, received: ReceivedShare) -> None:
        """Record the task's share of the tokens while other tasks trained too."""
        self._journal.append(
            ShareReceived(
                num_steps=received.num_steps,
                num_tokens=received.tokens,
                share=received.tokens / received.all_tokens,
                due_share=received.due_tokens / received.all_tokens,
            )
        )

    def task_interrupted(self, training: Sequence[str]) -> None:
        """The task was interrupted, with ``training`` still to train."""
        self._journal.append(TaskInterrupted(training=tuple(training)))

    def rung_scored(self, index: int, rung: Rung, judgement: Judgement, scores: Iterable[FinalistScore]) -> None:
        """The answers of the jobs at ``rung``, number ``index`` from 0, were scored, or the scorer failed."""
        self._journal.append(
            RungScored(
                rung=index,
                progress=rung.progress,
                scores=tuple(scores),
                scorer=judgement.scorer,
                failure=judgement.failure,
            )
        )

    def finalists_judged(self, judgement: Judgement, scores: Iterable[FinalistScore]) -> None:
        """The answers of the best jobs were scored, or the scorer failed."""
        self._journal.append(FinalistsJudged(scores=tuple(scores), scorer=judgement.scorer, failure=judgement.failure))

    def samples_generated(self, samples: Samples) -> None:
        """Validation prompts were continued by the base and the best adapters, or the generation failed."""
        self._journal.append(SamplesGenerated(samples=samples.rows, failure=samples.failure))

    def adapter_checked(self, job: str, found: AdapterCheck) -> None:
        """The best adapter was checked with PEFT, or could not be loaded."""
        self._journal.append(AdapterChecked(job=job, **asdict(found)))

    def task_completed(
        self, winner: LossPoint, tied: Iterable[LossPoint], jobs: Iterable[JobState], time_s: Mapping[str, float]
    ) -> None:
        """The best job, and the cost of the task.

        Args:
            winner: Best evaluation of the best job.
            tied: Best evaluations of other jobs whose score by the task's metric is within noise of the winner's.
            jobs: All of the task.
            time_s: Seconds that the task has spent, by what on.
        """
        jobs = list(jobs)
        self._journal.append(
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
            self._journal.append(_out_of_memory(event))
        self._unreported.clear()


def describe_job(job: JobState) -> JobDescription:
    """A job as it is planned, for the journal."""
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
