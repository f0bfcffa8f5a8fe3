"""The engine: the Python interface to runs and queues."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from alto.artifacts import ExportSettings, check_before, write_export
from alto.backbone import device_name
from alto.engine.existing_runs import (
    evaluate_adapters,
    find_winner,
    is_finished,
    packed_as,
    refit_folder,
    refit_task,
    threads_of,
)
from alto.engine.gpus import STRATEGIES, is_launched, show_result, shown
from alto.engine.launched import LaunchedRunner
from alto.engine.objects import check_has_id, given_objects
from alto.engine.queue_setup import QueueSetup
from alto.engine.queues import QueueRunner
from alto.engine.runner import TaskRunner, portable
from alto.engine.start import preview_task
from alto.engine.task_queue import TaskQueue
from alto.engine.trainer_callbacks import observers_of
from alto.errors import SpecError
from alto.evaluation import EvaluationSettings, OnProgress
from alto.executor.profiling import using_threads
from alto.executor.profiling.planning import with_free_space
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
from alto.spec import BaseObjects, EarlyExit, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Runs tuning tasks. Its settings are frozen; all state is in run directories.

    :meth:`tune` runs one task in this process, on the first CUDA device, or on the CPU of a machine without one; a task
    that asks for several GPUs runs in one process per GPU. :meth:`batched_execution` runs many tasks side by side on
    the GPUs of a cluster; each task has its own processes or shares one with other tasks on the same base model.

    Args:
        strategy: How a task uses several GPUs (``num_gpus``). ``adapter_parallel``: each GPU holds a part of the base
            model and trains its own jobs. ``single``: a task uses one GPU, or one process on several CPU slots.
        total_gpus: Number of GPUs that the tasks share; None uses all. On a machine without GPUs, the number of CPU
            slots: a task on n slots gets n shares of the cores and of the memory. Then None chooses one slot for each
            task of the queue if cores and memory allow it, and one slot for an empty queue.
        cluster: ``local``; ``ray://HOST:PORT`` or ``auto`` for a Ray cluster; ``NAME`` or ``NAME://…`` for a cluster
            type that a package registers under ``alto.clusters``.
        quotas: Maximum number of GPUs that the tasks of each tenant use at a time.
        share_executor: Whether tasks on the same base model may train together in one process when all tasks finish
            sooner that way. A task with ``share_executor: false`` is always trained alone.
        output_dir: Folder in which run directories are made.
        observers: Called with every journal entry (:class:`alto.runs.JournalEntry`) of every task after it is written,
            each observer on its own thread. An observer that raises, hangs or is slow does not affect the training: one
            that raises is not called again, and at the end all get half a minute to finish. A resumed run first shows
            its past entries, with ``is_replayed`` set. When lost ranks are restarted, entries written since their last
            checkpoint are shown again. `MeasuringBegun` comes before a task is measured, and again when the estimated
            time of the measurement changes. When many tasks run, observers get the queue's entries, with a
            `TaskMeasured` for each measured task; the entries of a task come inside `TaskRelayed`. A
            ``transformers.TrainerCallback`` is called for every job: :class:`~.trainer_callbacks.CallbackObserver`.
        is_interrupted: Called between steps; once it returns true, training stops and can be resumed.
        progress: Whether :meth:`tune` and :meth:`resume` print the run and its table of jobs to standard output. None
            prints them in a terminal and in a notebook.

    Raises:
        SpecError: The strategy is unknown, or ``total_gpus`` is below 1.
        UnsupportedError: A callback among the observers has methods that ALTO never calls.
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
            packing_from: The directory of another run of the task. Its packing is used, and nothing is measured. Two
                runs are bitwise equal only if they have the same packing.

        Returns:
            The outcome of every job; ``adapter_dir`` is the best adapter in PEFT format.

        Raises:
            AltoError: The task, its data or its model has an error; nothing has been written then.
            RunError: ``packing_from`` is a run of another task, on another device or with another number of processes,
                or has no packing.
            NoResultError: No job produced a usable adapter; the run directory has the reasons.
            TaskInterruptedError, RunWriteError: The run stopped before its end; :meth:`resume` continues it.
        """
        if packing_from is not None:
            check_has_id([task], "packing_from, which compares names of base models")
            num_ranks = task.num_gpus if is_launched(task, self.strategy, self._device) else 1
            task = packed_as(portable(task), packing_from, device_name(self._device), num_ranks)
        num_threads = None if packing_from is None else threads_of(packing_from)
        with using_threads(num_threads), self._runner_of(task, progress=self.progress) as runner:
            result = TaskResult(runner.begin(task, Path(self.output_dir)))
        show_result(result, self.progress)
        return result

    def plan(self, task: Task, *, refresh: bool = False) -> TaskPlan:
        """Plan ``task``: memory, packing, time, disk space. Measures unless the result is cached; trains and writes
        nothing.

        Args:
            refresh: Measure again, even if a measurement is cached.

        Raises:
            AltoError: The task, its data or its model has an error.
            DeviceMemoryError: The task does not fit into memory; the message says what would fit.
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
        """Resume an interrupted run from its last checkpoint. The result is the same as without the interruption.

        A finished run returns its result again. If a command that clones or resumes one of its jobs (``alto job``) is
        waiting, that job is trained, and the result, the best adapter and the report are updated.

        Args:
            run: The run directory.
            num_gpus: Number of GPUs from now on; None keeps the task's number.
            trust_remote_code: Allow the base model's own Python code if the run's task asks for it. The files of the
                run cannot give this permission, because they may come from another person.
            model, tokenizer: The base model as an object, for a run that was started with one; None loads the model
                that the run names.

        Raises:
            UntrustedCodeError: The task asks for the base model's code, and the caller does not allow it.
            RunNotFoundError: ``run`` is not a run directory.
            RunBusyError: Another process works on the run.
            RunChangedError: The base model, data or settings differ from those that the run started with.
            AltoError: See :meth:`tune`.
        """
        run_dir, objects = RunDir.open(run), given_objects(model, tokenizer)
        if is_finished(run_dir):
            with in_background(observers_of(self.observers)) as observers:
                result = TaskResult(
                    self._runner(observers, objects).resume(run_dir, trust_remote_code=trust_remote_code)
                )
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
        """Train the winner of a finished run again on all rows, including the validation set but not the test set.

        The winner's settings, seed and learning rates are used, up to the step of its best checkpoint. Nothing is
        validated.

        Args:
            run: The directory of the finished run.
            to: Folder in which the new run directory is made; None creates it next to ``run``.
            trust_remote_code, model, tokenizer: See :meth:`resume`.

        Raises:
            NoResultError: The run has no result.
            RunChangedError: The base model differs from that of the run.
            UnsupportedError: The winner did not keep one configuration from start to end, or is a refit.
            AltoError: See :meth:`tune`.
        """
        run_dir, objects = RunDir.open(run), given_objects(model, tokenizer)
        task = refit_task(run_dir, trust_remote_code=trust_remote_code, objects=objects)
        return replace(self, output_dir=refit_folder(run_dir) if to is None else to).tune(task)

    def preview(self, task: Task, *, num_rows: int = 3) -> DataPreview:
        """Return the data of ``task`` as it would be trained, and its first ``num_rows`` examples; reads no weights.

        Raises:
            AltoError: The data or the model's tokenizer has an error.
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
        max_new_tokens: int | None = None,
        limit: int | None = None,
        baseline: bool = False,
        predictions: bool = False,
        backend: GenerationBackend = "alto",
        trust_remote_code: bool = False,
        on_progress: OnProgress | None = None,
    ) -> EvaluationResult:
        """Measure adapters of one base model together on held-out rows; write the scores to the ``metrics.json`` of
        each adapter and to the reports of their runs. If texts have no labels, an adapter with a classification head
        only predicts them: with ``predictions``, all scores are None and nothing is written.

        Args:
            targets: One or several run directories (their best adapters are measured) or folders of LoRA adapters.
            jobs, all_jobs: Measure the best adapters of these jobs, or of all jobs, of one run instead.
            dataset: Location of the rows; None takes the rows that the run's task holds out.
            base: The base model, if it cannot be found under the name that is written in the adapters.
            metric, batch_size, max_new_tokens, limit, baseline, predictions, backend: See :class:`EvaluationSettings`.
            trust_remote_code: Allow the base model's own Python code: for a run, if its task asks for it; for adapters
                alone, if transformers does not implement the model. Allow also rewards of a run that run code or send
                rows to a server.
            on_progress: Called with the name of the measurement, the number of finished rows and of all rows.

        Raises:
            UntrustedCodeError: The task of a run asks for the base model's code, or its rewards run code or send rows
                to a server, and the caller does not allow it.
            RunNotFoundError: An adapter does not exist.
            UnsupportedError: An adapter is more than plain LoRA; or vLLM is requested and cannot serve.
            SpecError: The adapters have several base models, or different kinds of heads; or a setting is out of range.
            DataError: There are no rows, or they lack a field that the metric needs.
            ModelError: The base model cannot be used, or an adapter does not fit it.
            RunChangedError: A run was trained on another base model, and ``base`` is not given.
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
        """Write an adapter for other programs into a folder. The folder is complete or does not exist. The adapter is
        written as it was trained, with tokenizer, chat template and model card, or in one of the forms below.

        Args:
            target: A run directory (its best adapter is exported) or the folder of an adapter.
            to: The folder: absent, or empty.
            merged, gguf, per_expert, config, push_to_hub: See :class:`alto.artifacts.ExportSettings`.
            job: Export the best adapter of this job of the run instead.
            base: The base model, if the name in the run or adapter does not find it; the exported files then use this
                name.
            trust_remote_code: Allow the base model's own Python code if the run's task asks for it.

        Raises:
            AltoError: See :func:`alto.artifacts.write_export` and :func:`alto.engine.existing_runs.find_winner`.
        """
        settings = ExportSettings(
            merged=merged, gguf=gguf, per_expert=per_expert, config=config, push_to_hub=push_to_hub
        )
        folder = Path(to).expanduser().resolve()
        check_before(folder, settings)
        winner = find_winner(
            Path(target), job=job, base=base, trust_remote_code=trust_remote_code, needs_rows=config is not None
        )
        return write_export(winner, folder, settings)

    def schedule(self, tasks: Sequence[Task], method: str = "cp-sat", *, refresh: bool = False) -> Schedule:
        """Decide which of ``tasks`` runs on which GPUs and when, so that all are finished as early as possible.

        The duration of a task is measured first, in processes on the cluster, unless an earlier measurement is cached.
        Tasks have the same names in the schedule as :meth:`batched_execution` gives them.

        Args:
            method: ``MILP``, ``cp-sat``, ``fifo``, ``sjf`` or ``lpt``.
            refresh: Measure durations again, even if they are cached.

        Raises:
            SpecError: The method is unknown, or a task asks for more GPUs than there are.
            AltoError: A task, its data or its model has an error.
        """
        with self._queues() as queues:
            return queues.schedule(tasks, method, refresh=refresh)

    def batched_execution(
        self, tasks: Sequence[Task], schedule: Schedule | None = None, early_exit: EarlyExit | None = None
    ) -> list[TaskResult]:
        """Run ``tasks`` on the cluster, starting with ``schedule`` and replanning when tasks end or fail.

        Args:
            schedule: From :meth:`schedule`; None makes one, on the same cluster.
            early_exit: Replaces the early-exit settings of every task; None keeps each task's own.

        Returns:
            One result per task, in the order of ``tasks``, without tasks that were cancelled meanwhile; then one result
            per task that was submitted meanwhile (``alto submit``).

        Raises:
            TasksFailedError: Some tasks failed for good; the others have their results.
            TaskInterruptedError: The queue was stopped; :meth:`resume_queue` continues it.
        """
        tasks = [task.replace(early_exit=early_exit) if early_exit is not None else task for task in tasks]
        with self._queues() as queues:
            return queues.begin(tasks, schedule, Path(self.output_dir))

    @contextlib.contextmanager
    def queue(
        self, tasks: Sequence[Task] = (), *, method: str = "cp-sat", trust_remote_code: bool = False
    ) -> Iterator[TaskQueue]:
        """Yield a new queue; tasks can be submitted to it and cancelled while others run.

        Leaving the block waits until every task has ended. If the block ends with an error, running tasks save and end,
        and :meth:`resume_queue` continues the queue.

        Args:
            tasks: The first tasks; measured and scheduled as :meth:`schedule` does. The duration of a task that is
                submitted later without a cached measurement is estimated at one hour until its own speed is measured.
            method: See :meth:`schedule`.
            trust_remote_code: Whether tasks that other processes submit (``alto submit``) may run the Python code of
                their base models. For tasks of this process, the task's own key decides.

        Raises:
            TaskInterruptedError: The queue was stopped while the block waited.
            AltoError: See :meth:`schedule`.
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
            queue: The queue's folder, ``runs/queue-<id>``. The queue continues on the cluster of this engine, or, if
                that is the default, on the one that it started on; the address of a Ray cluster must be given again.
            trust_remote_code: See :meth:`resume`; applies to all tasks of the queue.
            keep_open: When all tasks have ended, wait for further tasks until ``alto drain``.

        Raises:
            UntrustedCodeError: An unfinished task asks for code of its base model, or the queue for a Ray cluster at an
                address, and the caller has not allowed it.
            RunNotFoundError: ``queue`` is not a queue's folder.
            RunBusyError: Another process works on the queue.
            AltoError: See :meth:`batched_execution`.
        """
        with self._queues() as queues:
            return queues.resume(queue, trust_remote_code=trust_remote_code, keep_open=keep_open)

    @contextlib.contextmanager
    def _queues(self) -> Iterator[QueueRunner]:
        with in_background(observers_of(self.observers)) as observers:
            yield QueueRunner(self._setup, observers=observers, is_interrupted=self.is_interrupted)

    @contextlib.contextmanager
    def _runner_of(self, task: Task, *, progress: bool | None) -> Iterator[TaskRunner | LaunchedRunner]:
        """Yield the runner of ``task``, in this process or with one process per rank; ``progress`` as in `Engine`."""
        has_ranks = is_launched(task, self.strategy, self._device)
        if has_ranks:
            check_has_id([task], "several GPUs (num_gpus)")
        with shown(progress) as views, in_background((*observers_of(self.observers), *views)) as observers:
            if has_ranks:
                yield LaunchedRunner(observers=observers, is_interrupted=self.is_interrupted)
            else:
                yield self._runner(observers, task.objects)

    def _runner(self, observers: Sequence[Observer], objects: BaseObjects | None = None) -> TaskRunner:
        return TaskRunner(observers=observers, is_interrupted=self.is_interrupted, objects=objects)
