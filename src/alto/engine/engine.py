"""The engine: the Python interface to runs and queues."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from alto.backbone import device_name
from alto.engine.evaluating import evaluate_adapters
from alto.engine.existing_runs import is_finished
from alto.engine.exports import find_winner
from alto.engine.gpus import STRATEGIES, is_launched
from alto.engine.launched import LaunchedRunner
from alto.engine.objects import check_has_id, given_objects
from alto.engine.packing import packed_as
from alto.engine.previewing import preview_task
from alto.engine.queue_setup import QueueSetup
from alto.engine.queues import QueueRunner
from alto.engine.refit import refit_folder, refit_task
from alto.engine.runner import TaskRunner, portable
from alto.engine.showing import show_result, shown
from alto.engine.task_queue import TaskQueue
from alto.engine.trainer_callbacks import observers_of
from alto.errors import SpecError
from alto.evaluation import EvaluationSettings, OnProgress
from alto.executor.profiling.disk import with_free_space
from alto.exporting import ExportSettings, check_before, write_export
from alto.records import (
    DataPreview,
    EvaluationResult,
    ExportResult,
    ForeignTool,
    GenerationBackend,
    GgufType,
    Metric,
    Schedule,
    TaskPlan,
)
from alto.results import TaskResult
from alto.runs import Observer, RunDir, in_background, load_run_task
from alto.spec import EarlyExit, Task
from alto.spec.base_objects import BaseObjects

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

__all__ = ["Engine"]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Runs tuning tasks. Its settings are frozen; all state is in run directories.

    One task (:meth:`tune`) runs in this process, on the first CUDA device, or on the CPU where there is none; one that
    asks for several GPUs runs in as many processes. Many (:meth:`batched_execution`) run side by side on the GPUs of a
    cluster, each in processes of its own or together with others on the same base model.

    Args:
        strategy: How a task uses several GPUs (``num_gpus``). ``adapter_parallel``: each of them holds a part of the
            base model and trains jobs of its own. ``single``: a task uses one GPU, or is one process on several CPU
            slots.
        total_gpus: GPUs that many tasks share; None for all there are. On a machine without GPUs it is the number of
            CPU slots that stand for them, 1 if it is not given: a task on n of them has n shares of the cores.
        cluster: ``local``; ``ray://HOST:PORT`` or ``auto`` for a Ray cluster; ``NAME`` or ``NAME://…`` for a kind that
            a package registers under ``alto.clusters``.
        quotas: The most GPUs that the tasks of a tenant have at a time.
        share_executor: Whether tasks on one base model may be trained together in one process where all are done
            sooner; a task's own key ``share_executor: false`` keeps that task alone.
        output_dir: Where run directories are made.
        observers: Each is called, on a thread of its own, with every journal entry (:class:`alto.runs.JournalEntry`)
            of every task, after it is written. One that raises, hangs or is slow changes nothing about the training:
            one that raises is not called again, and at the end they get half a minute to finish. A run that is
            resumed shows them its past first, each entry with ``is_replayed``. Where ranks are lost and started again,
            what they had written since their last checkpoint is shown again. `MeasuringBegun`
            comes before a task is measured, and again when its time is known better. Of many tasks they are shown the
            queue's entries, with a `TaskMeasured` of each that is measured, and those of a task in `TaskRelayed`. A
            ``transformers.TrainerCallback`` is called for every job: :class:`~.trainer_callbacks.CallbackObserver`.
        is_interrupted: Called between steps; once it returns true, what runs stops and can be resumed.
        progress: Whether :meth:`tune` and :meth:`resume` show the run and its table of jobs on the standard output.
            None shows them in a terminal and in a notebook.

    Raises:
        SpecError: The strategy is unknown, or a count is below 1.
        UnsupportedError: A callback among the observers has methods that nothing here calls.
    """

    strategy: str = "adapter_parallel"
    total_gpus: int | None = None
    cluster: str = "local"
    quotas: Mapping[str, int] = field(default_factory=dict)
    share_executor: bool = True
    output_dir: str | Path = "runs"
    observers: Sequence[Observer | TrainerCallback] = ()
    is_interrupted: Callable[[], bool] | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise SpecError(f"strategy: expected one of {', '.join(STRATEGIES)}, found {self.strategy!r}")
        if self.total_gpus is not None and self.total_gpus < 1:
            raise SpecError(f"total_gpus: expected at least 1, found {self.total_gpus}")
        observers_of(self.observers)

    @property
    def _setup(self) -> QueueSetup:
        return QueueSetup(
            strategy=self.strategy,
            cluster=self.cluster,
            total_gpus=self.total_gpus,
            quotas=dict(self.quotas),
            share_executor=self.share_executor,
        )

    @cached_property
    def _device(self) -> torch.device:
        return TaskRunner().device

    def tune(self, task: Task, *, packing_from: str | Path | None = None) -> TaskResult:
        """Run one task and export its best adapter.

        Args:
            packing_from: The directory of another run of the task, whose packing is taken instead of one that is
                measured. Two runs are equal to the last bit only where they are packed alike.

        Returns:
            Every job's outcome; ``adapter_dir`` is the best adapter in PEFT format.

        Raises:
            AltoError: What is wrong with the task, its data or its model; nothing has been written then.
            RunError: ``packing_from`` is a run of another task, on another device or by another number of processes, or
                has no packing.
            NoResultError: No job gave a usable adapter; the run directory has the reasons.
            TaskInterruptedError, RunWriteError: The run stopped half-way; :meth:`resume` continues it.
        """
        if packing_from is not None:
            check_has_id([task], "packing_from, which compares names of base models")
            num_ranks = task.num_gpus if is_launched(task, self.strategy, self._device) else 1
            task = packed_as(portable(task), packing_from, device_name(self._device), num_ranks)
        with self._runner_of(task, progress=self.progress) as runner:
            result = TaskResult(runner.begin(task, Path(self.output_dir)))
        show_result(result, self.progress)
        return result

    def plan(self, task: Task, *, refresh: bool = False) -> TaskPlan:
        """Plan ``task``: memory, packing, time, disk space. Measured unless that is cached; trains and writes nothing.

        Args:
            refresh: Measure again, even where a measurement is cached.

        Raises:
            AltoError: What is wrong with the task, its data or its model.
            DeviceMemoryError: The task cannot fit; the message states what does.
        """
        with self._runner_of(task, progress=False) as runner:
            return with_free_space(runner.plan(task, refresh=refresh), Path(self.output_dir))

    def resume(
        self,
        run: str | Path,
        *,
        num_gpus: int | None = None,
        trust_remote_code: bool = False,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> TaskResult:
        """Resume an interrupted run from its last checkpoint; its result equals that of an uninterrupted run.

        A finished run returns its result again. Where a command waits that clones or resumes one of its jobs
        (``alto job``), that is trained, and result, best adapter and report are renewed.

        Args:
            run: The run directory.
            num_gpus: Number of GPUs from now on; None keeps the task's.
            trust_remote_code: Allow the Python code that comes with the base model, where the run's task asks for it.
                The run's own files cannot give this permission: they may come from another person.
            model, tokenizer: The base model as an object, for a run that began on one; None loads what the run names.

        Raises:
            UntrustedCodeError: The task asks for that code, and it is not allowed.
            RunNotFoundError: There is no run.
            RunBusyError: A process works on it.
            RunChangedError: Its base model, data or settings are other ones than it began with.
            AltoError: As :meth:`tune` does.
        """
        run_dir, objects = RunDir.open(run), given_objects(model, tokenizer)
        if is_finished(run_dir):
            with in_background(observers_of(self.observers)) as observers:
                result = TaskResult(self._here(observers, objects).resume(run_dir, trust_remote_code=trust_remote_code))
            show_result(result, self.progress)
            return result
        task = load_run_task(run_dir, trust_remote_code=trust_remote_code)
        is_other = num_gpus is not None and num_gpus != task.num_gpus
        task = task.replace(num_gpus=num_gpus) if is_other else task
        shown_task = task if objects is None else task.replace(model=objects)
        with self._runner_of(shown_task, progress=self.progress) as runner:
            if is_other:
                with run_dir.locked():
                    run_dir.resolve(task)
            result = TaskResult(runner.resume(run_dir, trust_remote_code=trust_remote_code))
        show_result(result, self.progress)
        return result

    def refit(
        self,
        run: str | Path,
        *,
        to: str | Path | None = None,
        trust_remote_code: bool = False,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> TaskResult:
        """Train the winner of a finished run again, on all rows: those to validate on included, not those to test on.

        It has the winner's settings, seed and learning rates up to its best checkpoint. Nothing is validated.

        Args:
            run: The directory of the finished run.
            to: Folder in which the new run directory is made; None makes it beside ``run``.
            trust_remote_code, model, tokenizer: As of :meth:`resume`.

        Raises:
            NoResultError: The run has no result.
            RunChangedError: The base model is another one than that of the run.
            UnsupportedError: Its winner was not trained with one configuration from its beginning, or is a refit.
            AltoError: As :meth:`tune` does.
        """
        run_dir, objects = RunDir.open(run), given_objects(model, tokenizer)
        task = refit_task(run_dir, trust_remote_code=trust_remote_code, objects=objects)
        return replace(self, output_dir=refit_folder(run_dir) if to is None else to).tune(task)

    def preview(self, task: Task, *, num_rows: int = 3) -> DataPreview:
        """The data of ``task`` as it would be trained, and its first ``num_rows`` examples; no weights are read.

        Raises:
            AltoError: What is wrong with the data, or with the model's tokenizer.
        """
        return preview_task(task, num_rows=num_rows)

    def evaluate(
        self,
        targets: str | Path | Sequence[str | Path],
        *,
        jobs: Sequence[str] = (),
        all_jobs: bool = False,
        dataset: str | None = None,
        base: str | None = None,
        metric: Metric | Mapping[str, Any] | Callable[..., float] = "auto",
        batch_size: int = 64,
        max_new_tokens: int = 512,
        limit: int | None = None,
        baseline: bool = False,
        predictions: bool = False,
        backend: GenerationBackend = "alto",
        trust_remote_code: bool = False,
        on_progress: OnProgress | None = None,
    ) -> EvaluationResult:
        """Measure adapters of one base on held-out rows, all at once, and note the numbers in the ``metrics.json`` of
        each, and in the reports of their runs.

        Args:
            targets: Runs, whose best adapters are meant, or folders of LoRA adapters; one or several.
            jobs, all_jobs: Of one run, these jobs or all, whose best adapters are meant then.
            dataset: Where the rows are; None takes those that the run's task holds out.
            base: The base model, where it is not to be found under the name that the adapters give.
            metric, batch_size, max_new_tokens, limit, baseline, predictions, backend: As in
                :class:`EvaluationSettings`.
            trust_remote_code: Allow the Python code that comes with the base model: of a run where its task asks for
                it, of adapters alone where transformers has none for the model.
            on_progress: Called with the name of the measurement, its finished rows and all its rows; None: not called.

        Raises:
            UntrustedCodeError: The task of a run asks for that code, and it is not allowed.
            RunNotFoundError: There is no such adapter.
            UnsupportedError: One is more than plain LoRA; or vLLM is requested, and cannot serve.
            SpecError: The adapters have several bases, or heads of several kinds; or a setting is out of its domain.
            DataError: There are no rows, or they do not carry what the metric needs.
            ModelError: The base model cannot be used, or an adapter does not fit it.
            RunChangedError: It is another one than a run was trained on, and was not named as ``base``.
        """
        settings = EvaluationSettings(
            metric=metric,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            limit=limit,
            baseline=baseline,
            predictions=predictions,
            backend=backend,
        )
        paths = [targets] if isinstance(targets, str | Path) else list(targets)
        return evaluate_adapters(
            [Path(path) for path in paths],
            settings,
            device=self._device,
            jobs=jobs,
            all_jobs=all_jobs,
            dataset=dataset,
            base=base,
            trust_remote_code=trust_remote_code,
            on_progress=on_progress,
        )

    def export(
        self,
        target: str | Path,
        to: str | Path,
        *,
        merged: bool = False,
        gguf: GgufType | None = None,
        per_expert: bool = False,
        config: ForeignTool | None = None,
        push_to_hub: str | None = None,
        job: str | None = None,
        base: str | None = None,
        trust_remote_code: bool = False,
    ) -> ExportResult:
        """Write an adapter for other programs into a folder, which is complete or not there: as it was trained, with
        tokenizer, chat template and model card, or in one of the forms below.

        Args:
            target: A run, whose best adapter is meant, or the folder of an adapter.
            to: The folder: absent, or empty.
            merged, gguf, per_expert, config, push_to_hub: As in :class:`alto.exporting.ExportSettings`.
            job: Of a run, the best adapter of this job instead.
            base: The base model, where it is not to be found under the name that the run, or the adapter, gives; the
                exported files name this one then.
            trust_remote_code: Allow the Python code that comes with the base model, where the run's task asks for it.

        Raises:
            AltoError: As :func:`alto.exporting.write_export` and :func:`alto.engine.exports.find_winner` do.
        """
        settings = ExportSettings(
            merged=merged, gguf=gguf, per_expert=per_expert, config=config, push_to_hub=push_to_hub
        )
        folder = Path(to).expanduser().resolve()
        check_before(folder, settings)
        found = find_winner(
            Path(target), job=job, base=base, trust_remote_code=trust_remote_code, needs_rows=config is not None
        )
        return write_export(found, folder, settings)

    def schedule(self, tasks: Sequence[Task], method: str = "cp-sat", *, refresh: bool = False) -> Schedule:
        """Which of ``tasks`` runs on which GPUs, and when, so that all are done soonest.

        What a task takes is measured first, in processes on the cluster, where no earlier measurement is known. In the
        schedule tasks have the names :meth:`batched_execution` gives them.

        Args:
            method: ``MILP``, ``cp-sat``, ``fifo``, ``sjf`` or ``lpt``.
            refresh: Measure durations again, even where they are cached.

        Raises:
            SpecError: The method is unknown, or a task asks for more GPUs than there are.
            AltoError: What is wrong with a task, its data or its model.
        """
        with self._queues() as queues:
            return queues.schedule(tasks, method, refresh=refresh)

    def batched_execution(
        self, tasks: Sequence[Task], schedule: Schedule | None = None, early_exit: EarlyExit | None = None
    ) -> list[TaskResult]:
        """Run ``tasks`` on the cluster, first by ``schedule``, and replanned as they end and fail.

        Args:
            schedule: From :meth:`schedule`; None makes one, on the same cluster.
            early_exit: Replaces the settings of every task; None keeps each task's own.

        Returns:
            One result per task, in the order of ``tasks``, but of those that were cancelled meanwhile; then one of each
            task that was submitted meanwhile (``alto submit``).

        Raises:
            TasksFailedError: Tasks were given up; the others have their results.
            TaskInterruptedError: It was stopped; :meth:`resume_queue` continues the queue.
        """
        tasks = [task.replace(early_exit=early_exit) if early_exit is not None else task for task in tasks]
        with self._queues() as queues:
            return queues.begin(tasks, schedule, Path(self.output_dir))

    @contextlib.contextmanager
    def queue(
        self, tasks: Sequence[Task] = (), *, method: str = "cp-sat", trust_remote_code: bool = False
    ) -> Iterator[TaskQueue]:
        """A new queue, to which tasks are submitted and from which they are cancelled while others run.

        Leaving the block waits until every task has ended; where an error leaves it, running tasks save and end, and
        :meth:`resume_queue` continues the queue.

        Args:
            tasks: To begin with; measured and scheduled as :meth:`schedule` does. A task that is submitted later
                without a cached measurement is estimated at one hour until its own pace is measured.
            method: As of :meth:`schedule`.
            trust_remote_code: Whether tasks that other processes submit (``alto submit``) may run the Python code that
                comes with their base models. For tasks of this process, the task's own key decides.

        Raises:
            TaskInterruptedError: It was stopped while the block waited.
            AltoError: As :meth:`schedule` does.
        """
        with (
            self._queues() as queues,
            queues.opened(tasks, method, Path(self.output_dir), trust_remote_code=trust_remote_code) as queue,
        ):
            yield queue

    def resume_queue(
        self, queue: str | Path, *, trust_remote_code: bool = False, keep_open: bool = False
    ) -> list[TaskResult]:
        """Resume an interrupted queue: finished tasks stay finished, the others resume from their checkpoints.

        Args:
            queue: Its folder, ``runs/queue-<id>``. It continues on the cluster that it began on, or on the one that
                this engine names; the address of a Ray cluster has to be named.
            trust_remote_code: As of :meth:`resume`, for all of its tasks.
            keep_open: Wait for further tasks when all have ended, until ``alto drain``.

        Raises:
            UntrustedCodeError: A task that is not done asks for code of its base model, or the queue for a Ray cluster
                at an address, and the caller has not allowed it.
            RunNotFoundError: There is no queue.
            RunBusyError: A process works on it.
            AltoError: As :meth:`batched_execution` does.
        """
        with self._queues() as queues:
            return queues.resume(queue, trust_remote_code=trust_remote_code, keep_open=keep_open)

    @contextlib.contextmanager
    def _queues(self) -> Iterator[QueueRunner]:
        with in_background(observers_of(self.observers)) as observers:
            yield QueueRunner(self._setup, observers=observers, is_interrupted=self.is_interrupted)

    @contextlib.contextmanager
    def _runner_of(self, task: Task, *, progress: bool | None) -> Iterator[TaskRunner | LaunchedRunner]:
        """The runner of ``task``: in this process, or with one process per rank; ``progress`` as of the engine."""
        has_ranks = is_launched(task, self.strategy, self._device)
        if has_ranks:
            check_has_id([task], "several GPUs (num_gpus)")
        with shown(progress) as views, in_background((*observers_of(self.observers), *views)) as observers:
            if has_ranks:
                yield LaunchedRunner(observers=observers, is_interrupted=self.is_interrupted)
            else:
                yield self._here(observers, task.objects)

    def _here(self, observers: Sequence[Observer], objects: BaseObjects | None = None) -> TaskRunner:
        return TaskRunner(observers=observers, is_interrupted=self.is_interrupted, objects=objects)
