"""An early-exit policy: online rules that judge one job, and rungs that rank all jobs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from alto.base import naming_errors
from alto.early_exit import patterns
from alto.early_exit.noise import Repeated, ranked_configurations
from alto.errors import UnsupportedError
from alto.records import Candidate, ExitDecision, ExitReason, LossPoint, Rung, RungResult
from alto.spec import RULES, EarlyExit, Rule, places_at

CLEAR_ERRORS, CLEAR_FRACTION = 3.0, 0.05
"""A configuration is clearly worse if it trails the best one by more than this many standard errors and by more than
this fraction of the best one's improvement."""


def select(
    places: int,
    candidates: Collection[Candidate],
    *,
    is_finish: bool = False,
    ends_clear_losers: bool = False,
    configuration_of: Mapping[str, str] | None = None,
    failed: Collection[str] = (),
) -> RungResult:
    """Keep the best ``places`` configurations of ``candidates``, independent of their order; at least one.

    With ``is_finish``, a configuration whose jobs are no longer training does not use up a slot of the selection: the
    best configuration that is still training also continues. With ``ends_clear_losers``, configurations that are
    clearly worse than the best one do not continue: they trail it by more than three standard errors of the difference
    on the rows that both were evaluated on, and by more than a twentieth of the improvement of the best one over its
    loss before the first step. Source: replay on the recorded sweeps.

    Configurations are ordered by :func:`alto.early_exit.noise.ranked_configurations`: by the score of the task's
    metric, and within noise by the validation loss. A job that repeats no other job is a separate configuration. Ties
    are ordered by id. A loss that is not finite ranks last and is never kept, even if places stay empty. Either all
    jobs of a configuration are kept, or none. A job that is no longer training may use up a place but gets no verdict.

    The evidence of a verdict is the ``rank`` of its job's configuration (1 is best), ``num_competing``, ``num_kept``,
    its ``validation_loss`` and, unless nothing was kept, ``cutoff_loss``: the loss of the last configuration kept. If
    scores differ, it also has ``score`` and ``cutoff_score``; if a configuration is repeated, ``mean_loss``.

    Args:
        configuration_of, failed: See ``ranked_configurations``.
    """
    ranked = ranked_configurations(candidates, configuration_of or {}, failed)
    finite = [group for group in ranked if math.isfinite(group.mean.validation_loss)]
    kept = finite[: max(1, places)]
    if ends_clear_losers:
        kept = [group for group in kept if group is kept[0] or not _is_clearly_behind(group, kept[0])]
    if is_finish and not any(group.mean.is_training for group in kept):
        kept += [group for group in finite if group.mean.is_training][:1]
    has_scores = len({group.mean.score for group in ranked}) > 1
    shared = {"num_competing": float(len(ranked)), "num_kept": float(len(kept))}
    if kept:
        shared["cutoff_loss"] = kept[-1].mean.validation_loss
        if has_scores:
            shared["cutoff_score"] = kept[-1].mean.score
    kept_jobs = {member.job for group in kept for member in group.members}
    dropped = tuple(
        ExitDecision(
            job=candidate.job,
            step=candidate.step,
            reason=ExitReason.UNDERPERFORMING,
            evidence={
                "rank": float(rank),
                "validation_loss": candidate.validation_loss,
                **({"score": candidate.score} if has_scores else {}),
                **({"mean_loss": group.mean.validation_loss} if len(group.members) > 1 else {}),
                **shared,
            },
        )
        for rank, group in enumerate(ranked, start=1)
        for candidate in group.members
        if candidate.is_training and candidate.job not in kept_jobs
    )
    return RungResult(kept=tuple(member.job for group in kept for member in group.members), dropped=dropped)


def _is_clearly_behind(one: Repeated[Candidate], first: Repeated[Candidate]) -> bool:
    """Return whether a configuration is clearly worse than the best one; False if unknown, or if one of the two is
    repeated."""
    if len(one.members) > 1 or len(first.members) > 1 or first.mean.start_loss is None:
        return False
    differences = [a - b for a, b in zip(one.mean.loss_rows, first.mean.loss_rows, strict=False)]
    if len(differences) < 2 or not all(map(math.isfinite, differences)):
        return False
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    behind = one.mean.validation_loss - first.mean.validation_loss
    gained = first.mean.start_loss - first.mean.validation_loss
    return behind > CLEAR_ERRORS * error and behind > CLEAR_FRACTION * gained > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """An early-exit policy. It decides only from records, so the same records lead to the same decisions on every rank
    and in every replay.

    Even without rules and rungs, it stops a job whose loss is not finite.

    Attributes:
        rules: Online rules in the order of their calls; the first verdict counts.
        rungs: Points of selection, in the order of progress.
        equal_shares: Whether jobs are ranked by values interpolated to exactly the rung's fraction of their steps, and
            places are counted over all rungs. Otherwise jobs are ranked by the first evaluation at or after the rung,
            and places are counted among those ranked there.
    """

    rules: tuple[Rule, ...] = ()
    rungs: tuple[Rung, ...] = ()
    equal_shares: bool = True

    def judge(self, history: Sequence[LossPoint]) -> ExitDecision | None:
        """Return the verdict on one job at the last point of ``history`` (oldest first); None if it continues.

        Raises:
            UnsupportedError: A package's rule raises an error, or returns something that is not a verdict on that job
                and step, with the rule's reason and with numbers as evidence.
        """
        if not history:
            return None
        verdict = patterns.judge_point(history[-1])
        if verdict is not None:
            return verdict
        verdicts = (_verdict(rule, history) for rule in self.rules)
        return next((verdict for verdict in verdicts if verdict is not None), None)

    def select(
        self,
        rung_index: int,
        candidates: Collection[Candidate],
        num_entered: int | None = None,
        *,
        configuration_of: Mapping[str, str] | None = None,
        failed: Collection[str] = (),
    ) -> RungResult:
        """Rank ``candidates`` at rung number ``rung_index`` (from 0) and keep the best of them.

        Args:
            num_entered: Number of configurations that were ever ranked, including these; None means the number ranked
                here.
        """
        known = configuration_of or {}
        num_ranked = len({known.get(candidate.job, candidate.job) for candidate in candidates})
        return select(
            self._places(rung_index, num_entered or num_ranked, num_ranked),
            candidates,
            is_finish=self.rungs[rung_index].max_kept is not None,
            ends_clear_losers=self.rungs[rung_index].ends_clear_losers,
            configuration_of=known,
            failed=failed,
        )

    def ending_rungs(self, num_configurations: int) -> tuple[Rung, ...]:
        """Return the rungs that stop a job if ``num_configurations`` jobs enter and nothing else stops one."""
        found, num_left = [], num_configurations
        for index, rung in enumerate(self.rungs):
            places = self._places(index, num_configurations, num_left)
            if places < num_left:
                found.append(rung)
                num_left = places
        return tuple(found)

    def _places(self, rung_index: int, num_entered: int, num_ranked: int) -> int:
        if self.equal_shares:
            return places_at(self.rungs, rung_index, num_entered)
        return places_at((self.rungs[rung_index],), 0, num_ranked)


def policy_from(settings: EarlyExit) -> Policy:
    """Return the policy of ``settings``; divergence is tested before overfitting, as in Algorithm 1."""
    if not settings.enabled:
        return Policy()
    return Policy(
        rules=settings.active_rules,
        rungs=settings.selection_rungs if settings.select else (),
        equal_shares=settings.compares_equal_shares,
    )


def _verdict(rule: Rule, history: Sequence[LossPoint]) -> ExitDecision | None:
    name, last = f"{type(rule).__name__}.judge", history[-1]
    with naming_errors(f"{name} of {last.job} at step {last.step}", type(rule).__module__, page=RULES.page):
        verdict = rule.judge(history)
    if verdict is None:
        return None
    if not isinstance(verdict, ExitDecision):
        raise UnsupportedError(
            f"{name}: expected None or an alto.early_exit.ExitDecision, found {type(verdict).__name__}; correct the "
            "rule"
        )
    if (verdict.job, verdict.step, verdict.reason) != (last.job, last.step, rule.reason):
        raise UnsupportedError(
            f"{name}: expected a verdict on {last.job} at step {last.step} with reason {rule.reason!r}, found a "
            f"verdict on {verdict.job} at step {verdict.step} with {verdict.reason!r}; correct the rule"
        )
    wrong = _no_number_in(verdict.evidence)
    if wrong:
        raise UnsupportedError(
            f"{name}: expected evidence that maps names to numbers (int or float), found {wrong}; correct the rule"
        )
    return verdict


def _no_number_in(evidence: object) -> str:
    """Describe the part of ``evidence`` that a journal cannot store; empty if there is none."""
    if not isinstance(evidence, Mapping):
        return type(evidence).__name__
    wrong = (
        f"{name!r}: {type(value).__name__}"
        for name, value in evidence.items()
        if not isinstance(name, str) or not isinstance(value, int | float)
    )
    return next(wrong, "")
