"""An early-exit policy: online rules that judge one job, and rungs that rank all jobs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from alto.early_exit import nonfinite, underperformance
from alto.errors import UnsupportedError
from alto.records import ExitDecision, LossPoint, Rung, RungResult, Standing
from alto.spec.early_exit import EarlyExit
from alto.spec.packages import naming_errors
from alto.spec.rules import RULES, Rule
from alto.spec.rungs import places_at

__all__ = ["Policy", "policy_from"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """An early-exit policy, which decides only from records: same records, same decisions, on every rank and in every
    replay.

    Without rules and rungs it still ends a job whose loss is not finite.

    Attributes:
        rules: Online rules in the order of their calls; the first verdict counts.
        rungs: Points of selection, progress rising.
        equal_shares: Whether jobs are ranked by values interpolated to exactly the rung's share of their steps, and
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
        verdict = nonfinite.judge_point(history[-1])
        if verdict is not None:
            return verdict
        verdicts = (_verdict(rule, history) for rule in self.rules)
        return next((verdict for verdict in verdicts if verdict is not None), None)

    def select(
        self,
        rung_index: int,
        standings: Collection[Standing],
        num_entered: int | None = None,
        *,
        configuration_of: Mapping[str, str] | None = None,
        failed: Collection[str] = (),
    ) -> RungResult:
        """Rank ``standings`` at rung number ``rung_index`` (from 0) and keep the best of them.

        Args:
            num_entered: Number of configurations that were ever ranked, including these; None means the number ranked
                here.
            configuration_of: Id of the configuration of every job that repeats one.
            failed: Ids of configurations of which a job has diverged or failed.
        """
        known = configuration_of or {}
        num_ranked = len({known.get(standing.job, standing.job) for standing in standings})
        return underperformance.select(
            self._places(rung_index, num_entered or num_ranked, num_ranked),
            standings,
            is_finish=self.rungs[rung_index].max_kept is not None,
            ends_clear_losers=self.rungs[rung_index].ends_clear_losers,
            configuration_of=known,
            failed=failed,
        )

    def ending_rungs(self, num_configurations: int) -> tuple[Rung, ...]:
        """Return the rungs that end a job if ``num_configurations`` jobs enter and nothing else ends one."""
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
    """Describe the part of ``evidence`` that a journal cannot hold; empty if there is none."""
    if not isinstance(evidence, Mapping):
        return type(evidence).__name__
    wrong = (
        f"{name!r}: {type(value).__name__}"
        for name, value in evidence.items()
        if not isinstance(name, str) or not isinstance(value, int | float)
    )
    return next(wrong, "")
