"""The state of a run, folded from its journal one entry at a time.

The live view (entries as they are written) and the report (entries read back from disk) use the same fold, so both
always show the same. Unknown events and fields are ignored.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from alto.errors import RunError
from alto.records import AdapterCheck, FinalistScore, LossPoint, Rung, Sample, StartValue
from alto.runs import events
from alto.runs.events import Event, settings_of
from alto.runs.job_history import JobHistory, Occupancy, RungOutcome, RunStatus, Stage
from alto.runs.journal import NOT_FOLDABLE, JournalFold, read_intact_entries
from alto.runs.run_dir import RunDir
from alto.spec import LOSS, EarlyExit, rung_step, score_of

WINDOW_S = 180.0


class Pace:
    """Work per second over the last minutes, from a count that only grows while the clock goes forward."""

    def __init__(self, *, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, float]] = deque()

    def note(self, time: float, count: float) -> None:
        """Record that ``count`` work was done at ``time`` (unix seconds); a decrease of either restarts the
        measurement."""
        points = self._points
        if points and (time < points[-1][0] or count < points[-1][1]):
            points.clear()
        points.append((time, count))
        # Keep the newest point before the window: it is the start of the measurement.
        while len(points) > 2 and points[1][0] <= time - self._window_s:
            points.popleft()

    def per_second(self, now: float) -> float | None:
        """Return the work per second up to ``now``; None until some work was seen."""
        if not self._points:
            return None
        (first_time, first_count), (last_time, last_count) = self._points[0], self._points[-1]
        elapsed_s = max(now, last_time) - first_time
        return (last_count - first_count) / elapsed_s if last_count > first_count and elapsed_s > 0 else None


_CHANGES_SAMPLES = (events.TaskStarted, events.TaskResumed, events.TrainSteps, events.JobEvaluated)
"""Events after which the number of trained samples may have changed, or from which the pace is measured."""


class RunHistory(JournalFold):
    """Folds journal entries into the state of a run.

    Attributes:
        started: The event that started the task, updated by later resumptions; None before the first event.
        jobs: Every job by id, in the order of the task.
        occupancy: Every stay of a job in a slot, in the order of admission.
        forecast: Measured memory, packing and duration; None if nothing was measured before the run began.
        pace: Samples trained per second over the last minutes, since the run began or was resumed.
        finalists: Scores of the finalists' answers, best by the metric first; empty if there are none.
        measuring_failures: Why held-out rows could not be measured, by job (empty for the starting point) and split:
            the evidence of the failure.
        rung_scores: Scores of the jobs' answers at rungs, or why there are none, oldest first.
        scorer: Name of the scorer that scored the finalists or failed to, or ``eval_accuracy``; empty if there was
            none.
        scorer_failure: Why the finalists were not scored, so that the metric chose; empty if they were.
        samples: Validation prompts with the generated texts of the base and the best adapters; empty if there are none.
        sampling_failure: Why there are no samples although the task asks for them; empty otherwise.
        is_shared: Whether other tasks trained in the same executor.
        adapter_check: Whether PEFT loads the best adapter as it was trained; None until this is known.
        result: The event that ended the task; None while the run is unfinished.
        time_s: Seconds spent on ``training``, ``evaluation`` and ``saving`` up to the last checkpoint; empty if the
            journal does not have them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.started: events.TaskStarted | None = None
        self.jobs: dict[str, JobHistory] = {}
        self.rungs: list[RungOutcome] = []
        self.occupancy: list[Occupancy] = []
        self.forecast: events.ProfileMeasured | None = None
        self.pace = Pace()
        self.memory_events: list[events.OutOfMemory] = []
        self.finalists: tuple[FinalistScore, ...] = ()
        self.measuring_failures: dict[tuple[str, str], Mapping[str, float | str]] = {}
        self.rung_scores: list[events.RungScored] = []
        self.scorer = ""
        self.scorer_failure = ""
        self.samples: tuple[Sample, ...] = ()
        self.sampling_failure = ""
        self.is_shared = False
        self.adapter_check: AdapterCheck | None = None
        self.result: events.TaskCompleted | None = None
        self.time_s: Mapping[str, float] = {}
        self._open_stays: dict[str, list[Occupancy]] = {}
        self._num_samples = 0  # samples_trained, without a sum over all jobs at every event

    @property
    def name(self) -> str:
        return self.started.task if self.started is not None else "task"

    @property
    def method(self) -> str:
        """The objective with which the jobs are trained."""
        return self.started.method if self.started is not None else "sft"

    @property
    def metric(self) -> str:
        """The metric that selects jobs: ``loss``, or a metric of the method (then higher values are better)."""
        return self.started.metric if self.started is not None else LOSS

    @property
    def notes(self) -> tuple[str, ...]:
        """Notices about the task's data and model, with those of the latest resumption first."""
        return self.started.notes if self.started is not None else ()

    @property
    def num_known_test(self) -> int:
        """Number of test rows that are also training or validation rows; 0 if the journal does not say."""
        return int(self.started.data.get("shared_test_rows", 0)) if self.started is not None else 0

    @property
    def refit(self) -> events.RefitFact | None:
        """The winner of another run that this run trains again on all rows, without validation; None in other runs."""
        return self.started.refit if self.started is not None else None

    def settings(self) -> dict[str, Any]:
        """Return the settings of the whole task, as plain values by their journal names; without jobs and notes."""
        return {} if self.started is None else settings_of(self.started)

    @property
    def measuring_s(self) -> float:
        """Seconds spent measuring memory and time before the first step; 0 if the measurement was cached."""
        return 0.0 if self.forecast is None or self.forecast.is_cached else self.forecast.profile_s

    @property
    def rung_settings(self) -> tuple[Rung, ...]:
        """The rungs of the task; empty if early exit or selection is off, or the settings in the journal are not
        valid."""
        if self.started is None or not self.started.early_exit.get("rungs"):
            return ()
        try:
            # Drop the rules: a package that provides one may not be installed here.
            early_exit = EarlyExit.of_run({**self.started.early_exit, "rules": {}})
        except NOT_FOLDABLE:
            return ()
        return early_exit.selection_rungs if early_exit.enabled and early_exit.select else ()

    def fraction_after(self, rung: Rung) -> float:
        """Return the share at or after ``rung`` that a job reaches after whole steps: 8.3 % for a rung at 1 % of 12
        steps."""
        totals = [job.total_steps for job in self.jobs.values() if job.total_steps]
        return min((rung_step(rung, total) / total for total in totals), default=rung.progress)

    @property
    def num_ranks(self) -> int:
        """Ranks that train the task since it was last resumed."""
        return self.started.num_ranks if self.started is not None else 1

    @property
    def num_slots(self) -> int:
        """Slots of all ranks; at least as many as were seen in use."""
        used = max((stay.slot for stay in self.occupancy), default=-1) + 1
        return max(self._max_slots, used)

    @property
    def best(self) -> JobHistory | None:
        """The job that the task chose, or the best so far; None while no job has a finite validation loss."""
        if self.result is not None and (chosen := self.jobs.get(self.result.best_job)) is not None:
            return chosen
        leader = min(self.jobs.values(), key=lambda job: job.rank_key, default=None)
        return leader if leader is not None and math.isfinite(leader.best_validation_loss) else None

    def status(self, *, is_live: bool) -> RunStatus:
        """Return the status of the run; ``is_live``: whether a process works on it."""
        return RunStatus.of(is_finished=self.result is not None, is_live=is_live)

    @property
    def samples_budgeted(self) -> int:
        return sum(job.samples_budgeted for job in self.jobs.values())

    @property
    def samples_trained(self) -> int:
        return sum(job.samples_trained for job in self.jobs.values())

    @property
    def samples_saved(self) -> int:
        return sum(job.samples_saved for job in self.jobs.values())

    @property
    def samples_cut_off(self) -> int:
        """Rows that were not trained because ``search.budget`` ended their jobs."""
        return sum(job.samples_cut_off for job in self.jobs.values())

    @property
    def saved_share(self) -> float:
        """Share of the budgeted rows saved by early exits so far, in [0, 1]."""
        return self.samples_saved / self.samples_budgeted if self.samples_budgeted else 0.0

    def ranked(self) -> list[JobHistory]:
        """Return all jobs, the chosen one first, then by their best evaluation."""
        best = self.best
        return sorted(self.jobs.values(), key=lambda job: (job is not best, job.rank_key))

    def _fold(self, event: Event, time: float) -> None:
        names = _jobs_of(event)
        before = self._samples_of(names)
        self._fold_event(event, time)
        self._num_samples += self._samples_of(names) - before
        if isinstance(event, events.WarmupEnded):
            self.rungs.append(
                RungOutcome(
                    rung=event.rung,
                    progress=event.progress,
                    kept=event.kept,
                    dropped=event.dropped,
                    samples_trained=self._num_samples,
                )
            )
        if isinstance(event, _CHANGES_SAMPLES):
            self.pace.note(time, self._num_samples)

    def _samples_of(self, names: Iterable[str]) -> int:
        return sum(self.jobs[name].samples_trained for name in names if name in self.jobs)

    def _fold_event(self, event: Event, time: float) -> None:
        match event:
            case events.TaskStarted():
                self.started = event
                for description in event.jobs:
                    self._plan(description)
            case events.ProfileMeasured():
                self.forecast = event
            case events.TaskResumed():
                self._on_resumed(event, time)
            case events.BaseEvaluated():
                self._on_base_evaluated(event)
            case events.TrainSteps():
                self._on_train(event)
            case events.BestMeasured():
                self._on_measured(event)
            case events.MeasurementFailed():
                self.measuring_failures[event.job, event.split] = event.evidence
            case events.JobEvaluated():
                self._on_evaluated(event)
            case events.OutOfMemory():
                self.memory_events.append(event)
            case events.RungScored():
                self.rung_scores.append(event)
            case events.FinalistsJudged(scores=scores):
                self.finalists, self.scorer = scores, event.scorer or "eval_accuracy"
                self.scorer_failure = event.failure
            case events.SamplesGenerated(samples=samples, failure=failure):
                self.samples, self.sampling_failure = samples, failure
            case events.ShareReceived():
                self.is_shared = True
            case events.AdapterChecked():
                self.adapter_check = AdapterCheck(
                    status=event.status, why=event.why, difference=event.difference, peft=event.peft
                )
            case events.TaskCompleted():
                self.result = event
                self.time_s = event.time_s
            case events.CheckpointSaved():
                self.time_s = event.time_s
            case _:
                self._fold_move(event, time)

    def _fold_move(self, event: Event, time: float) -> None:
        """Handle an event that adds or ends a job, or changes its slot."""
        match event:
            case events.JobAdded():
                job = self._plan(event.description)
                job.origin, job.forked_at, job.is_suggested = event.origin, event.forked_at, event.origin is None
                job.starts_warm = event.warm
                job.step = event.forked_at
            case events.JobReopened():
                job = self._job(event.job)
                job.exit_reason, job.exit_evidence, job.samples_at_end = None, {}, None
                job.stage = Stage.PARKED if job.step else Stage.PENDING
            case events.JobAdmitted() | events.JobResumed():
                self._on_enter_slot(event, time)
            case events.JobParked():
                job = self._job(event.job)
                self._leave_slot(job, time, stage=Stage.PARKED)
                job.step = event.step or job.step
            case events.JobExited():
                job = self._job(event.job)
                self._end(job, event, time, stage=Stage.EXITED)
                job.exit_reason, job.exit_evidence = event.reason, event.evidence
            case events.JobCompleted():
                self._end(self._job(event.job), event, time, stage=Stage.COMPLETED)

    @property
    def _max_slots(self) -> int:
        return self.started.max_slots if self.started is not None else 0

    def _job(self, job: str) -> JobHistory:
        if job not in self.jobs:
            self.jobs[job] = JobHistory(job=job, position=len(self.jobs))
        return self.jobs[job]

    def _plan(self, description: events.JobDescription) -> JobHistory:
        job = self._job(description.job)
        job.config = description.config
        job.configuration = description.configuration
        job.total_steps = description.total_steps
        job.samples_budgeted = description.samples_budgeted
        return job

    def _on_base_evaluated(self, event: events.BaseEvaluated) -> None:
        for value in event.values:
            start = StartValue(validation_loss=value.validation_loss, score=score_of(self.metric, value.metrics))
            for job in value.jobs:
                self._job(job).start = start
                if value.answers:
                    self._job(job).answers[0] = value.answers

    def _on_resumed(self, event: events.TaskResumed, time: float) -> None:
        # A finished run that trains further jobs gets a new result.
        self.result, self.adapter_check = None, None
        self.finalists, self.scorer, self.scorer_failure = (), "", ""
        for job_id in self.jobs:
            self.measuring_failures.pop((job_id, "validation"), None)  # measured again
        # Stays cut off by the interruption end at the last event before it: nothing was trained after that.
        for name in list(self._open_stays):
            job = self.jobs[name]
            self._leave_slot(job, self.last_seen_at, stage=Stage.PARKED if job.step else Stage.PENDING)
        if self.started is not None:
            self.started = replace(
                self.started,
                notes=(*event.notes, *self.started.notes),
                max_slots=self.started.max_slots if event.max_slots is None else event.max_slots,
                num_ranks=self.started.num_ranks if event.num_ranks is None else event.num_ranks,
            )
        self._note_interruption(time)
        self.pace = Pace()  # interruptions do not count

    def _on_enter_slot(self, event: events.JobAdmitted | events.JobResumed, time: float) -> None:
        job = self._job(event.job)
        self._leave_slot(job, time, stage=Stage.TRAINING)
        job.slot, job.step = event.slot, event.step
        job.ranks = event.ranks or (0,)
        per_rank = max(1, self._max_slots // self.num_ranks)
        local_slot = event.slot % per_rank if self.num_ranks > 1 else event.slot
        stays = [
            Occupancy(
                job=job.job,
                slot=event.slot + (rank - job.ranks[0]) * per_rank,
                rank=rank,
                local_slot=local_slot,
                start=time,
            )
            for rank in job.ranks
        ]
        self._open_stays[job.job] = stays
        self.occupancy += stays

    def _on_train(self, event: events.TrainSteps) -> None:
        job = self._job(event.job)
        job.train_losses += [math.nan] * (event.first_step - 1 - len(job.train_losses))
        job.train_losses += event.losses
        job.step = len(job.train_losses)

    def _on_evaluated(self, event: events.JobEvaluated) -> None:
        job = self._job(event.job)
        point = LossPoint(
            job=job.job,
            step=event.step,
            total_steps=event.total_steps or job.total_steps or event.step,
            train_ema=event.train_ema,
            validation_loss=event.validation_loss,
            score=score_of(self.metric, event.metrics),
        )
        job.evaluations.append(point)
        job.metrics.append(event.metrics)
        if event.answers:
            job.answers[event.step] = event.answers
        self._on_tested(job, event.step, event)
        job.step = max(job.step, point.step)
        leads = math.isfinite(point.validation_loss) and (not job.best_step or point.sort_key < job.best_sort_key)
        if leads if event.is_best is None else event.is_best:
            job.keep_best(point.step, point.validation_loss)
            job.best_loss_rows, job.best_metric_rows = event.loss_rows, event.metric_rows

    def _on_measured(self, event: events.BestMeasured) -> None:
        job = self._job(event.job)
        for index, point in enumerate(job.evaluations):
            if point.step == event.step:
                job.evaluations[index] = replace(point, validation_loss=event.validation_loss)
                job.metrics[index] = event.metrics
        self._on_tested(job, event.step, event)
        job.keep_best(event.step, event.validation_loss)
        job.best_loss_rows = event.loss_rows

    def _on_tested(
        self, job: JobHistory, step: int, event: events.JobEvaluated | events.BestMeasured | events.JobCompleted
    ) -> None:
        if event.test_loss is not None:
            job.test_losses[step] = event.test_loss
            job.test_metrics[step] = event.test_metrics
            self.measuring_failures.pop((job.job, "test"), None)

    def _end(
        self, job: JobHistory, event: events.JobExited | events.JobCompleted, time: float, *, stage: Stage
    ) -> None:
        self._leave_slot(job, time, stage=stage)
        job.step = event.step or job.step
        if event.samples_trained is not None:
            job.samples_at_end = event.samples_trained
        if event.best_validation_loss is not None and math.isfinite(event.best_validation_loss):
            job.keep_best(event.best_step, event.best_validation_loss)
        elif isinstance(event, events.JobCompleted) and event.best_step:  # without validation
            job.best_step = event.best_step
            self._on_tested(job, event.best_step, event)

    def _leave_slot(self, job: JobHistory, time: float | None, *, stage: Stage) -> None:
        for stay in self._open_stays.pop(job.job, ()):
            stay.end = stay.start if time is None else time
        job.slot, job.ranks, job.stage = None, (), stage


def _jobs_of(event: Event) -> Iterable[str]:
    """Return the jobs whose samples an event may change."""
    if isinstance(event, events.TaskStarted):
        return {description.job for description in event.jobs}
    job = getattr(event, "job", None)
    return () if job is None else (job,)


def read_history(run_dir: str | Path) -> RunHistory:
    """Return the history of the run in ``run_dir``.

    Raises:
        RunNotFoundError: It holds no journal.
        RunError: The journal is damaged.
    """
    return RunHistory.read(RunDir(Path(run_dir)).journal_file)


def history_before(run_dir: str | Path, seq: int) -> RunHistory:
    """Return the state of a run after its first ``seq`` entries; an empty state if its journal cannot be read."""
    try:
        return RunHistory.of(read_intact_entries(RunDir(Path(run_dir)).journal_file)[: max(0, seq)])
    except (RunError, *NOT_FOLDABLE):
        return RunHistory()
