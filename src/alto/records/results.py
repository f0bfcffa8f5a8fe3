"""The result of a finished task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from alto.records.jobs import JobResult

__all__ = ["AdapterCheck", "FinalistScore", "TaskResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCheck:
    """Whether PEFT loads the best adapter as it was trained.

    Attributes:
        status: ``equal``; ``different``: PEFT gives other logits, or cannot load it; ``unchecked``.
        why: The reason of ``different`` or ``unchecked``.
        difference: Between PEFT's and ALTO's logits of a few tokens, relative, in norm; None where PEFT gave none.
        peft: Version of PEFT; None where it is not installed.
    """

    status: Literal["equal", "different", "unchecked"]
    why: str = ""
    difference: float | None = None
    peft: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalistScore:
    """Number of validation questions that a finalist answered right.

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
    """The result of one task: its best job, every job, and its run directory.

    Attributes:
        best_validation_loss: Of the adapter that was chosen.
        metric: The metric that it was selected by: ``loss``, or a metric of the task's method.
        best_metrics: Metrics of the method at its best evaluation.
        test_loss: Loss of that adapter on the test rows, which nothing was selected by; None where there are none.
        finalists: Scores of the finalists' answers with ``select_by: eval_accuracy``, best by the metric first; else
            empty.
        notes: Notices about how it was chosen, as sentences.
        adapter_check: Whether PEFT loads the best adapter as it was trained; None where the run has no such check.
        notices: Problems beside the result, such as a missing report, with their remedies, as sentences.
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
    test_loss: float | None = None
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
