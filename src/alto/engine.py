"""The wiring: from tasks to best adapters."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from alto.backbone import SHIPPED_MODELS, load_backbone, load_tokenizer, resolve_model
from alto.data import preview_rows, read_heldout_rows, read_task_rows
from alto.errors import AltoError, SpecError, UnsupportedError
from alto.evaluation import (
    BaseModel,
    EvaluationSettings,
    OnProgress,
    add_evaluation,
    find_subject,
    measure,
)
from alto.executor import Executor, Past, plan_jobs, recover
from alto.executor.profiling import USUAL_TOKENS_PER_PASS, Subject, pack, plan
from alto.export import export_best, write_report
from alto.records import DataPreview, EvaluationResult, Metric, Schedule, TaskPlan, TaskResult
from alto.runs import Journal, Observer, RunDir, read_history, task_result
from alto.scheduler import TaskDemand, schedule_tasks
from alto.spec import EarlyExit, Task, load_task
from alto.trackers import Tracker, chosen_trackers, tracking

__all__ = ["Engine"]

STRATEGIES = ("adapter_parallel", "single")


class Engine:
    """Runs tuning tasks on this machine's device.

    Args:
        strategy: ``single``, or ``adapter_parallel``, which on one device is the same.
        total_gpus: Devices to use; this version uses one: the first CUDA device, or the CPU where there is none.
        cluster: ``local``.
        output_dir: Where run directories are made.
        observers: Called with every journal event of every task, after it is written. A run that is resumed tells
            them its past first, each event with ``replayed`` true.
        is_interrupted: Asked between steps; once it returns true, the task that runs stops and can be resumed.

    Raises:
        SpecError: The strategy is unknown, or a count is below 1.
        UnsupportedError: More than one device, or a cluster other than ``local``.
    """

    def __init__(
        self,
        *,
        strategy: str = "adapter_parallel",
        total_gpus: int = 1,
        cluster: str = "local",
        output_dir: str | Path = "runs",
        observers: Sequence[Observer] = (),
        is_interrupted: Callable[[], bool] | None = None,
    ) -> None:
        if strategy not in STRATEGIES:
            raise SpecError(f"strategy: expected one of {', '.join(STRATEGIES)}, found {strategy!r}")
        if total_gpus < 1:
            raise SpecError(f"total_gpus: expected at least 1, found {total_gpus}")
        if total_gpus > 1:
            raise UnsupportedError(f"total_gpus: this version uses 1 device, found {total_gpus}; set it to 1")
        if cluster != "local":
            raise UnsupportedError(f"cluster: this version runs on 'local' alone, found {cluster!r}")
        self._output_dir = Path(output_dir)
        self._observers = tuple(observers)
        self._is_interrupted = is_interrupted
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def tune(self, task: Task) -> TaskResult:
        """Run one task and export its best adapter.

        Returns:
            Every job's outcome; ``adapter_dir`` is the best adapter in PEFT format.

        Raises:
            AltoError: What is wrong with the task, its data or its model; nothing has been written then.
            NoResultError: No job gave a usable adapter; the run directory says why.
            TaskInterruptedError, RunWriteError: The run stopped half-way; :meth:`resume` goes on with it.
        """
        prepared = self._prepare(self._resolved(task))
        packed, forecast = pack(prepared.subject)
        prepared = replace(prepared, subject=replace(prepared.subject, task=packed), forecast=forecast)
        run_dir = RunDir.create(self._output_dir, packed)
        with run_dir.locked():
            return self._execute(prepared, run_dir, Past())

    def plan(self, task: Task, *, refresh: bool = False) -> TaskPlan:
        """What ``task`` takes: memory, packing, time. Measured where nothing is known yet; trains and writes no run.

        Args:
            refresh: Measure again, whatever was measured before.

        Raises:
            AltoError: What is wrong with the task, its data or its model.
            DeviceMemoryError: The task cannot fit; says what does.
        """
        return plan(self._prepare(self._resolved(task)).subject, refresh=refresh)

    def resume(self, run: str | Path) -> TaskResult:
        """Go on with an interrupted run from its last checkpoint, as if nothing had happened.

        A finished run gives its result again; its best adapter and report are written anew.

        Args:
            run: The run directory.

        Raises:
            RunNotFoundError: There is no run.
            RunBusyError: A process works on it.
            RunError: Its data are other ones than it began with.
            AltoError: As :meth:`tune` does.
        """
        run_dir = RunDir.open(run)
        with run_dir.locked():
            task = load_task(run_dir.task_file)
            past = recover(run_dir)
            return (
                self._conclude(task, run_dir) if past.is_finished else self._execute(self._prepare(task), run_dir, past)
            )

    def preview(self, task: Task, *, num_rows: int = 3) -> DataPreview:
        """The data of ``task`` as it would be trained, and its first ``num_rows`` examples; no weights are read.

        Raises:
            AltoError: What is wrong with the data, or with the model's tokenizer.
        """
        rows = read_task_rows(task)
        tokenizer = load_tokenizer(task.model, trust_remote_code=task.trust_remote_code)
        return preview_rows(rows, tokenizer, task, num_rows=num_rows)

    def evaluate(
        self,
        target: str | Path,
        *,
        job: str | None = None,
        dataset: str | None = None,
        base: str | None = None,
        metric: Metric = "auto",
        batch_size: int = 16,
        max_new_tokens: int = 512,
        limit: int | None = None,
        baseline: bool = False,
        on_progress: OnProgress | None = None,
    ) -> EvaluationResult:
        """Measure an adapter on held-out rows and note the numbers in its ``metrics.json``, and in its run's report.

        Args:
            target: A run, whose best adapter is meant, or the folder of a LoRA adapter.
            job: Another job of the run, whose best adapter is meant then.
            dataset: Where the rows are; None takes those the run's task holds out.
            base: The base model, where it is not to be found under the name that the adapter gives.
            metric, batch_size, max_new_tokens, limit, baseline: See :class:`EvaluationSettings`.

        Raises:
            RunNotFoundError: There is no such adapter.
            UnsupportedError: It is more than plain LoRA.
            DataError: There are no rows, or they do not carry what the metric needs.
            ModelError: The base model cannot be used, or the adapter does not fit it.
        """
        settings = EvaluationSettings(
            metric=metric, batch_size=batch_size, max_new_tokens=max_new_tokens, limit=limit, baseline=baseline
        )
        subject = find_subject(Path(target), job=job, base=base, dataset=dataset)
        task = subject.task
        rows = read_heldout_rows(task, dataset)
        result = measure(
            subject.adapter,
            rows,
            settings,
            base=BaseModel(
                model=subject.base_model,
                dtype=task.dtype,
                load_in_4bit=task.load_in_4bit,
                load_in_8bit=task.load_in_8bit,
                device=self._device,
                trust_remote_code=task.trust_remote_code,
                use_safetensors=task.use_safetensors,
            ),
            max_tokens_per_pass=task.max_tokens_per_pass or USUAL_TOKENS_PER_PASS[self._device.type],
            max_length=rows.max_length if subject.run_dir is not None else None,
            on_progress=on_progress,
        )
        for evaluation in result.evaluations:
            add_evaluation(subject.adapter.folder, evaluation)
        if subject.run_dir is not None:
            write_report(subject.run_dir)
        return result

    def schedule(self, tasks: Sequence[Task], method: str = "cp-sat") -> Schedule:
        """The order in which ``tasks`` run.

        Args:
            method: ``MILP``, ``cp-sat``, ``fifo``, ``sjf`` or ``lpt``.

        Raises:
            SpecError: The method is unknown.
            UnsupportedError: A task asks for more than one device.
            DataError: A dataset cannot be read.
        """
        demands = [TaskDemand(task=task.name, num_gpus=task.num_gpus, num_samples=_num_samples(task)) for task in tasks]
        return schedule_tasks(demands, method=method, total_gpus=1)

    def batched_execution(
        self, tasks: Sequence[Task], schedule: Schedule | None = None, early_exit: EarlyExit | None = None
    ) -> list[TaskResult]:
        """Run ``tasks`` in the order of ``schedule``.

        Args:
            schedule: From :meth:`schedule`; None makes one.
            early_exit: Replaces the settings of every task; None keeps each task's own.

        Returns:
            One result per task, in the order of ``tasks``.
        """
        schedule = schedule if schedule is not None else self.schedule(tasks)
        indices = [placement.task_index for placement in schedule.placements]
        if sorted(indices) != list(range(len(tasks))):
            raise SpecError(
                f"schedule: expected a placement for each of the {len(tasks)} tasks, found {len(indices)} "
                "for other ones; make it with engine.schedule(tasks)"
            )
        results: dict[int, TaskResult] = {}
        for index in indices:
            task = tasks[index]
            results[index] = self.tune(task.replace(early_exit=early_exit) if early_exit is not None else task)
        return [results[index] for index in range(len(tasks))]

    def _resolved(self, task: Task) -> Task:
        """The task as any process in any folder may go on with it; how it is packed may still be open."""
        if task.num_gpus > 1:
            raise UnsupportedError(
                f"num_gpus: this version runs a task on 1 device, found {task.num_gpus}; set it to 1"
            )
        found: dict[str, Any] = {}
        for key in ("dataset", "validation_dataset"):
            path = getattr(task, key)
            if path is not None and Path(path).expanduser().is_file():
                found[key] = str(Path(path).expanduser().resolve())
        if Path(task.model).expanduser().is_dir() and task.model not in SHIPPED_MODELS:
            found["model"] = resolve_model(task.model)
        return task.replace(**found)

    def _prepare(self, task: Task) -> _Prepared:
        """Read everything that can be wrong with a task before its run has a folder."""
        trackers = chosen_trackers(task)
        rows = read_task_rows(task)  # before a model is downloaded in vain
        backbone = load_backbone(
            task.model,
            dtype=task.dtype,
            device=self._device,
            load_in_4bit=task.load_in_4bit,
            load_in_8bit=task.load_in_8bit,
            gradient_checkpointing=task.gradient_checkpointing is True,
            torch_compile=task.torch_compile,
            trust_remote_code=task.trust_remote_code,
            use_safetensors=task.use_safetensors,
        )
        data = rows.encode(backbone.tokenizer)
        runs = plan_jobs(task, backbone, data)
        return _Prepared(trackers=trackers, subject=Subject(task=task, backbone=backbone, data=data, runs=runs))

    def _execute(self, prepared: _Prepared, run_dir: RunDir, past: Past) -> TaskResult:
        subject, task = prepared.subject, prepared.subject.task
        with tracking(prepared.trackers, run_dir.root) as tracker_observers:
            observers = (*self._observers, *tracker_observers)
            for event in past.events:
                for observer in observers:
                    observer({**event, "replayed": True})
            try:
                with Journal(run_dir.journal_file, observers, past=past.events) as journal:
                    Executor(
                        task,
                        subject.runs,
                        subject.backbone,
                        subject.data,
                        forecast=prepared.forecast,
                        run_dir=run_dir,
                        journal=journal,
                        past=past,
                        is_interrupted=self._is_interrupted,
                    ).run()
            except BaseException:
                # The report of a broken run is a courtesy; what broke it is the news.
                with contextlib.suppress(AltoError, OSError):
                    write_report(run_dir.root)
                raise
            shutil.rmtree(run_dir.best, ignore_errors=True)
            return self._conclude(task, run_dir)  # before a tracker that hangs is waited for

    def _conclude(self, task: Task, run_dir: RunDir) -> TaskResult:
        """Export what a finished run has not exported yet, and write its report."""
        result = task_result(read_history(run_dir.root), run_dir)
        if not run_dir.best.is_dir():
            export_best(result, run_dir.job(result.best_job, "best"), model=task.model, dataset=task.dataset)
        write_report(run_dir.root)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A task that is ready to run; ``forecast`` is None where nothing was measured for it."""

    trackers: Mapping[str, Tracker]
    subject: Subject
    forecast: TaskPlan | None = None


def _num_samples(task: Task) -> int:
    """Training samples of all jobs without early exit, counted on the rows before tokenisation."""
    num_rows = len(read_task_rows(task).train)
    return sum(job.config.samples_after(job.config.total_steps(num_rows), num_rows) for job in task.jobs)
