"""A task that trains the winner of a finished run again, on all rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, Self

from pydantic import Field

from alto.errors import SpecError, UnsupportedError
from alto.spec.early_exit import EarlyExit
from alto.spec.mixture import MixtureSource
from alto.spec.quoting import quoted
from alto.spec.validation import SpecModel

__all__ = ["Refit", "check_refit"]


class Refit(SpecModel):
    """The job that is trained again, and for how long. ``alto refit`` writes it.

    Attributes:
        run: Folder of the finished run.
        job: Best job of that run; the task has its configuration.
        steps: Number of steps to train: the steps of that job's best checkpoint. The learning-rate schedule still has
            the length ``max_steps``, as if training went on to its end.
    """

    run: str = Field(min_length=1, description="folder of the finished run")
    job: str = Field(min_length=1, description="its best job")
    steps: int = Field(ge=1, le=10**9, description="number of steps to train")

    @classmethod
    def parse(cls, value: Mapping[Any, Any]) -> Self:
        """Parse ``refit`` of a task.

        Raises:
            SpecError: A key is not text or is unknown, or a value is out of bounds.
        """
        if not all(isinstance(key, str) for key in value):
            raise SpecError(f"refit should have text for keys, found {quoted(list(value))}. Put the keys in quotes.")
        return cls(**value)


class _Task(Protocol):
    """The keys of :class:`alto.spec.Task` that :func:`check_refit` reads."""

    @property
    def refit(self) -> Refit | None: ...

    @property
    def early_exit(self) -> EarlyExit: ...

    @property
    def select_by(self) -> object: ...

    @property
    def sources(self) -> tuple[MixtureSource, ...]: ...

    @property
    def validation_dataset(self) -> str | None: ...


def check_refit(task: _Task, max_steps: list[int | None]) -> None:
    """Check that a refit, which has no validation, has one job and no setting that needs validation.

    Args:
        task: The task; one without ``refit`` passes.
        max_steps: ``max_steps`` of each of its jobs.

    Raises:
        SpecError: The task has several jobs, too small a ``max_steps``, or settings that need a validation loss.
        UnsupportedError: The task is a mixture with a ``validation_dataset``, whose rows belong to no source.
    """
    refit = task.refit
    if refit is None:
        return
    if task.sources and task.validation_dataset is not None:
        raise UnsupportedError(
            "refit: expected validation rows that belong to the sources of the mixture, found validation_dataset: its "
            "rows belong to no source, so that no weight says how often they are drawn. Make them a source, or tune "
            "without validation_dataset."
        )
    longest = max_steps[0] if len(max_steps) == 1 else None
    if longest is None or longest < refit.steps or task.early_exit.enabled or task.select_by != "metric":
        raise SpecError(
            f"refit should come with one configuration, max_steps of at least {refit.steps}, early_exit: false and "
            f"select_by: metric, as there is no validation, found {len(max_steps)} configurations, max_steps: "
            f"{longest}, early_exit: {str(task.early_exit.enabled).lower()}, select_by: {task.select_by!s:.40}. Write "
            "such a task with: alto refit RUN"
        )
