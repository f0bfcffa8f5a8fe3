"""The result of a finished task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from alto.records.jobs import ExitReason, JobResult

__all__ = ["AdapterCheck", "FinalistScore", "Judgement", "Lead", "Sample", "Samples", "TaskOutcome"]


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
    """The score of one job's answers to validation rows.

    Attributes:
        job: Job id.
        num_questions: Rows that were scored.
        num_correct: Of a scorer that finds an answer right or wrong: how many were right; None of others.
        mean: Mean of ``rows``; None in journals of version 0.1, which have ``num_correct`` alone.
        interval: 95 % interval of the mean over such rows; None where it cannot be estimated from them.
        rows: Score of every row, in the order of the rows, six significant digits.
    """

    job: str
    num_questions: int
    num_correct: int | None = None
    mean: float | None = None
    interval: tuple[float, float] | None = None
    rows: tuple[float, ...] = ()

    @property
    def score(self) -> float:
        """The mean over all rows; higher is better."""
        return self.exact_match if self.mean is None else self.mean

    @property
    def exact_match(self) -> float:
        """Share of right answers, in [0, 1]; NaN of a scorer that does not count them."""
        return math.nan if self.num_correct is None else self.num_correct / self.num_questions

    def summary(self) -> dict[str, Any]:
        """The score as JSON values, without the scores of single rows."""
        return {
            "job": self.job,
            "score": self.score,
            "interval": None if self.interval is None else list(self.interval),
            "num_correct": self.num_correct,
            "num_questions": self.num_questions,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a scorer found.

    Attributes:
        scorer: Its name.
        rows: By job, the score of every row, six significant digits; empty where it failed.
        failure: Why it failed; empty where it did not.
    """

    scorer: str
    rows: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The prompt of one validation row, continued greedily by the base and by the best adapters.

    Attributes:
        prompt: The text as the models saw it.
        reference: The row's own reply; of a pair the chosen one.
        base: What the base model without an adapter generates.
        adapters: What the best adapter of each job generates, by job id, the winner first.
    """

    prompt: str
    reference: str
    base: str
    adapters: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Samples of a task.

    Attributes:
        rows: One for each prompt; empty where the generation failed.
        failure: Why it failed; empty where it did not.
    """

    rows: tuple[Sample, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """How far the winner leads the next best job, compared row by row on the validation rows.

    Attributes:
        runner_up: Id of the next best job.
        metric: What is compared: ``loss``, a metric of the method, or the name of a scorer.
        difference: Mean over the rows of what the winner is better by; above 0 where it leads.
        interval: Its 95 % interval over such rows.
        num_rows: Validation rows.
    """

    runner_up: str
    metric: str
    difference: float
    interval: tuple[float, float]
    num_rows: int

    @property
    def is_within_noise(self) -> bool:
        """Whether so many rows cannot tell the two apart."""
        return self.interval[0] <= 0 <= self.interval[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    """How one task ended: its best job, every job, and its run directory.

    Attributes:
        best_validation_loss: Of the adapter that was chosen; infinity of a refit, which has no validation.
        metric: The metric that it was selected by: ``loss``, or a metric of the task's method.
        best_metrics: Metrics of the method at its best evaluation.
        test_loss: Loss of that adapter on the test rows, which nothing was selected by; None where there are none.
        test_metrics: Metrics of the method on the test rows; empty where there are none.
        finalists: Scores of the finalists' answers where ``select_by`` is not ``metric``, best by the metric first;
            empty where it is, or where the scorer failed.
        scorer: What scored them, or failed to: the name of a scorer, or ``eval_accuracy``; empty where nothing did.
        scorer_failure: Why the scorer failed, so that the metric chose; empty where it did not.
        time_s: Seconds spent on ``training``, ``evaluation``, ``saving`` and ``measuring``; without those that the
            journal does not have. The rest of ``duration_s`` is loading, waiting and writing.
        training_all_s: Seconds that training every job to its end would take at the pace of this run, without
            evaluations; None where that is not known.
        lead: How far it leads the next best job; None where there is none, or the values of single rows are not known.
        adapter_check: Whether PEFT loads the best adapter as it was trained; None where the run has no such check.
        refit_of: Of a refit, the run whose winner was trained again on all rows, without validation; else empty.
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
    test_metrics: Mapping[str, float] = field(default_factory=dict)
    finalists: tuple[FinalistScore, ...] = ()
    scorer: str = ""
    scorer_failure: str = ""
    time_s: Mapping[str, float] = field(default_factory=dict)
    training_all_s: float | None = None
    lead: Lead | None = None
    adapter_check: AdapterCheck | None = None
    refit_of: str = ""
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
        return 1.0 - self.samples_trained / self.samples_budgeted - self.samples_cut_off

    @property
    def samples_cut_off(self) -> float:
        """Share of the budgeted samples that were not trained because ``search.budget`` ended their jobs."""
        cut_off = (job for job in self.jobs if job.exit_reason == ExitReason.BUDGET)
        return sum(job.samples_budgeted - job.samples_trained for job in cut_off) / self.samples_budgeted
