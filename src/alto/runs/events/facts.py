"""The bases of events, and their parts: the elements of their lists and objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from alto.records import Demand, ShownAnswer

IF_ABSENT = "if_absent"
ALWAYS = "always"
ALIASES = "aliases"
KEY_ALIASES = "key_aliases"
VALUE_ALIASES = "value_aliases"
DAMAGED_IS_NONE = "damaged_is_none"

_UNSET = object()


def wire(
    *,
    if_absent: Any = _UNSET,
    always: bool = False,
    aliases: tuple[str, ...] = (),
    key_aliases: Mapping[str, str] | None = None,
    value_aliases: Mapping[str, str] | None = None,
    damaged_is_none: bool = False,
) -> dict[str, Any]:
    """Return the metadata of a dataclass field.

    Args:
        if_absent: JSON value used for a journal without the field. A field with neither this nor a default is required.
        always: Whether to write the field even if it has its default, which is otherwise left out.
        aliases: Names of the field in earlier versions.
        key_aliases: For a mapping: earlier names of its keys, each with the current one.
        value_aliases: For a text: earlier spellings, each with the current one.
        damaged_is_none: Whether a value of another type is read as None, not refused.
    """
    metadata = {
        ALWAYS: always,
        ALIASES: aliases,
        KEY_ALIASES: dict(key_aliases or {}),
        VALUE_ALIASES: dict(value_aliases or {}),
        DAMAGED_IS_NONE: damaged_is_none,
    }
    return metadata if if_absent is _UNSET else metadata | {IF_ABSENT: if_absent}


class RunEvent:
    """An event of a run."""

    __slots__ = ()


class QueueEvent:
    """An event of a queue."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDescription:
    """A planned job.

    Attributes:
        job: Job id.
        config: Its resolved configuration, canonical keys.
        total_steps: Optimizer steps of the job if nothing ends it early.
        samples_budgeted: Rows that the job sees if nothing ends it early, counting repeats over epochs.
        num_parameters: Trainable parameters of its adapter; None if the journal does not have it.
        configuration: Id of the first job with the same configuration, if several jobs train it with different seeds;
            None otherwise.
    """

    job: str
    config: Mapping[str, Any] = field(metadata=wire(if_absent={}))
    total_steps: int = field(metadata=wire(if_absent=0))
    samples_budgeted: int = field(metadata=wire(if_absent=0))
    num_parameters: int | None = field(default=None)
    configuration: str | None = field(default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseDescription:
    """The identity of the base model of a run, and the precision of base and adapters.

    Attributes:
        weights: Digest of the names, types, shapes and sampled numbers of all tensors.
        config: Digest of ``config.json``.
        code: Digest of the Python files beside it; None if none of them is run.
        commit: Commit on the hub; None if the model is not from the hub.
        files: For each file of weights, its size in bytes and its modification time in nanoseconds since 1970.
        dtype: Type of the base model's weights.
        load_in_4bit: Whether the base model's weights are quantised to 4 bits.
        load_in_8bit: Whether the base model's weights are quantised to 8 bits.
        adapter_dtype: Type of the adapters' weights.
        optim_state_dtype: Type of the moments of ``adamw_torch``; None: the type of the adapters, rounded to the
            nearest.
    """

    weights: str
    config: str
    code: str | None
    commit: str | None
    files: Mapping[str, tuple[int, int]]
    dtype: str
    load_in_4bit: bool
    load_in_8bit: bool
    adapter_dtype: str
    optim_state_dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceFact:
    """The origin of the reference log-probs of the pairs.

    Attributes:
        is_cached: Whether they are from an earlier run.
        duration_s: Duration of their computation, in seconds.
    """

    is_cached: bool
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitFact:
    """The winner of a finished run, which is trained again on all rows.

    Attributes:
        run: Folder of the finished run.
        job: Its best job.
        steps: Steps to train: the step of that job's best checkpoint.
    """

    run: str
    job: str
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFact:
    """The saved adapter with which every job begins.

    Attributes:
        path: Its folder.
        fingerprint: Digest of its ``adapter_config.json`` and its tensors.
    """

    path: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMeasurement:
    """The evaluation of the starting point of jobs: the frozen base, or ``init_adapter`` on it. One for all jobs with
    the same loss.

    Attributes:
        jobs: Job ids.
        validation_loss: Nats per trained token; for pairs, in the unit of their loss.
        metrics: Metrics of the method other than the loss, by name.
        metric_rows: The task's metric on every validation row, in order; empty if the metric is the loss.
        loss_rows: Loss of every validation row, four significant digits.
        test_loss: Loss on the test rows; None if there are none.
        test_rows: Loss of every test row, four significant digits; empty if ``test_loss`` is None.
        test_metrics: Metrics of the method on the test rows, by name; empty if ``test_loss`` is None.
        answers: Answers to the first three validation rows, if the jobs learn from rewards; else empty.
    """

    jobs: tuple[str, ...]
    validation_loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    metric_rows: tuple[float, ...] = ()
    loss_rows: tuple[float, ...] = ()
    test_loss: float | None = None
    test_rows: tuple[float, ...] = ()
    test_metrics: Mapping[str, float] = field(default_factory=dict)
    answers: tuple[ShownAnswer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedJob:
    """A job's part of a checkpoint.

    Attributes:
        step: Steps done.
        slot: Its slot, numbered over all ranks; None if it has none.
        best_step: Step of its best evaluation, whose adapter is saved; 0 if there is none.
        is_resumable: Whether its state after ``step`` is saved; false for a job that has ended and cannot be resumed.
    """

    step: int
    slot: int | None = field(metadata=wire(if_absent=None))
    best_step: int = field(metadata=wire(if_absent=0))
    is_resumable: bool = field(default=True, metadata=wire(if_absent=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedJob:
    """A job whose score is within noise of the winner's, given the number of validation rows.

    Attributes:
        job: Job id.
        score: Value of the task's metric at its best evaluation; higher is better.
        validation_loss: The loss at this evaluation, in nats per token.
    """

    job: str
    score: float = field(metadata=wire(aliases=("gain",)))
    validation_loss: float = field(metadata=wire(if_absent=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedTask(Demand):
    """One task of a queue.

    Attributes:
        is_unmeasured: Whether it still has to be measured; ``duration_s`` is a guess until then.
    """

    ALWAYS_WRITTEN: ClassVar[tuple[str, ...]] = ("priority", "tenant")
    """Inherited fields that are written even if they have their defaults."""

    is_unmeasured: bool = False
