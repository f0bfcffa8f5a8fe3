"""Makes observers of transformers' trainer callbacks; to a callback, each job is a separate training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from alto.errors import UnsupportedError
from alto.runs import JournalEntry, Observer
from alto.runs.events import (
    CheckpointSaved,
    JobAdded,
    JobAdmitted,
    JobCompleted,
    JobDescription,
    JobEvaluated,
    JobExited,
    JobReopened,
    JobResumed,
    TaskRelayed,
    TaskResumed,
    TaskStarted,
    TrainSteps,
)

if TYPE_CHECKING:
    from transformers import TrainerCallback

SUPPORTED = ("on_train_begin", "on_log", "on_evaluate", "on_save", "on_train_end")
"""Callback methods that ALTO calls."""

_ORDERS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


def observers_of(observers: Sequence[Observer | TrainerCallback]) -> tuple[Observer, ...]:
    """Return ``observers`` with each transformers callback wrapped in a new :class:`CallbackObserver`.

    Raises:
        UnsupportedError: See :class:`CallbackObserver`.
    """
    return tuple(CallbackObserver(one) if _is_callback(one) else cast(Observer, one) for one in observers)


def _is_callback(observer: Observer | TrainerCallback) -> TypeGuard[TrainerCallback]:
    # Compare by name, because importing transformers' trainer is slow and most users have no callback.
    return any(
        kind.__name__ == "TrainerCallback" and kind.__module__.startswith("transformers.")
        for kind in type(observer).__mro__
    )


@dataclass(kw_only=True)
class _Job:
    """A job as a callback sees it: ``args``, ``state`` and ``control`` of a trainer.

    Attributes:
        steps_per_epoch: None if unknown.
        is_training: Whether it has started and not ended.
        saved_step: Its step in the last checkpoint.
    """

    args: SimpleNamespace
    state: Any
    control: Any
    steps_per_epoch: float | None
    is_training: bool = False
    saved_step: int = 0


class CallbackObserver:
    """Calls a ``TrainerCallback`` for every job: ``on_train_begin``, ``on_log`` for every step and evaluation,
    ``on_evaluate``, ``on_save`` for checkpoints, ``on_train_end``. ``on_save`` of the last checkpoint comes after it.

    ``args`` holds the job's configuration under the names of task files. ``state`` is a ``TrainerState`` whose
    ``trial_name`` is the job's id (``TASK/JOB`` when many tasks run). ``control`` is only read, because an observer
    runs in addition to the training. There is no model, optimizer or data.

    Args:
        callback: A callback that overrides only the methods named above.

    Raises:
        UnsupportedError: The callback overrides others, or later sets a flag of ``control``.
    """

    def __init__(self, callback: TrainerCallback) -> None:
        from transformers import TrainerCallback

        kind = type(callback)
        own = [name for name in dir(TrainerCallback) if getattr(kind, name) is not getattr(TrainerCallback, name)]
        others = [name for name in own if name.startswith("on_") and name not in SUPPORTED]
        if others:
            raise UnsupportedError(
                f"observers: expected a TrainerCallback with only {', '.join(SUPPORTED)}, because jobs train together, "
                f"not step by step in Python, found {', '.join(others)} of {kind.__name__}; write a function of "
                "journal entries (docs/python.md), an early-exit rule (docs/early-exit.md), or use report_to"
            )
        self.__qualname__ = kind.__qualname__
        self._callback: Any = callback
        self._jobs: dict[str, _Job] = {}
        self._num_train: dict[str, int] = {}

    def __call__(self, entry: JournalEntry) -> None:
        """Apply an entry of a run, or an entry that a queue relays from one of its tasks."""
        if isinstance(entry.event, TaskRelayed):
            self._apply(entry.event.entry, f"{entry.event.task}/")
        else:
            self._apply(entry, "")

    def _apply(self, entry: JournalEntry, prefix: str) -> None:
        match entry.event:
            case TaskStarted() as event:
                self._num_train[prefix] = event.num_train
                for description in event.jobs:
                    self._add(description, prefix)
            case JobAdded() as event:
                self._add(event.description, prefix)
            case TaskResumed() if not entry.is_replayed:
                for name, job in self._jobs.items():
                    if name.startswith(prefix) and job.is_training:
                        self._call("on_train_begin", job)
            case JobAdmitted(job=name) | JobResumed(job=name):
                self._begin(self._jobs[prefix + name], entry)
            case TrainSteps() as event:
                for offset, loss in enumerate(event.losses):
                    job = self._at(prefix + event.job, event.first_step + offset)
                    self._log(job, {"loss": loss}, entry)
            case JobEvaluated() as event:
                self._evaluated(self._at(prefix + event.job, event.step), event, entry)
            case CheckpointSaved(jobs=saved):
                for name, facts in saved.items():
                    self._saved(self._jobs[prefix + name], facts.step, entry)
            case JobExited(job=name) | JobCompleted(job=name):
                self._jobs[prefix + name].is_training = False
                self._show("on_train_end", self._jobs[prefix + name], entry)
            case JobReopened(job=name):
                self._begin(self._jobs[prefix + name], entry)

    def _add(self, description: JobDescription, prefix: str) -> None:
        from transformers import TrainerControl, TrainerState

        config, num_train = dict(description.config), self._num_train.get(prefix, 0)
        steps_per_epoch = None
        if num_train and description.samples_budgeted and description.total_steps:
            steps_per_epoch = description.total_steps * num_train / description.samples_budgeted
        state = TrainerState(
            max_steps=description.total_steps,
            num_train_epochs=config.get("num_train_epochs", 0),
            train_batch_size=config.get("per_device_train_batch_size"),
            logging_steps=1,
            trial_name=prefix + description.job,
            trial_params={key: value for key, value in config.items() if isinstance(value, str | float | int)},
        )
        self._jobs[prefix + description.job] = _Job(
            args=SimpleNamespace(**config), state=state, control=TrainerControl(), steps_per_epoch=steps_per_epoch
        )

    def _at(self, name: str, step: int) -> _Job:
        """Return the job with its state set to ``step``."""
        job = self._jobs[name]
        job.state.global_step = step
        if job.steps_per_epoch is not None:
            job.state.epoch = step / job.steps_per_epoch
        return job

    def _begin(self, job: _Job, entry: JournalEntry) -> None:
        if not job.is_training:
            job.is_training = True
            self._show("on_train_begin", job, entry)

    def _log(self, job: _Job, logs: Mapping[str, float], entry: JournalEntry) -> None:
        logs = {**logs, "epoch": job.state.epoch}
        job.state.log_history.append({**logs, "step": job.state.global_step})
        self._show("on_log", job, entry, logs=logs)

    def _evaluated(self, job: _Job, event: JobEvaluated, entry: JournalEntry) -> None:
        found = {"loss": event.validation_loss, **event.metrics}
        metrics = {f"eval_{name}": value for name, value in found.items()}
        if event.is_best:
            job.state.best_metric, job.state.best_global_step = event.validation_loss, event.step
        self._log(job, metrics, entry)
        self._show("on_evaluate", job, entry, metrics=metrics)

    def _saved(self, job: _Job, step: int, entry: JournalEntry) -> None:
        if step > job.saved_step:
            job.saved_step = step
            self._show("on_save", job, entry)

    def _show(self, method: str, job: _Job, entry: JournalEntry, **facts: Any) -> None:
        """Call a method of the callback unless the entry is replayed from before a resume."""
        if not entry.is_replayed:
            self._call(method, job, **facts)

    def _call(self, method: str, job: _Job, **facts: Any) -> None:
        returned = getattr(self._callback, method)(job.args, job.state, job.control, **facts)
        control = job.control if returned is None else returned
        orders = [name for name in _ORDERS if getattr(control, name, False)]
        if orders:
            raise UnsupportedError(
                f"{type(self._callback).__name__}.{method}: expected a callback that only reads, because it runs "
                f"beside the training, found that it sets control.{orders[0]} of {job.state.trial_name}; end jobs by "
                "early_exit, or with: alto job stop"
            )
