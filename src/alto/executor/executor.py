"""Runs one task: admits jobs, trains and evaluates them, ends those the selection says are lost, keeps the best of
each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from alto.backbone import Backbone, is_out_of_memory
from alto.data import TaskData
from alto.errors import DeviceMemoryError, NoResultError, TaskInterruptedError
from alto.executor.control import Control
from alto.executor.job_run import JobRun
from alto.executor.memory_errors import RowTooLargeError
from alto.executor.ranks import Ranks
from alto.executor.recovery import ResumeState
from alto.executor.tally import Evaluated
from alto.executor.task_run import TaskRun
from alto.records import AdapterCheck, ExitReason, FinalistScore, LossPoint, TaskPlan
from alto.runs import Command, Journal, Mailbox, RunDir
from alto.spec import Task
from alto.spec.metric import score_of

__all__ = ["Check", "Executor", "Judge"]

Check: TypeAlias = Callable[[Path], AdapterCheck]
"""Says whether others read an adapter (its folder) as it was trained."""

Judge: TypeAlias = Callable[[Mapping[str, Path], Callable[[], None]], Sequence[FinalistScore]]
"""Says how well adapters (folders by job) answer; calls what it is given now and then, and ends where that raises."""

# Saving takes at most this share of the time, however large the adapters are.
MAX_SAVING_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlInputs:
    """What decides the next turn, and only one process can know."""

    commands: Sequence[Command] = ()
    is_interrupted: bool = False
    is_saving_due: bool = False


class Executor:
    """One task on one device, or on one of several ranks.

    Args:
        runs: The task's jobs, from :func:`plan_jobs`.
        backbone: The base model the jobs were planned for.
        run_dir, journal: Where everything goes.
        past: What an interrupted run goes on from; None begins the task.
        forecast: What was found out about the task beforehand, for the journal.
        is_interrupted: Asked before every step; once true, the task stops and can be resumed.
        ranks: This process among those that train the task, which all do what the first one hears and says.
        check: Of the best adapter, for the journal; run by the first rank. None checks nothing.
        judge: Chooses the winner among the finalists, on this process alone; None takes the best by the metric.
        base: Fingerprint and precision of the base model, for the journal.
    """

    def __init__(
        self,
        task: Task,
        runs: Sequence[JobRun],
        backbone: Backbone,
        data: TaskData,
        *,
        run_dir: RunDir,
        journal: Journal,
        resume_state: ResumeState | None = None,
        forecast: TaskPlan | None = None,
        is_interrupted: Callable[[], bool] | None = None,
        ranks: Ranks | None = None,
        judge: Judge | None = None,
        check: Check | None = None,
        base: Mapping[str, Any] | None = None,
    ) -> None:
        self._ranks = ranks or Ranks()
        assert judge is None or self._ranks.is_alone, "finalists are judged by one process"
        self._judge = judge
        self._check = check
        self._resume_state = resume_state or ResumeState()
        self._is_interrupted = is_interrupted or (lambda: False)
        self._run_dir = run_dir
        self._forecast = forecast
        self._state = TaskRun(
            task,
            runs,
            backbone,
            data,
            run_dir=run_dir,
            journal=journal,
            resume_state=self._resume_state,
            ranks=self._ranks,
            on_turn=self._stop_before_training,
            base=base,
        )
        self._control = Control(self._state, Mailbox(run_dir), self._resume_state, writes=self._ranks.is_first)
        self._save_interval_s = task.checkpoint_interval_s
        self._next_save_at = time.monotonic() + self._save_interval_s
        self._stuck: DeviceMemoryError | None = None

    def run(self) -> None:
        """Train until no job is left; the result is in the journal.

        Raises:
            NoResultError: No job was ever evaluated with a finite loss.
            TaskInterruptedError: It was asked to stop, and everything is on disk.
            RunBusyError: Its lock was removed, so another process may work on the run.
            DeviceMemoryError: There is no memory to go on with; what was saved can be resumed.
            RunWriteError: The run directory cannot be written any more.
        """
        try:
            self._run()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise DeviceMemoryError(
                f"task {self._state.task.name!r}: {error}. With more memory, or a lower max_tokens_per_pass in its "
                f"task.yaml, the run goes on from its last checkpoint with: alto resume {self._run_dir.root}"
            ) from error

    def _run(self) -> None:
        state = self._state
        if self._resume_state.events:
            state.resume(self._resume_state)
        else:
            state.begin(self._resume_state, self._forecast)
            state.evaluate_base()
        while True:
            inputs = self._ranks.broadcast(self._control_inputs(), ControlInputs)
            self._control.apply(inputs.commands)
            while state.selection.rung_ready():
                self._hold_rung()
            if not state.selection.training:
                break
            if inputs.is_interrupted:
                self._interrupt()
            state.admit_jobs()
            stepped = self._train_one_step(state.active())
            self._evaluate([run for run in stepped if run.step in run.evaluation_steps and state.is_competing(run)])
            if self._stuck is not None:
                self._save()
                raise self._stuck
            if self._control.has_answers or inputs.is_saving_due:
                self._save()
        self._save()
        self._conclude()

    def _control_inputs(self) -> ControlInputs:
        """What has come from outside since the last turn, as far as this process can know.

        Only the first rank holds the lock of the run. No rank begins a turn, in which it may write states, before the
        first has found that it still does.
        """
        if not self._ranks.is_first:
            return ControlInputs()
        self._run_dir.check_lock()
        return ControlInputs(
            commands=self._control.pending(),
            is_interrupted=self._is_interrupted(),
            is_saving_due=time.monotonic() >= self._next_save_at,
        )

    # -- one turn of the loop ------------------------------------------------------------------------------------

    def _train_one_step(self, runs: Sequence[JobRun]) -> Sequence[JobRun]:
        """Train; returns those who have taken a step: nobody where a job cannot and ends."""
        trainer = self._state.slot_manager.trainer
        try:
            losses = trainer.backward(runs)
        except RowTooLargeError as error:
            self._state.fail(error)
            return ()
        try:
            trainer.update(runs)
        except DeviceMemoryError as error:
            if not self._ranks.is_alone:
                raise
            self._stuck = error
        found = trainer.read(losses)
        stepped = [(run, loss) for run, loss in zip(runs, found, strict=True) if trainer.has_stepped(run)]
        for run, loss in stepped:
            run.step += 1
            run.unsaved_losses.append(loss)
            decision = self._state.selection.observe_losses(run.id, run.step, [loss])
            if decision is not None:
                self._state.end(run, decision)
        return [run for run, _ in stepped]

    def _evaluate(self, runs: Sequence[JobRun]) -> None:
        selection = self._state.selection
        runs, found = self._evaluated(runs)
        for run, worth in zip(runs, found, strict=True):
            score = score_of(self._state.task.metric, worth.metrics)
            decision = selection.observe(run.id, run.step, worth.loss, score, worth.metric_rows)
            best = selection.best(run.id)
            is_best = best is not None and best.step == run.step
            if is_best:
                self._state.slot_manager.keep_best(run)
            self._state.record_losses(run)
            self._state.journal.append(
                "eval",
                job=run.id,
                step=run.step,
                total_steps=run.total_steps,
                train_ema=selection.history(run.id)[-1].train_ema,
                **worth.facts(),
                is_best=is_best,
            )
            if not selection.is_training(run.id):
                self._state.end(run, decision)

    def _evaluated(self, runs: Sequence[JobRun]) -> tuple[Sequence[JobRun], Sequence[Evaluated]]:
        """What they are worth, of those who can be evaluated; the others end."""
        while runs:
            try:
                return runs, self._state.slot_manager.trainer.evaluate(runs)
            except RowTooLargeError as error:
                self._state.fail(error)
            runs = [run for run in runs if self._state.is_competing(run)]
        return (), ()

    def _hold_rung(self) -> None:
        selection = self._state.selection
        rung, index = selection.next_rung, selection.rungs_held
        assert rung is not None
        # A job that ran ahead has taken steps that the selection knows of; whoever reads the journal must, too.
        for run in self._state.runs.values():
            self._state.record_losses(run)
        rung_result = selection.select()
        self._state.journal.append(
            "warmup_ended",
            rung=index,
            progress=rung.progress,
            kept=list(rung_result.kept),
            dropped=[decision.job for decision in rung_result.dropped],
        )
        for decision in rung_result.dropped:
            self._state.end(self._state.runs[decision.job], decision)

    # -- saving and ending ---------------------------------------------------------------------------------------

    def _save(self) -> None:
        began = time.monotonic()
        self._state.save()
        self._control.send_answers()
        now = time.monotonic()
        self._next_save_at = now + max(self._save_interval_s, (now - began) / MAX_SAVING_SHARE)

    def _interrupt(self) -> None:
        self._save()
        training = self._state.selection.training
        self._state.journal.append("task_interrupted", training=list(training))
        raise TaskInterruptedError(
            f"stopped as asked, with {len(training)} of {len(self._state.runs)} jobs still to train and everything on "
            f"disk; go on with: alto resume {self._run_dir.root}"
        )

    def _conclude(self) -> None:
        winner = self._state.selection.winner()
        if winner is None:
            raise NoResultError(
                f"task {self._state.task.name!r}: expected at least one job to reach an evaluation with a finite loss, "
                f"found that {self._why_there_is_none()}"
            )
        if self._judge is not None:
            winner, tied = self._judged(self._judge), []
        else:
            tied = self._state.selection.within_noise_of_winner()
        if self._check is not None and self._ranks.is_first:
            found = self._check(self._run_dir.job(winner.job, "best"))
            self._state.journal.append("adapter_checked", job=winner.job, **asdict(found))
        self._state.complete(winner, tied)
        self._control.close()

    def _judged(self, judge: Judge) -> LossPoint:
        """The finalist that answers best; ties go to the lower validation loss. A run that is stopped here judges
        again when it goes on."""
        finalists = self._state.selection.leaders(self._state.task.num_finalists)
        folders = {point.job: self._run_dir.job(point.job, "best") for point in finalists}
        scores = judge(folders, self._stop_if_asked)
        right = {score.job: score.num_correct for score in scores}
        self._state.journal.append("finalists_judged", scores=[asdict(score) for score in scores])
        return max(finalists, key=lambda point: (right[point.job], -point.validation_loss))

    def _stop_if_asked(self) -> None:
        if self._is_interrupted():
            self._interrupt()

    def _stop_before_training(self) -> None:
        if self._ranks.broadcast(self._is_interrupted(), bool):
            raise TaskInterruptedError(
                "stopped as asked while the base model was asked about the data, with what it has said on disk; go on "
                f"with: alto resume {self._run_dir.root}"
            )

    def _why_there_is_none(self) -> str:
        decisions = [self._state.selection.decision_on(job) for job in self._state.runs]
        failed = [decision for decision in decisions if decision and decision.reason is ExitReason.FAILED]
        if not failed:
            return f"all {len(decisions)} diverged before; lower the learning rates"
        row, fits = failed[0].evidence["row_tokens"], self._state.slot_manager.trainer.micro_batches.largest
        remedy = f"lower max_length to {fits} or fewer" if 0 < fits < row else "lower max_length"
        return (
            f"{len(failed)} of {len(decisions)} have a row that does not fit into memory by itself, of {row:,} tokens "
            f"(the largest pass that did fit has {fits:,}); {remedy}, or set gradient_checkpointing: true"
        )
