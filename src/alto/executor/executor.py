"""Runs one task: seats jobs, trains and evaluates them, ends those the race says are lost, keeps the best of each."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from alto.backbone import Backbone
from alto.data import TaskData
from alto.early_exit import Race, policy_from
from alto.errors import NoResultError
from alto.executor.checkpoint import read_state, replace_folder, write_state
from alto.executor.job_run import JobRun
from alto.executor.trainer import Trainer
from alto.lora import AdapterWeights, linear_modules, write_adapter
from alto.records import ExitDecision, JobResult, TaskResult
from alto.runs import Journal, RunDir
from alto.scheduler import JobDemand, plan_residents
from alto.spec import Task

__all__ = ["Executor"]


class Executor:
    """One task on one device.

    Args:
        runs: The task's jobs, from :func:`plan_jobs`.
        backbone: The base model the jobs were planned for.
        run_dir, journal: Where everything goes.
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
    ) -> None:
        self._task = task
        self._runs = {run.id: run for run in runs}
        self._backbone = backbone
        self._data = data
        self._run_dir = run_dir
        self._journal = journal
        self._modules = linear_modules(backbone.model)
        self._race = Race(
            policy_from(task.early_exit),
            ema_alpha=task.early_exit.ema_alpha,
            total_steps={job: run.total_steps for job, run in self._runs.items()},
        )
        targeted = {module for run in self._runs.values() for module in run.shape.targets}
        self._trainer = Trainer(
            backbone,
            data,
            modules=tuple(module for module in self._modules if module in targeted),
            max_rank=max(run.shape.rank for run in self._runs.values()),
            num_slots=min(task.max_slots, len(self._runs)),
            max_tokens_per_pass=task.max_tokens_per_pass or sys.maxsize,
        )

    def run(self) -> TaskResult:
        """Train until no job is left.

        Raises:
            NoResultError: No job was ever evaluated with a finite loss.
        """
        started = time.perf_counter()
        self._announce()
        while self._race.training:
            self._seat_jobs()
            runs = self._active()
            self._train_one_step(runs)
            self._evaluate([run for run in runs if run.step in run.evaluation_steps and self._in_race(run)])
            while self._race.rung_ready():
                self._hold_rung()
        return self._conclude(time.perf_counter() - started)

    # -- one turn of the loop ------------------------------------------------------------------------------------

    def _seat_jobs(self) -> None:
        plan = plan_residents([self._demand(run) for run in self._runs.values() if self._in_race(run)], self._num_slots)
        for job in plan.park:
            self._park(self._runs[job])
        for job, slot in plan.seat:
            self._seat(self._runs[job], slot)

    def _active(self) -> list[JobRun]:
        return [run for run in self._runs.values() if run.slot is not None and not self._race.is_waiting(run.id)]

    def _train_one_step(self, runs: Sequence[JobRun]) -> None:
        for run, loss in zip(runs, self._trainer.step(runs), strict=True):
            run.step += 1
            run.unsaved_losses.append(loss)
            decision = self._race.observe_losses(run.id, run.step, [loss])
            if decision is not None:
                self._end(run, decision)

    def _evaluate(self, runs: Sequence[JobRun]) -> None:
        if not runs:
            return
        for run, loss in zip(runs, self._trainer.evaluate(runs), strict=True):
            decision = self._race.observe(run.id, run.step, loss)
            best = self._race.best(run.id)
            is_best = best is not None and best.step == run.step
            if is_best:
                run.unsaved_best = self._weights(run)
            self._journal_losses(run)
            point = self._race.history(run.id)[-1]
            self._journal.append(
                "eval",
                job=run.id,
                step=run.step,
                total_steps=run.total_steps,
                train_ema=point.train_ema,
                validation_loss=loss,
                is_best=is_best,
            )
            if not self._race.is_training(run.id):
                self._end(run, decision)

    def _hold_rung(self) -> None:
        rung, index = self._race.next_rung, self._race.rungs_held
        assert rung is not None
        selection = self._race.select()
        self._journal.append(
            "warmup_ended",
            rung=index,
            progress=rung.progress,
            kept=list(selection.kept),
            dropped=[decision.job for decision in selection.dropped],
        )
        for decision in selection.dropped:
            self._end(self._runs[decision.job], decision)

    # -- jobs come and go ----------------------------------------------------------------------------------------

    def _seat(self, run: JobRun, slot: int) -> None:
        if run.step == 0:
            self._trainer.seat_fresh(run, slot)
        else:
            self._trainer.seat_again(run, slot, *read_state(self._run_dir.job(run.id, "last")))
        run.slot = slot
        self._journal.append("job_resumed" if run.step else "job_admitted", job=run.id, slot=slot, step=run.step)

    def _park(self, run: JobRun) -> None:
        slot = self._leave_slot(run)
        self._journal.append("job_parked", job=run.id, slot=slot, step=run.step)

    def _end(self, run: JobRun, decision: ExitDecision | None) -> None:
        """The job is over: by ``decision``, or because all its steps are done."""
        slot = self._leave_slot(run) if run.slot is not None else None
        best = self._race.best(run.id)
        facts = {
            "job": run.id,
            "slot": slot,
            "step": run.step,
            "best_step": best.step if best else 0,
            "best_validation_loss": best.validation_loss if best else None,
            "samples_trained": self._samples(run, run.step),
        }
        if decision is None:
            self._journal.append("job_completed", **facts)
        else:
            self._journal.append("job_exited", reason=decision.reason, evidence=dict(decision.evidence), **facts)

    def _leave_slot(self, run: JobRun) -> int:
        """Put everything the slot holds of the job on disk, then free the slot."""
        assert run.slot is not None
        self._journal_losses(run)
        slot, weights, optimizer = run.slot, self._weights(run), self._trainer.optimizer.read(run.slot)

        def fill_last(folder: Path) -> None:
            self._write_adapter(folder, run, weights)
            write_state(folder, optimizer)

        replace_folder(self._run_dir.job(run.id, "last"), fill_last)
        if run.unsaved_best is not None:
            best = run.unsaved_best
            replace_folder(self._run_dir.job(run.id, "best"), lambda folder: self._write_adapter(folder, run, best))
            run.unsaved_best = None
        self._trainer.release(slot)
        run.slot = None
        return slot

    # -- beginning and end ---------------------------------------------------------------------------------------

    def _announce(self) -> None:
        self._journal.append(
            "task_started",
            task=self._task.name,
            model=self._task.model,
            base_model=self._backbone.path,
            dataset=self._task.dataset,
            method=self._task.method,
            num_train=len(self._data.train),
            num_validation=len(self._data.validation),
            data=self._data.counts(),
            max_slots=self._num_slots,
            early_exit=self._task.early_exit.resolved().model_dump(mode="json"),
            device=str(self._backbone.device),
            versions={
                "python": platform.python_version(),
                **{name: version(name) for name in ("alto-lora", "torch", "transformers")},
            },
            jobs=[
                {
                    "job": run.id,
                    "config": run.config.model_dump(mode="json"),
                    "total_steps": run.total_steps,
                    "samples_budgeted": self._samples(run, run.total_steps),
                    "num_parameters": run.shape.num_parameters,
                }
                for run in self._runs.values()
            ],
        )

    def _conclude(self, duration_s: float) -> TaskResult:
        results = tuple(self._result(run) for run in self._runs.values())
        winner = self._race.winner()
        if winner is None:
            raise NoResultError(
                f"task {self._task.name!r}: expected at least one job to reach an evaluation with a finite loss, found "
                f"that all {len(results)} diverged before; lower the learning rates"
            )
        result = TaskResult(
            task=self._task.name,
            run_dir=str(self._run_dir.root),
            adapter_dir=str(self._run_dir.best),
            best_job=winner.job,
            best_validation_loss=winner.validation_loss,
            jobs=results,
            duration_s=duration_s,
        )
        self._journal.append(
            "task_completed",
            best_job=result.best_job,
            best_validation_loss=result.best_validation_loss,
            samples_trained=result.samples_trained,
            samples_budgeted=result.samples_budgeted,
            duration_s=round(duration_s, 3),
        )
        return result

    def _result(self, run: JobRun) -> JobResult:
        decision, best = self._race.decision_on(run.id), self._race.best(run.id)
        return JobResult(
            job=run.id,
            config=run.config.model_dump(mode="json"),
            steps=run.step,
            total_steps=run.total_steps,
            exit_reason=decision.reason if decision else None,
            exit_evidence=decision.evidence if decision else {},
            best_step=best.step if best else 0,
            best_validation_loss=best.validation_loss if best else float("inf"),
            samples_trained=self._samples(run, run.step),
            samples_budgeted=self._samples(run, run.total_steps),
        )

    # -- small readings ------------------------------------------------------------------------------------------

    @property
    def _num_slots(self) -> int:
        return self._trainer.bank.num_slots

    def _in_race(self, run: JobRun) -> bool:
        return self._race.is_training(run.id)

    def _samples(self, run: JobRun, steps: int) -> int:
        return run.config.samples_after(steps, len(self._data.train))

    def _weights(self, run: JobRun) -> AdapterWeights:
        assert run.slot is not None
        return self._trainer.bank.read(run.slot)

    def _demand(self, run: JobRun) -> JobDemand:
        return JobDemand(
            job=run.id,
            batch_size=run.config.per_device_train_batch_size,
            slot=run.slot,
            is_waiting=self._race.is_waiting(run.id),
            has_started=run.step > 0,
        )

    def _write_adapter(self, folder: Path, run: JobRun, weights: AdapterWeights) -> None:
        write_adapter(folder, weights, run.config, self._backbone.path, self._modules)

    def _journal_losses(self, run: JobRun) -> None:
        if run.unsaved_losses:
            first_step = run.step - len(run.unsaved_losses) + 1
            self._journal.append("train", job=run.id, first_step=first_step, losses=run.unsaved_losses)
            run.unsaved_losses = []
