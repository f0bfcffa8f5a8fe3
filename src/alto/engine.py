"""The wiring: from tasks to best adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from alto.backbone import load_backbone
from alto.data import read_task_rows
from alto.errors import SpecError, UnsupportedError
from alto.executor import Executor, plan_jobs
from alto.export import export_best, write_report
from alto.records import Schedule, TaskResult
from alto.runs import Journal, Observer, RunDir
from alto.scheduler import TaskDemand, schedule_tasks
from alto.spec import EarlyExit, Task

__all__ = ["Engine"]

STRATEGIES = ("adapter_parallel", "single")

TOKENS_PER_PASS = {"cpu": 4096, "cuda": 16384}
"""Where a task leaves it open: what a CPU's caches hold; what keeps a GPU busy with a small base."""


class Engine:
    """Runs tuning tasks on this machine's device.

    Args:
        strategy: ``single``, or ``adapter_parallel``, which on one device is the same.
        total_gpus: Devices to use; this version uses one: the first CUDA device, or the CPU where there is none.
        cluster: ``local``.
        output_dir: Where run directories are made.
        observers: Called with every journal event of every task, after it is written.

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
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def tune(self, task: Task) -> TaskResult:
        """Run one task and export its best adapter.

        Returns:
            Every job's outcome; ``adapter_dir`` is the best adapter in PEFT format.

        Raises:
            AltoError: What is wrong with the task, its data or its model; nothing has been written then.
            NoResultError: No job gave a usable adapter; the run directory says why.
        """
        if task.num_gpus > 1:
            raise UnsupportedError(
                f"num_gpus: this version runs a task on 1 device, found {task.num_gpus}; set it to 1"
            )
        if task.max_tokens_per_pass is None:
            task = task.replace(max_tokens_per_pass=TOKENS_PER_PASS[self._device.type])
        rows = read_task_rows(task)  # before a model is downloaded in vain
        backbone = load_backbone(
            task.model, dtype=task.dtype, device=self._device, gradient_checkpointing=task.gradient_checkpointing
        )
        data = rows.encode(backbone.tokenizer, task.max_length)
        runs = plan_jobs(task, backbone, data)
        run_dir = RunDir.create(self._output_dir, task)
        try:
            with Journal(run_dir.journal_file, self._observers) as journal:
                result = Executor(task, runs, backbone, data, run_dir=run_dir, journal=journal).run()
            export_best(result, run_dir.job(result.best_job, "best"), model=task.model, dataset=task.dataset)
        finally:
            write_report(run_dir.root)
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


def _num_samples(task: Task) -> int:
    """Training samples of all jobs without early exit, counted on the rows before tokenisation."""
    num_rows = len(read_task_rows(task).train)
    return sum(job.config.samples_after(job.config.total_steps(num_rows), num_rows) for job in task.jobs)
