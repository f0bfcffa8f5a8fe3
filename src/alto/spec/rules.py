"""Early-exit rules in task files: the base class of a rule, and the settings of ALTO's own rules."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from alto.base import Registry
from alto.errors import SpecError
from alto.records import ExitDecision, ExitReason, LossPoint
from alto.spec.keys import canonical_keys
from alto.spec.validation import SpecModel, check_defaults, plain

_MAX_EVALUATIONS = 10**6
_REASON = re.compile(r"[a-z][a-z0-9_ -]{0,39}")
_RESERVED = (ExitReason.UNDERPERFORMING, ExitReason.STOPPED, ExitReason.FAILED, ExitReason.BUDGET)
"""Reasons that a rule may not use: those of rungs, users, faults and budgets."""


class Rule(SpecModel):
    """A rule that judges one job by its own evaluations; its fields are its settings.

    A rule is pure: the same history and settings give the same verdict on every rank, whether live, resumed or
    replayed. Your own rule subclasses this class, declares its settings as pydantic fields with bounds, a default and a
    description, and is registered by name under ``alto.early_exit_rules``. ``docs/early-exit.md`` has an example.

    Raises:
        SpecError: A value is out of its domain.
        UnknownKeyError: A key is not a setting of the rule.
    """

    reason: ClassVar[str]
    """Why a job ended: one or two lower-case words, shown in the journal, tables and report. The job's best adapter is
    kept; it still competes unless the reason is ``diverging``."""

    def __init__(self, /, **settings: Any) -> None:
        given = canonical_keys(settings, fields=type(self).model_fields, aliases={}, where=type(self).__name__)
        super().__init__(**{key: plain(value) for key, value in given.items() if value is not None})

    @abstractmethod
    def judge(self, history: Sequence[LossPoint]) -> ExitDecision | None:
        """Return the verdict for the last point of ``history``, or None to continue.

        Args:
            history: Evaluations of one job, oldest first; all losses are finite.
        """


class DivergenceSettings(SpecModel):
    """Settings of the divergence test."""

    window: int = Field(
        default=2, ge=2, le=_MAX_EVALUATIONS, description="number of evaluations over which a slope is fitted"
    )
    divergence_patience: int = Field(
        default=2, ge=1, le=_MAX_EVALUATIONS, description="number of evaluations in a row that must look diverging"
    )
    tau_slope: float = Field(default=0.001, gt=0, description="slope from which a loss counts as rising")


class OverfittingSettings(SpecModel):
    """Common settings of the overfitting rules."""

    overfitting_patience: int = Field(
        default=2, ge=1, le=_MAX_EVALUATIONS, description="number of evaluations in a row that must look overfit"
    )


class GapSettings(OverfittingSettings):
    """Settings of the paper's overfitting test."""

    tau_gap: float = Field(default=0.1, gt=0, description="relative gap between validation and training loss")


class UpturnSettings(OverfittingSettings):
    """Settings of ALTO's overfitting test."""

    tau_upturn: float = Field(
        default=0.001, ge=0, description="relative rise of the validation loss over its best value"
    )
    tau_noise: float = Field(default=3.0, ge=0, description="the same rise in standard deviations of the loss's noise")


class CollapseSettings(SpecModel):
    """Settings of the test for jobs that learn from rewards and have stopped learning."""

    collapse_patience: int = Field(
        default=20, ge=2, le=_MAX_EVALUATIONS, description="number of steps in a row that must look collapsed"
    )


def _rule(found: object) -> type[Rule]:
    if not isinstance(found, type) or not issubclass(found, Rule):
        kind = found.__name__ if isinstance(found, type) else type(found).__name__
        raise SpecError(f"expected a subclass of alto.early_exit.Rule, found {kind}")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise SpecError(f"expected {found.__name__} to have a judge method, found it without")
    check_defaults(found)
    reason = getattr(found, "reason", None)
    if not isinstance(reason, str) or _REASON.fullmatch(reason) is None or reason in _RESERVED:
        raise SpecError(
            f"expected {found.__name__}.reason to be a word or two of lower-case letters, other than "
            f"{', '.join(_RESERVED)}, found {reason!r}"
        )
    return found


RULES: Registry[type[Rule]] = Registry(
    group="alto.early_exit_rules",
    key="rules",
    page="docs/early-exit.md",
    own={
        "divergence": "alto.early_exit.patterns:Divergence",
        "overfitting_gap": "alto.early_exit.patterns:OverfittingGap",
        "overfitting_upturn": "alto.early_exit.patterns:OverfittingUpturn",
        "collapse": "alto.early_exit.patterns:Collapse",
    },
    check=_rule,
)
