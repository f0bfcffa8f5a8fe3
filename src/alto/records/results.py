"""What a finished task gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from alto.records.jobs import JobResult

__all__ = ["AdapterCheck", "FinalistScore", "TaskResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCheck:
    """Whether PEFT makes of the best adapter what was trained.

    Attributes:
        status: ``equal``; ``different``: PEFT gives other logits, or cannot load it; ``unchecked``.
        why: Of ``different`` and ``unchecked``, the reason.
        difference: Between PEFT's and ALTO's logits of a few tokens, relative, in norm; None where PEFT gave none.
        peft: Its version; None where it is not there.
    """

    status: Literal["equal", "different", "unchecked"]
    why: str = ""
    difference: float | None = None
    peft: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalistScore:
    """How many of the validation questions a finalist answered right.

    Attributes:
        job: Job id.
        num_correct: Questions whose answer was right.
        num_questions: Questions that were asked.
    """

    job: str
    num_correct: int
    num_questions: int

    @property
    def exact_match(self) -> float:
        """Their share, in [0, 1]."""
        return self.num_correct / self.num_questions


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """How one task ended: its best job, every job, and where the run lies on disk.

    Attributes:
        best_validation_loss: Of the adapter that was chosen.
        metric: What it was chosen by: ``loss``, or something the task's method measures.
        best_metrics: What the method measured of it beside the loss.
        finalists: How those answered among whom ``select_by: eval_accuracy`` chose, best by the metric first; empty
            where it did not.
        notes: What a user should know of how it was chosen, in sentences.
        adapter_check: Whether PEFT loads the best adapter as it was trained; None of a run that knows nothing of it.
        notices: What did not come out as it should beside the result, and what to do about it, in sentences: that there
            is no report.
    """

    task: str
    run_dir: str
    adapter_dir: str
    best_job: str
    best_validation_loss: float
    jobs: tuple[JobResult, ...]
    duration_s: float
    metric: str = "loss"
    best_metrics: Mapping[str, float] = field(default_factory=dict)
    finalists: tuple[FinalistScore, ...] = ()
    notes: tuple[str, ...] = ()
    adapter_check: AdapterCheck | None = None
    notices: tuple[str, ...] = ()

    @property
    def samples_trained(self) -> int:
        return sum(job.samples_trained for job in self.jobs)

    @property
    def samples_budgeted(self) -> int:
        return sum(job.samples_budgeted for job in self.jobs)

    @property
    def samples_saved(self) -> float:
        """Share of the budgeted samples that early exit did not train."""
        return 1.0 - self.samples_trained / self.samples_budgeted
