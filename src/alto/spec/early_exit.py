"""When jobs end before their last step: the early-exit settings of a task."""

from __future__ import annotations

import difflib
import itertools
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from alto.errors import AltoError, ConflictingKeysError, SpecError, UnknownKeyError
from alto.records import Rung

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = ["EarlyExit"]

PAPER_WARMUP_RATIO = 0.05
PAPER_SELECT_RATIO = 0.25
PAPER_RUNGS = ((PAPER_WARMUP_RATIO, PAPER_SELECT_RATIO),)
ALTO_RUNGS = ((0.025, 0.5), (0.05, 0.2))

InsideUnit = Annotated[float, Field(gt=0.0, lt=1.0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class EarlyExit(BaseModel):
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
        tau_slope: Slope from which a loss counts as rising, nats per token and evaluation.
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

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = True
    policy: Literal["alto", "paper"] = "alto"
    detect_divergence: bool = True
    detect_overfitting: bool = True
    select: bool = True
    warmup_ratio: InsideUnit | None = None
    select_ratio: Share | None = None
    rungs: tuple[tuple[InsideUnit, Share], ...] | None = None
    window: int = Field(default=2, ge=2)
    divergence_patience: int = Field(default=2, ge=1)
    overfitting_patience: int = Field(default=2, ge=1)
    tau_slope: Positive = 0.001
    tau_gap: Positive = 0.1
    tau_upturn: NotNegative = 0.001
    tau_noise: NotNegative = 3.0
    ema_alpha: Share = 0.1

    if not TYPE_CHECKING:  # type checkers see pydantic's keyword-only signature instead

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise _translated(error) from None

    @model_validator(mode="after")
    def _check_rungs(self) -> Self:
        if self.rungs is None:
            return self
        clashing = " and ".join(key for key in ("warmup_ratio", "select_ratio") if getattr(self, key) is not None)
        if clashing:
            raise ConflictingKeysError(
                f"early_exit: expected either rungs or warmup_ratio/select_ratio, found rungs and {clashing}."
                f" Remove {clashing}, or write it as a rung (progress, keep)."
            )
        if not self.rungs:
            raise SpecError(
                "early_exit.rungs: expected at least one (progress, keep) pair, found none."
                " Leave the key out for the policy's own rungs, or set select to false to rank nobody."
            )
        progress = [rung[0] for rung in self.rungs]
        if any(later <= earlier for earlier, later in itertools.pairwise(progress)):
            raise SpecError(
                f"early_exit.rungs: expected progress to rise from rung to rung, found {progress}."
                " Order the rungs by progress and give each progress once."
            )
        return self

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
        return self.model_copy(update={"rungs": rungs, "warmup_ratio": None, "select_ratio": None})


def _translated(error: ValidationError) -> AltoError:
    """The first finding of ``error`` as the error a user should see."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, AltoError):
        return cause
    if first["type"] == "extra_forbidden":
        return _unknown_key(str(first["loc"][0]))
    return _out_of_bounds(first)


def _unknown_key(key: str) -> UnknownKeyError:
    known = list(EarlyExit.model_fields)
    close = difflib.get_close_matches(key, known, n=1)
    remedy = f"Did you mean {close[0]!r}?" if close else f"Known keys: {', '.join(known)}."
    return UnknownKeyError(f"early_exit: expected keys of the early-exit settings, found {key!r}. {remedy}")


def _out_of_bounds(finding: ErrorDetails) -> SpecError:
    key = str(finding["loc"][0])
    where = ".".join(str(part) for part in ("early_exit", *finding["loc"]))
    default = EarlyExit.model_fields[key].default
    return SpecError(
        f"{where}: {finding['msg'].replace('Input should', 'expected the value to')},"
        f" found {finding['input']!r}. Correct it, or leave {key} out for the default"
        f"{'' if default is None else f' ({default})'}."
    )
