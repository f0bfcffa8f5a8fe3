"""When jobs end before their last step: the early-exit settings of a task."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from alto.errors import ConflictingKeysError
from alto.records import Rung
from alto.spec.keys import canonical_keys
from alto.spec.quoting import quoted
from alto.spec.validation import SpecModel, plain

__all__ = ["EarlyExit"]

PAPER_WARMUP_RATIO = 0.05
PAPER_SELECT_RATIO = 0.25
PAPER_RUNGS = ((PAPER_WARMUP_RATIO, PAPER_SELECT_RATIO),)
ALTO_RUNGS = ((0.025, 0.5), (0.05, 0.2))

_MAX_EVALUATIONS = 10**6


class EarlyExit(SpecModel):
    """Which jobs are stopped early, and on what evidence.

    Two policies share these settings. ``paper`` is Algorithm 1 of the ALTO paper to the letter. ``alto`` (the default)
    differs in two points: it selects at two rungs instead of one boundary, and it calls a job overfitting when its
    validation loss has turned upward by more than its own noise, not when validation and training loss lie apart.

    A non-finite loss always ends a job, whatever is switched off here.

    Attributes:
        enabled: False trains every job to its last step.
        policy: ``alto`` or ``paper``.
        detect_divergence: End jobs whose smoothed training loss and validation loss both rise.
        detect_overfitting: End jobs that overfit; their best adapter is kept and goes on competing.
        select: Rank the jobs at every rung and end those that do not earn a place.
        warmup_ratio: Share of its steps every job trains before it is ranked. Given alone or with ``select_ratio``
            it makes one rung; the paper's 0.05 stands in if only ``select_ratio`` is given.
        select_ratio: Share of the ranked jobs that go on; the paper's 0.25 stands in if only ``warmup_ratio`` is given.
        rungs: ``(progress, keep)`` pairs, progress rising: at ``progress`` of its steps every job is ranked and
            ``keep`` of the ranked jobs go on. Excludes ``warmup_ratio`` and ``select_ratio``. With none of the three,
            ``paper`` uses ((0.05, 0.25),) and ``alto`` uses ((0.025, 0.5), (0.05, 0.2)).
        window: Evaluations a divergence slope is fitted over.
        divergence_patience: Evaluations in a row at which a job must look diverging.
        overfitting_patience: Evaluations in a row at which a job must look overfit.
        tau_slope: Slope from which a loss counts as rising, in its own unit (nats per token) per evaluation.
        tau_gap: Gap between validation and smoothed training loss, relative to the latter (``paper`` only).
        tau_upturn: Rise of the validation loss over its best, relative to that best, below which it has not turned
            upward however smooth the curve is (``alto`` only).
        tau_noise: The same rise in standard deviations of the job's own validation noise (``alto`` only).
        ema_alpha: Weight of the newest step in the smoothed training loss. The default 0.1 averages over about the last
            ten steps, which cuts step noise to a quarter and still follows a loss that turns between two evaluations.

    Raises:
        UnknownKeyError: A key that is not one of the above.
        ConflictingKeysError: ``rungs`` together with ``warmup_ratio`` or ``select_ratio``.
        SpecError: A value out of bounds, or rungs that do not rise.
    """

    enabled: bool = Field(default=True, description="whether any job is stopped early")
    policy: Literal["alto", "paper"] = Field(default="alto", description="which rules decide")
    detect_divergence: bool = Field(default=True, description="end diverging jobs")
    detect_overfitting: bool = Field(default=True, description="end overfitting jobs")
    select: bool = Field(default=True, description="rank the jobs at rungs")
    warmup_ratio: float | None = Field(
        default=None, gt=0, lt=1, description="share of its steps before a job is ranked"
    )
    select_ratio: float | None = Field(default=None, gt=0, le=1, description="share of the ranked jobs that go on")
    rungs: tuple[tuple[float, float], ...] | None = Field(default=None, description="pairs of progress and share kept")
    window: int = Field(default=2, ge=2, le=_MAX_EVALUATIONS, description="evaluations a slope is fitted over")
    divergence_patience: int = Field(
        default=2, ge=1, le=_MAX_EVALUATIONS, description="evaluations in a row that must look diverging"
    )
    overfitting_patience: int = Field(
        default=2, ge=1, le=_MAX_EVALUATIONS, description="evaluations in a row that must look overfit"
    )
    tau_slope: float = Field(default=0.001, gt=0, description="slope from which a loss rises")
    tau_gap: float = Field(default=0.1, gt=0, description="relative gap between validation and training loss")
    tau_upturn: float = Field(default=0.001, ge=0, description="relative rise of the validation loss over its best")
    tau_noise: float = Field(default=3.0, ge=0, description="the same rise in deviations of its noise")
    ema_alpha: float = Field(default=0.1, gt=0, le=1, description="weight of the newest training loss")

    def __init__(self, /, **settings: Any) -> None:
        given = canonical_keys(settings, fields=type(self).model_fields, aliases={}, where="early_exit")
        _check_given_once(given)
        super().__init__(**given)

    @field_validator("rungs", mode="before")
    @classmethod
    def _check_rungs(cls, rungs: object) -> object:
        if rungs is None:
            return None
        pairs = plain(rungs)
        if not isinstance(pairs, tuple) or not pairs or not all(_is_rung(pair) for pair in pairs):
            raise ValueError(
                f"should be pairs of progress (above 0, below 1) and share kept (above 0, at most 1), found "
                f"{quoted(rungs)}. Write for example [[0.025, 0.5], [0.05, 0.2]], or set select to false to rank "
                "nobody."
            )
        progress = [pair[0] for pair in pairs]
        if any(later <= earlier for earlier, later in itertools.pairwise(progress)):
            raise ValueError(
                f"should rise in progress from rung to rung, found {progress}. Order the rungs and give each once."
            )
        return tuple((float(progress), float(keep)) for progress, keep in pairs)

    @property
    def selection_rungs(self) -> tuple[Rung, ...]:
        """The rungs these settings stand for, whether or not ``enabled`` and ``select`` let them act."""
        pairs = self.rungs
        if pairs is None and (self.warmup_ratio is not None or self.select_ratio is not None):
            warmup = PAPER_WARMUP_RATIO if self.warmup_ratio is None else self.warmup_ratio
            pairs = ((warmup, PAPER_SELECT_RATIO if self.select_ratio is None else self.select_ratio),)
        if pairs is None:
            pairs = PAPER_RUNGS if self.policy == "paper" else ALTO_RUNGS
        return tuple(Rung(progress=progress, keep=keep) for progress, keep in pairs)

    def resolved(self) -> EarlyExit:
        """The same settings with the rungs spelt out, as they are written to the run directory."""
        rungs = tuple((rung.progress, rung.keep) for rung in self.selection_rungs)
        return self.replace(rungs=rungs, warmup_ratio=None, select_ratio=None)


def _check_given_once(given: Mapping[str, Any]) -> None:
    clashing = " and ".join(key for key in ("warmup_ratio", "select_ratio") if given.get(key) is not None)
    if given.get("rungs") is not None and clashing:
        raise ConflictingKeysError(
            f"early_exit gives both rungs and {clashing}; expected one. Remove {clashing}, or write it as a rung."
        )


def _is_rung(pair: object) -> bool:
    if not isinstance(pair, tuple) or len(pair) != 2:
        return False
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in pair):
        return False
    progress, keep = pair
    return bool(0 < progress < 1 and 0 < keep <= 1)
