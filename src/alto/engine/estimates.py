"""Measured estimates of tasks, cached so that scheduling the same tasks again starts no executor."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from alto.base import is_number, scratch_folder
from alto.cluster import Cluster, Controller, Outcome, TaskTicket, running_controller
from alto.engine.work import PLAN, PLAN_ANEW, PLAN_FILE
from alto.errors import ProfileError
from alto.executor import cache
from alto.records import MAX_DURATION_S, MIN_DURATION_S, Sharing, TaskEstimate, TaskPlan
from alto.runs import Journal, JournalEntry, RunDir
from alto.runs.events import MeasuringBegun, TaskMeasured, TaskRelayed
from alto.scheduler.queue import QueueSettings
from alto.spec import Task

UNKNOWN_DURATION_S = 3600.0
"""Estimated duration of a task that is submitted to a running queue without a cached measurement; updated from the
task's own speed once it trains."""

_SCHEDULING = ("name", "priority", "report_to", "share_executor", "keep")
"""Keys of a task that do not affect its estimate. The tenant is not among them: a shared estimate would reveal to one
tenant that another has trained on the same rows."""

_CODEC = TypeAdapter(TaskEstimate)


def estimate_of(plan: TaskPlan, task: Task) -> TaskEstimate:
    """Return the estimate of a measured task. A task with several GPUs or code of its base model never shares."""
    sharing = None
    if task.num_gpus == 1 and not task.trust_remote_code:
        sharing = Sharing(
            base=f"{base_key(task)} {plan.modules} {plan.gradient_checkpointing}",
            step_s=min(plan.expected_step_s, plan.expected_duration_s),
            num_slots=min(plan.max_slots, plan.num_jobs),
            slot_bytes=plan.slot_bytes,
            pass_bytes=plan.memory.peak_bytes(plan.max_tokens_per_pass, 0),
            capacity_bytes=int(plan.memory.margin * plan.memory.capacity_bytes),
        )
    return TaskEstimate(duration_s=plan.expected_duration_s, sharing=sharing)


def base_key(task: Task) -> str:
    """Return a key that is equal for tasks on the same base model, loaded in the same way, with adapters of the same
    precision; one process can train such tasks together."""
    how = [task.base_model.key(), task.gradient_checkpointing is True, task.adapter_dtype, task.optim_state_dtype]
    digest = hashlib.sha256(json.dumps(how, sort_keys=True).encode()).hexdigest()[:16]
    return f"{task.model} {digest}"


def num_ranks_of(task: Task, *, is_parallel: bool) -> int:
    """Return the number of processes that train ``task``.

    Args:
        is_parallel: Whether a task on several GPUs has one process per GPU.
    """
    return task.num_gpus if is_parallel else 1


def allowed_estimate(estimate: TaskEstimate, *, share_executor: bool) -> TaskEstimate:
    """Return ``estimate``, without its sharing data if the task may not share an executor."""
    return estimate if share_executor else replace(estimate, sharing=None)


def known_estimate(task: Task, cluster: Cluster, num_ranks: int) -> TaskEstimate | None:
    """Return the cached estimate of ``task`` on ``cluster``, or on an equal one; None if there is none."""
    key = _key(task, cluster, num_ranks)
    found = cache.load("estimates", key)
    if found is None:
        return None
    try:
        estimate = _CODEC.validate_json(json.dumps(found), strict=True)
    except ValidationError:
        estimate = None
    if estimate is None or not is_number(estimate.duration_s, least=MIN_DURATION_S, most=MAX_DURATION_S):
        cache.discard("estimates", key, f"invalid estimate: {found!r:.40}")
        return None
    return allowed_estimate(estimate, share_executor=task.share_executor)


def remember_estimate(task: Task, cluster: Cluster, num_ranks: int, estimate: TaskEstimate) -> None:
    """Cache an estimate that an executor on ``cluster`` has measured."""
    cache.save("estimates", _key(task, cluster, num_ranks), asdict(estimate))


def remember_duration(task: Task, cluster: Cluster, num_ranks: int, duration_s: float) -> None:
    """Cache how long a task took from start to end; its cached sharing data stays."""
    duration_s = min(max(duration_s, MIN_DURATION_S), MAX_DURATION_S)
    known = known_estimate(task.replace(share_executor=True), cluster, num_ranks)
    sharing = None if known is None else known.sharing
    if sharing is not None:
        sharing = replace(sharing, step_s=min(sharing.step_s, duration_s))
    remember_estimate(task, cluster, num_ranks, TaskEstimate(duration_s=duration_s, sharing=sharing))


def _key(task: Task, cluster: Cluster, num_ranks: int) -> Mapping[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{len(os.sched_getaffinity(0))} cores"
    return {
        "task": _by_content({key: value for key, value in task.to_dict().items() if key not in _SCHEDULING}, task),
        "weights": cache.weights_of(task.model),
        "nodes": [len(node.gpus) for node in cluster.nodes],
        "has_gpus": cluster.has_gpus,
        "ranks": num_ranks,
        "device": device,
        "versions": cache.versions(),
    }


def _by_content(values: dict[str, Any], task: Task) -> dict[str, Any]:
    """Return ``values`` of ``task`` with every path of a local dataset file replaced by a digest of its content, so
    that the file's location does not matter."""
    digests = {path: digest for path in task.dataset_names if (digest := _digest_of(path)) is not None}

    def replaced(value: Any) -> Any:
        if isinstance(value, list):
            return [replaced(each) for each in value]
        if isinstance(value, dict):
            return {key: replaced(each) for key, each in value.items()}
        return digests.get(value, value) if isinstance(value, str) else value

    keys = ("dataset", "validation_dataset", "test_dataset")
    return values | {key: replaced(values[key]) for key in keys if key in values}


def _digest_of(path: str) -> str | None:
    """Return a digest of a local file's content; None if ``path`` is not a file."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        return None
    stat = file.stat()
    return _digest_of_state(str(file), stat.st_ino, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _digest_of_state(path: str, *_state: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_ONE_ATTEMPT = QueueSettings(backoff_s=0.0, max_attempts=1)

_WAIT_S = 1.0
"""Interval at which the measurement checks whether to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measures tasks with executors of ``cluster``: in parallel on GPUs, one after the other on CPU slots, which share
    the cores.

    Attributes:
        show: Called with an event before an executor measures a task, with its progress, and once the task is measured;
            the first two are missing if the executor finds the measurement in its cache.
        is_interrupted: Called every second; once it returns true, measuring ends.
    """

    cluster: Cluster
    is_parallel: bool
    refresh: bool
    show: Callable[[MeasuringBegun | TaskMeasured], object]
    is_interrupted: Callable[[], bool]

    def estimates(self, tasks: Sequence[Task]) -> list[TaskEstimate]:
        """Return the estimate of each task; cached estimates are not measured again unless ``refresh`` is set.

        Raises:
            ProfileError: A task could not be measured; the message has the reason.
            KeyboardInterrupt: ``is_interrupted`` returned true.
        """
        known = {
            index: estimate
            for index, task in enumerate(tasks)
            if not self.refresh and (estimate := known_estimate(task, self.cluster, self._num_ranks(task))) is not None
        }
        missing = {str(index): task for index, task in enumerate(tasks) if index not in known}
        if missing:
            known |= self._measure(missing)
        return [known[index] for index in range(len(tasks))]

    def _measure(self, tasks: Mapping[str, Task]) -> dict[int, TaskEstimate]:
        relayed = deque[JournalEntry]()  # filled on the thread of the controller
        with (
            scratch_folder("alto-plan-") as folder,
            Journal(RunDir(folder).journal_file) as journal,
            running_controller(self.cluster, journal, _ONE_ATTEMPT, show=relayed.append) as controller,
        ):
            at_once = [list(tasks)] if self.cluster.has_gpus else [[index] for index in tasks]
            found: dict[int, TaskEstimate] = {}
            for group in at_once:
                for index in group:
                    controller.submit(self._run(index, tasks[index], folder / index))
                for index in group:
                    while not controller.wait(index, timeout_s=_WAIT_S):
                        self._relay(tasks, relayed)
                        self._check(controller, tasks)
                    self._relay(tasks, relayed)
                    self._check(controller, tasks)
                    found[int(index)] = self._estimate(tasks[index], folder / index)
            return found

    def _relay(self, tasks: Mapping[str, Task], relayed: deque[JournalEntry]) -> None:
        """Show the executors' progress reports, with the names of their tasks."""
        while relayed:
            match relayed.popleft().event:
                case TaskRelayed(task=index, entry=JournalEntry(event=MeasuringBegun() as begun)):
                    self.show(replace(begun, task=tasks[index].name))

    def _run(self, index: str, task: Task, folder: Path) -> TaskTicket:
        RunDir(folder).begin(task)
        return TaskTicket(
            task=index,
            run_dir=str(folder),
            host=PLAN_ANEW if self.refresh else PLAN,
            num_gpus=task.num_gpus,
            is_parallel=self.is_parallel,
            trust_remote_code=task.needs_trust,
            base=base_key(task),
        )

    def _check(self, controller: Controller, tasks: Mapping[str, Task]) -> None:
        """Raise ProfileError if a task could not be measured, which ends the measurement of all tasks."""
        for index, status in controller.status().tasks.items():
            if status.has_ended and (status.ended is None or status.ended.outcome is not Outcome.FINISHED):
                why = status.reason if status.ended is None else status.ended.reason
                raise ProfileError(f"task {tasks[index].name!r}: expected to measure its time and memory, found {why}")
        if self.is_interrupted():
            raise KeyboardInterrupt

    def _estimate(self, task: Task, folder: Path) -> TaskEstimate:
        """Return, cache and report the estimate of a measured task."""
        plan = TypeAdapter(TaskPlan).validate_json((folder / PLAN_FILE).read_bytes())
        estimate = estimate_of(plan, task)
        remember_estimate(task, self.cluster, self._num_ranks(task), estimate)
        self.show(TaskMeasured(task=task.name, duration_s=estimate.duration_s))
        return allowed_estimate(estimate, share_executor=task.share_executor)

    def _num_ranks(self, task: Task) -> int:
        return num_ranks_of(task, is_parallel=self.is_parallel)
