"""The measurements of the three systems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from alto import EarlyExit, TaskResult
from alto.early_exit import Recording, ReplayResult, policy_from, replay
from alto.records import ExitReason
from alto.runs import read_entries
from benchmarks.baselines.job import BaselineJob
from benchmarks.dpo.judge import Worth

__all__ = ["Measured", "Tuned"]


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """One ``alto tune``, and the quality of its best adapter by PEFT.

    Attributes:
        duration_s: Seconds from the call to the exported adapter and report: loading, tokenising, evaluating the base,
            training, evaluating, checkpoints.
        validation: Quality on the validation pairs, which chose the adapter.
        heldout: Quality on pairs that were used neither for training nor for the choice.
    """

    result: TaskResult
    duration_s: float
    validation: Worth
    heldout: Worth

    @property
    def reported_accuracy(self) -> float:
        """Reward accuracy of the exported adapter on the validation pairs, as ALTO reports it."""
        return self.result.best_metrics["reward_accuracy"]

    @property
    def saved_by(self) -> Mapping[ExitReason, float]:
        """Share of the budgeted samples that were not trained, by the reason of the exit."""
        saved: dict[ExitReason, float] = {}
        for job in self.result.job_results:
            if job.exit_reason is not None:
                share = (job.samples_budgeted - job.samples_trained) / self.result.samples_budgeted
                saved[job.exit_reason] = saved.get(job.exit_reason, 0.0) + share
        return saved


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All measurements.

    Attributes:
        sequential: TRL's jobs by job id, for the first seed.
        sequential_s: Seconds of loading and tokenising once, and of all of TRL's jobs.
        batched, early_exit: ALTO's runs by seed: with every job trained to its end, and with the default policy.
        num_train, num_validation, num_heldout: Numbers of pairs.
    """

    sequential: Mapping[str, BaselineJob]
    sequential_s: float
    batched: Mapping[int, Tuned]
    early_exit: Mapping[int, Tuned]
    num_train: int
    num_validation: int
    num_heldout: int

    @property
    def first_seed(self) -> int:
        """The seed with which all three systems trained the jobs."""
        return next(iter(self.batched))

    @cached_property
    def recording(self) -> Recording:
        """The curves of ``batched`` for the first seed."""
        run_dir = Path(self.batched[self.first_seed].result.run_dir)
        return Recording.from_journal(read_entries(run_dir / "journal.jsonl"))

    def replayed(self, settings: EarlyExit) -> ReplayResult:
        """Return the result of replaying a policy on that recording."""
        return replay(self.recording, policy_from(settings), settings.ema_alpha)
