"""Parts of events: the elements of their lists and objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from alto.runs.events.fields import wire

__all__ = [
    "BaseDescription",
    "JobDescription",
    "QueuedTask",
    "ReferenceFact",
    "RefitFact",
    "SavedJob",
    "StartFact",
    "StartMeasurement",
    "TiedJob",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDescription:
    """A planned job.

    Attributes:
        job: Job id.
        config: Its resolved configuration, canonical keys.
        total_steps: Optimizer steps of the job if nothing ends it early.
        samples_budgeted: Rows that it sees if nothing ends it early, counting repeats over epochs.
        num_parameters: Trainable parameters of its adapter; None where the journal does not have it.
        configuration: Where jobs repeat a configuration with other seeds, the id of the first of those that repeat this
            one; None of a job that repeats none.
    """

    job: str
    config: Mapping[str, Any] = field(metadata=wire(if_absent={}))
    total_steps: int = field(metadata=wire(if_absent=0))
    samples_budgeted: int = field(metadata=wire(if_absent=0))
    num_parameters: int | None = field(default=None)
    configuration: str | None = field(default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseDescription:
    """What identifies the base model of a run, and the precision of base and adapters.

    Attributes:
        weights: Digest of every tensor's name, type, shape and sampled numbers.
        config: Digest of ``config.json``.
        code: Digest of the Python files beside it; None where none of them is run.
        commit: The hub's; None where the model is not of the hub.
        files: Of each file of weights its size in bytes and when it was written, in nanoseconds since 1970.
        dtype: Of the base model's weights.
        load_in_4bit: Whether they are quantised to 4 bits.
        load_in_8bit: Whether they are quantised to 8 bits.
        adapter_dtype: Of the adapters' weights.
        optim_state_dtype: Of the moments of ``adamw_torch``; None is that of the adapters, rounded to the nearest.
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
    """How the reference log-probs of the pairs were found.

    Attributes:
        is_cached: They are from an earlier run.
        duration_s: Duration of their computation, in seconds.
    """

    is_cached: bool
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitFact:
    """The winner of a finished run that is trained again on all rows.

    Attributes:
        run: Folder of the finished run.
        job: Its best job.
        steps: Steps that are trained: those of that job's best checkpoint.
    """

    run: str
    job: str
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFact:
    """The saved adapter that every job begins with.

    Attributes:
        path: Its folder.
        fingerprint: Digest of its ``adapter_config.json`` and its tensors.
    """

    path: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMeasurement:
    """The evaluation of what jobs begin with, the frozen base or ``init_adapter`` on it, for all with the same loss.

    Attributes:
        jobs: Job ids.
        validation_loss: Nats per trained token; for pairs, in the unit of their loss.
        metrics: Metrics of the method beside the loss, by name.
        metric_rows: The task's metric on every validation row, in their order; empty where that is the loss.
        loss_rows: Loss of every validation row, four significant digits.
        test_loss: Loss on the test rows; None where there are none.
        test_rows: Loss of every test row, four significant digits; empty where ``test_loss`` is None.
        test_metrics: Metrics of the method on the test rows, by name; empty where ``test_loss`` is None.
    """

    jobs: tuple[str, ...]
    validation_loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    metric_rows: tuple[float, ...] = ()
    loss_rows: tuple[float, ...] = ()
    test_loss: float | None = None
    test_rows: tuple[float, ...] = ()
    test_metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedJob:
    """A job's part of a checkpoint.

    Attributes:
        step: Steps done.
        slot: Slot that it is in, counted through the ranks; None where it is in none.
        best_step: Step of its best evaluation whose adapter is saved; 0 where there is none.
        is_resumable: Whether its state after ``step`` is saved; not of a job that has ended and cannot be resumed.
    """

    step: int
    slot: int | None = field(metadata=wire(if_absent=None))
    best_step: int = field(metadata=wire(if_absent=0))
    is_resumable: bool = field(default=True, metadata=wire(if_absent=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedJob:
    """A job whose score is within noise of the winner's on so many validation rows.

    Attributes:
        job: Job id.
        score: Value of the task's metric at its best evaluation; higher is better.
        validation_loss: The loss there, in nats per token.
    """

    job: str
    score: float = field(metadata=wire(aliases=("gain",)))
    validation_loss: float = field(metadata=wire(if_absent=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedTask:
    """One task of a queue.

    Attributes:
        task: Its name in the queue, unique there.
        num_gpus: GPUs that it runs on.
        duration_s: Estimated seconds, early exit included.
        priority: Higher goes first.
        tenant: Whose task it is; empty where no tenant was named.
        is_unmeasured: It is measured next: ``duration_s`` is a guess until then.
    """

    task: str
    num_gpus: int
    duration_s: float
    priority: int = field(metadata=wire(if_absent=0))
    tenant: str = field(metadata=wire(if_absent=""))
    is_unmeasured: bool = False
