"""The early-exit settings of a task: when jobs end before their last step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from alto.base import quoted
from alto.errors import ConflictingKeysError, SpecError
from alto.records import Rung
from alto.spec.keys import canonical_keys
from alto.spec.rules import RULES, CollapseSettings, DivergenceSettings, GapSettings, Rule, UpturnSettings
from alto.spec.validation import is_finite_number, parsed, plain

# A product this close to a whole number, relative to it, counts as that number: 0.07 * 100 is 7.000000000000001 in
# float64.
ROUNDING = 1e-9


def ceil_fraction(fraction: float, total: int) -> int:
    """Return ``ceil(fraction * total)``, unaffected by float rounding of the product."""
    product = fraction * total
    nearest = round(product)
    return nearest if abs(product - nearest) <= ROUNDING * max(1, nearest) else math.ceil(product)


def rung_step(rung: Rung, total_steps: int) -> int:
    """Return the number of steps, at least 1, after which a job of ``total_steps`` steps reaches ``rung``."""
    return max(1, ceil_fraction(rung.progress, total_steps))


def places_at(rungs: Sequence[Rung], index: int, num_jobs: int) -> int:
    """Return how many of ``num_jobs`` jobs continue from rung number ``index`` (from 0).

    The fractions kept at all rungs up to it are multiplied, and only their product is rounded:
    ``max(ceil(keep_0 * … * keep_index * num_jobs), min(min_kept, num_jobs))``, and at most ``max_kept``.
    """
    rung = rungs[index]
    fraction = math.prod(earlier.keep for earlier in rungs[: index + 1])
    places = max(ceil_fraction(fraction, num_jobs), min(rung.min_kept, num_jobs))
    return places if rung.max_kept is None else min(places, rung.max_kept)


LEAST_RANKED_STEPS = 3
"""Jobs with fewer steps are not ranked, because they are almost done after the first step."""

PresetName: TypeAlias = Literal["default", "cautious", "greedy", "preferences"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A successive halving of the jobs of a task.

    Attributes:
        rungs: ``(progress, keep)`` pairs.
        min_kept: Smallest number of jobs that continue from each rung, in the order of the rungs.
        finish_from: Share of its steps from which only the best job continues; None for no such point.
        clear_from: Share of its steps from which rungs also end jobs clearly behind the best; None for no such point.
    """

    rungs: tuple[tuple[float, float], ...]
    min_kept: tuple[int, ...]
    finish_from: float | None
    clear_from: float | None = None


def _preset(
    first: float, then: float, min_kept: Mapping[float, int], finish: float | None, clear: float | None = None
) -> Preset:
    """Return a preset with rungs at the keys of ``min_kept``; the first keeps ``first``, the others keep ``then``."""
    keeps = (first, *[then] * (len(min_kept) - 1))
    rungs = tuple(zip(min_kept, keeps, strict=True))
    return Preset(rungs=rungs, min_kept=tuple(min_kept.values()), finish_from=finish, clear_from=clear)


PRESETS: Mapping[PresetName, Preset] = {
    "default": _preset(1 / 6, 1 / 2, {0.01: 8, 0.025: 8, 0.05: 5, 0.1: 3, 0.25: 2}, finish=0.6, clear=0.25),
    "cautious": _preset(1 / 3, 2 / 3, {0.025: 8, 0.05: 6, 0.1: 5, 0.2: 4, 0.4: 3, 0.8: 2}, finish=None),
    "greedy": _preset(1 / 8, 1 / 2, {0.005: 8, 0.025: 8, 0.05: 5, 0.1: 3}, finish=0.3),
    "preferences": Preset(rungs=((0.1, 1 / 2), (0.2, 0.3), (0.3, 1 / 2)), min_kept=(16, 6, 4), finish_from=0.6),
}
"""The presets of ``policy: alto`` by name; found by replay on recorded sweeps."""


def no_earlier(halving: Preset, earliest: float) -> Preset:
    """Return the same selection with no rung before the share ``earliest``; rungs up to it merge into one at it.

    If the best job was to continue alone no later than this, it does so from halfway between ``earliest`` and the end.
    """
    if halving.finish_from is not None and halving.finish_from <= earliest:
        halving = replace(halving, finish_from=(1 + earliest) / 2)
    early = [index for index, (progress, _) in enumerate(halving.rungs) if progress <= earliest]
    if not early:
        return halving
    keep = math.prod(halving.rungs[index][1] for index in early)
    rungs = ((earliest, keep), *halving.rungs[len(early) :])
    return replace(halving, rungs=rungs, min_kept=halving.min_kept[early[-1] :])


PAPER_WARMUP_RATIO = 0.05
PAPER_SELECT_RATIO = 0.25
PAPER_RUNGS = ((PAPER_WARMUP_RATIO, PAPER_SELECT_RATIO),)
RUNGS_OF_0_1 = ((0.025, 0.5), (0.05, 0.2))
DEFAULT_EVALUATION_SHARE = 0.2
"""The default ``evaluation_share``: evaluations take a sixth of the total time of training and evaluation."""

_MOST_KEPT = 10**6
_RULES_OF_POLICY: Mapping[str, Mapping[str, str]] = {
    "alto": {
        "detect_divergence": "divergence",
        "detect_overfitting": "overfitting_upturn",
        "detect_collapse": "collapse",
    },
    "paper": {"detect_divergence": "divergence", "detect_overfitting": "overfitting_gap"},
}
"""The rules of each policy in the order of their calls, by the setting that switches each rule on or off."""


class EarlyExit(DivergenceSettings, UpturnSettings, GapSettings, CollapseSettings):
    """The settings that decide which jobs are stopped early, and on what evidence.

    Two policies share these settings. ``paper`` is exactly Algorithm 1 of the ALTO paper. ``alto`` (the default)
    differs in three points: it selects at several rungs instead of one boundary; it compares jobs at exactly equal
    shares of their steps; and it calls a job overfitting when its validation loss has turned upward by more than its
    own noise, not when there is a gap between validation and training loss.

    A non-finite loss ends a job with any settings.

    Attributes:
        enabled: False trains every job to its last step.
        policy: ``alto`` or ``paper``.
        detect_divergence: End jobs whose smoothed training loss and validation loss both rise.
        detect_overfitting: End jobs that overfit; their best adapter is kept and still competes.
        detect_collapse: End jobs of ``method: grpo`` that have stopped learning (``alto`` only): for
            ``collapse_patience`` steps in a row, all completions of each prompt had equal rewards, or the entropy of
            their tokens was almost 0, or almost none ended although most did at the start. Their best adapter is kept
            and still competes.
        rules: Further rules by name, called after the policy's own rules: a mapping of a rule's settings, or true for
            its defaults. Packages register rules; ALTO's are ``divergence``, ``overfitting_gap``,
            ``overfitting_upturn``, ``collapse``.
        select: Rank the jobs at every rung and end those that are not kept.
        preset: Rungs, ``min_kept``, ``finish_from`` and ``clear_from`` by name (``alto`` only). If no rungs are given,
            None means ``preferences`` for a method that learns which replies are better (``dpo``, ``kto`` and similar),
            and ``default`` for any other. ``cautious`` keeps more jobs for longer than ``default``, ``greedy`` fewer.
        warmup_ratio: Share of its steps that every job trains before it is ranked. Given alone or with
            ``select_ratio``, it makes one rung; if only ``select_ratio`` is given, the default is the paper's 0.05.
        select_ratio: Share of the ranked jobs that continue; if only ``warmup_ratio`` is given, the default is the
            paper's 0.25.
        rungs: ``(progress, keep)`` pairs in increasing order of ``progress``. Every job is ranked after the share
            ``progress`` of its steps. Of the jobs that the previous rung kept, the share ``keep`` continues. Excludes
            ``warmup_ratio``, ``select_ratio`` and ``preset``. With none of the four, ``paper`` uses ((0.05, 0.25),) and
            ``alto`` its default preset.
        min_kept: Smallest number of jobs that continue from every rung: one number, or one for each of ``rungs``. None
            means the preset's value, or 1 without a preset.
        finish_from: Share of its steps from which only the best job continues; 1 lets all jobs kept by the rungs
            finish. None means the preset's value, or 1 without a preset.
        clear_from: Share of its steps from which rungs also end jobs clearly behind the best: by three standard errors
            on common rows, and by a twentieth of the best job's improvement; 1 disables this. None means the preset's
            value if only the best job finishes, else 1. It needs evaluations that ``evaluation_share`` plans.
        equal_shares: Compare jobs at exactly the rung's share of their steps, by values interpolated between two
            evaluations, and count places over all rungs (``alto`` only). False compares the first evaluation at or
            after the rung and counts places among the jobs that reach it, as ``paper`` does.
        evaluation_share: Time for evaluations, as a share of the time for training (``alto`` only). It decides how many
            validation rows an evaluation uses, and how often jobs are evaluated after the last rung, at most at every
            ``eval_steps`` of the task; the best adapters are measured once more at the end. ``all`` evaluates on all
            rows, at every ``eval_steps``. If ``metric`` is not the loss, or if the method is not one of sft, dpo, orpo,
            cpo and those of packages with ``has_row_losses``, evaluations are always on all rows, and the share only
            decides how many there are.
        evaluations: ``(progress, rows)`` pairs in order of progress: the shares of its steps after which a job is
            evaluated, and the number of validation rows. None lets ``evaluation_share`` decide.
        final_evaluations: Number of best jobs that are measured once more at the end, and number of validation rows;
            the winner is one of these jobs. None lets ``evaluation_share`` decide.
        window: Number of evaluations over which a divergence slope is fitted.
        divergence_patience: Number of evaluations in a row at which a job must look diverging.
        overfitting_patience: Number of evaluations in a row at which a job must look overfit.
        collapse_patience: Number of steps in a row at which a job must look collapsed (``alto`` only).
        tau_slope: Slope from which a loss counts as rising, in the unit of the loss (nats per token) per evaluation.
        tau_gap: Gap between validation loss and smoothed training loss, relative to the training loss (``paper`` only).
        tau_upturn: Smallest rise of the validation loss above its best value, relative to that value, that can count as
            overfitting, even if the curve is smooth (``alto`` only).
        tau_noise: Smallest such rise, in standard deviations of the noise of the job's own validation losses (``alto``
            only).
        ema_alpha: Weight of the newest step in the smoothed training loss. The default 0.1 averages over about the last
            ten steps, which cuts step noise to a quarter and still follows a loss that turns between two evaluations.

    Raises:
        UnknownKeyError: A key is not one of the above.
        ConflictingKeysError: ``rungs`` is given together with ``warmup_ratio`` or ``select_ratio``; or ``preset``
            together with one of these three or with the paper's policy.
        SpecError: A value is out of bounds, rungs do not rise, a rule is unknown, or ``rules`` names one of the
            policy's own.
        UnsupportedError: A package's rule cannot be used.
    """

    enabled: bool = Field(default=True, description="whether any job is stopped early")
    policy: Literal["alto", "paper"] = Field(default="alto", description="which rules decide")
    detect_divergence: bool = Field(default=True, description="end diverging jobs")
    detect_overfitting: bool = Field(default=True, description="end overfitting jobs")
    detect_collapse: bool = Field(default=True, description="end jobs that no longer learn from rewards")
    rules: Mapping[str, SerializeAsAny[Rule]] = Field(default={}, description="further rules and their settings")
    select: bool = Field(default=True, description="rank the jobs at rungs")
    warmup_ratio: float | None = Field(
        default=None, gt=0, lt=1, description="share of its steps that a job trains before it is ranked"
    )
    select_ratio: float | None = Field(default=None, gt=0, le=1, description="share of the ranked jobs that continue")
    preset: PresetName | None = Field(default=None, description="name of predefined rungs")
    rungs: tuple[tuple[float, float], ...] | None = Field(default=None, description="pairs of progress and share kept")
    min_kept: int | tuple[int, ...] | None = Field(
        default=None, description="smallest number of jobs that continue from a rung"
    )
    finish_from: float | None = Field(
        default=None, gt=0, le=1, description="share of the steps from which only the best job continues"
    )
    clear_from: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of the steps from which rungs also end jobs that are clearly behind the best",
    )
    equal_shares: bool = Field(default=True, description="compare jobs at exactly equal shares of their steps")
    evaluation_share: Annotated[float, Field(gt=0, le=10)] | Literal["all"] = Field(
        default=DEFAULT_EVALUATION_SHARE, description="time for evaluations as a share of the time for training, or all"
    )
    evaluations: tuple[tuple[float, int], ...] | None = Field(
        default=None, description="pairs of progress and number of validation rows"
    )
    final_evaluations: tuple[int, int] | None = Field(
        default=None, description="number of jobs measured at the end, and number of validation rows"
    )
    ema_alpha: float = Field(default=0.1, gt=0, le=1, description="weight of the newest training loss")

    def __init__(self, /, **settings: Any) -> None:
        given = canonical_keys(settings, fields=type(self).model_fields, aliases={}, where="early_exit")
        _check_given_once(given)
        if "rules" in given:
            given["rules"] = _rules(given["rules"])
        super().__init__(**given)

    @field_validator("rungs", mode="before")
    @classmethod
    def _check_rungs(cls, rungs: object) -> object:
        if rungs is None:
            return None
        pairs = plain(rungs)
        if (
            not isinstance(pairs, tuple)
            or not pairs
            or not all(_are_two_numbers(pair) and 0 < pair[0] < 1 and 0 < pair[1] <= 1 for pair in pairs)
        ):
            raise ValueError(
                f"should be pairs of progress (above 0, below 1) and share kept (above 0, at most 1), found "
                f"{quoted(rungs)}. Use for example [[0.025, 0.5], [0.05, 0.2]], or set select to false for no "
                "ranking."
            )
        progress = [pair[0] for pair in pairs]
        if any(later <= earlier for earlier, later in itertools.pairwise(progress)):
            raise ValueError(
                f"should be in increasing order of progress, found {progress}. Sort the rungs and give each once."
            )
        return tuple((float(progress), float(keep)) for progress, keep in pairs)

    @field_validator("evaluations", "final_evaluations", mode="before")
    @classmethod
    def _check_evaluations(cls, given: object, info: ValidationInfo) -> object:
        if given is None:
            return None
        pairs = plain(given) if info.field_name == "evaluations" else (plain(given),)
        most = 1 if info.field_name == "evaluations" else _MOST_KEPT
        are_pairs = isinstance(pairs, tuple) and all(map(_are_two_numbers, pairs))
        if (
            not are_pairs
            or not pairs
            or not all(0 < at <= most and type(rows) is int and rows > 0 for at, rows in pairs)
        ):
            example = "[[0.05, 12], [1.0, 100]]" if info.field_name == "evaluations" else "[3, 100]"
            raise ValueError(
                "should be pairs of positive numbers, the second the number of validation rows, found "
                f"{quoted(given)}. Use for example {example}, or remove the key; evaluation_share then decides."
            )
        if any(later[0] <= earlier[0] for earlier, later in itertools.pairwise(pairs)):
            raise ValueError(
                f"should be in increasing order of progress, found {quoted(given)}. Sort the pairs and give each once."
            )
        return pairs if info.field_name == "evaluations" else pairs[0]

    @field_validator("min_kept", mode="before")
    @classmethod
    def _check_numbers_kept(cls, min_kept: object) -> object:
        numbers = plain(min_kept)
        given = numbers if isinstance(numbers, tuple) else (numbers,)
        are_counts = all(type(number) is int and 1 <= number <= _MOST_KEPT for number in given)
        if numbers is not None and not (given and are_counts):
            raise ValueError(
                f"should be a whole number >= 1 and <= {_MOST_KEPT}, or one for each rung, found {quoted(min_kept)}. "
                "For example: 4, or [8, 5, 3] with three rungs."
            )
        return numbers

    @model_validator(mode="after")
    def _check_together(self) -> EarlyExit:
        if (self.evaluations is None) != (self.final_evaluations is None):
            present, missing = "evaluations", "final_evaluations"
            if self.evaluations is None:
                present, missing = missing, present
            raise ValueError(
                f"{present}: expected {missing} together with this key, found {present} alone. Set both, or remove it; "
                "then evaluation_share decides."
            )
        given = self._given_rungs
        # A preset's rungs after the finish are dropped; rungs set by the user are all used.
        before, which = (self._basis.rungs[0][0], "first") if given is None else (given[-1][0], "last")
        if self.finish_from is not None and self.finish_from <= before:
            raise ValueError(
                f"finish_from: expected a share of the steps above the {which} rung's {before}, found "
                f"{self.finish_from}. Raise it, or move that rung."
            )
        if isinstance(self.min_kept, tuple) and (self.rungs is None or len(self.min_kept) != len(self.rungs)):
            raise ValueError(
                f"min_kept should be one number, or one for each of rungs, found {list(self.min_kept)}, and the "
                f"number of rungs is {len(self.rungs or ())}. Set one number."
            )
        twice = [name for name in _RULES_OF_POLICY[self.policy].values() if name in self.rules]
        if twice:
            raise ValueError(
                f"rules: expected rules that are not part of policy {self.policy!r}, found {twice[0]!r}, which is "
                "part of it. Put its settings directly under early_exit."
            )
        return self

    @model_serializer(mode="wrap")
    def _without_empty_rules(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        return values if values.get("rules") else {key: value for key, value in values.items() if key != "rules"}

    @classmethod
    def parse(cls, value: object) -> EarlyExit:
        """Parse ``early_exit`` of a task: a mapping of settings; true for the defaults, false for no early exit."""
        if isinstance(value, EarlyExit):
            return value
        if isinstance(value, bool):
            return cls(enabled=value)
        expected = "true, false or a mapping of settings"
        return parsed(cls, value, "early_exit", example="{policy: paper}", expected=expected)

    @classmethod
    def of_run(cls, settings: Mapping[str, Any]) -> EarlyExit:
        """Read the settings in the files of a run; settings written by version 0.1 select as that version did."""
        if "equal_shares" in settings:
            return cls(**settings)
        old = {**settings, "equal_shares": False}
        has_rungs = any(old.get(key) is not None for key in ("rungs", "warmup_ratio", "select_ratio"))
        if old.get("policy", "alto") == "alto" and not has_rungs:
            old["rungs"] = RUNGS_OF_0_1
        return cls(**old)

    def with_preset(self, name: PresetName) -> EarlyExit:
        """Return the same settings with a preset, unless they already have a preset or rungs of their own."""
        return self if self.has_own_rungs or self.preset is not None else self.replace(preset=name)

    @property
    def compares_equal_shares(self) -> bool:
        """Whether jobs are compared at exactly equal shares of their steps; the paper's rule compares evaluations."""
        return self.equal_shares and self.policy == "alto"

    @property
    def active_rules(self) -> tuple[Rule, ...]:
        """The rules that judge each job at each of its evaluations, in the order in which they are called."""
        if not self.enabled:
            return ()
        switches = _RULES_OF_POLICY[self.policy]
        kinds = [RULES.find(name) for switch, name in switches.items() if getattr(self, switch)]
        own = [kind(**{key: getattr(self, key) for key in kind.model_fields}) for kind in kinds]
        return (*own, *self.rules.values())

    @property
    def selection_rungs(self) -> tuple[Rung, ...]:
        """The rungs of these settings, even if ``enabled`` or ``select`` is off. If there is a point from which only
        the best job continues, it is the last rung."""
        halving = self._halving
        clear_from = halving.clear_from or 1.0
        rungs = [
            Rung(progress=progress, keep=keep, min_kept=min_kept, ends_clear_losers=progress >= clear_from)
            for (progress, keep), min_kept in zip(halving.rungs, halving.min_kept, strict=True)
        ]
        if halving.finish_from is not None:
            rungs.append(Rung(progress=halving.finish_from, keep=1.0, max_kept=1))
        return tuple(rungs)

    def resolved(self, *, earliest: float = 0.0, steps: Collection[int] = ()) -> EarlyExit:
        """Return the same settings with explicit rungs, as they are written to the run directory.

        A preset's rungs move so that they come no earlier than at ``earliest``. Rungs of the user or of the paper do
        not move. A user's ``finish_from`` does not move either; if it comes no later than that point, the preset's
        rungs stay where they are.

        Args:
            earliest: Share of the steps before which jobs cannot be compared, see `JobConfig.earliest_rung`.
            steps: Numbers of steps of the jobs; empty if they are not known. If a job has fewer than three steps, no
                jobs are ranked at a preset's rungs.
        """
        halving, select = self._halving, self.select
        is_finish_before = self.finish_from is not None and self.finish_from < 1 and self.finish_from <= earliest
        if self._given_rungs is None:
            select = select and min(steps, default=LEAST_RANKED_STEPS) >= LEAST_RANKED_STEPS
            halving = halving if is_finish_before else no_earlier(halving, earliest)
        return self.replace(
            rungs=halving.rungs,
            min_kept=halving.min_kept,
            finish_from=1.0 if halving.finish_from is None else halving.finish_from,
            clear_from=halving.clear_from or 1.0,
            warmup_ratio=None,
            select_ratio=None,
            preset=None,
            select=select,
        )

    @property
    def has_own_rungs(self) -> bool:
        """Whether the user or the paper's policy, and not a preset, sets the rungs."""
        return self._given_rungs is not None

    @property
    def _given_rungs(self) -> tuple[tuple[float, float], ...] | None:
        """The rungs of the user or the paper; None if a preset sets them."""
        if self.rungs is not None:
            return self.rungs
        if self.warmup_ratio is not None or self.select_ratio is not None:
            warmup = PAPER_WARMUP_RATIO if self.warmup_ratio is None else self.warmup_ratio
            return ((warmup, PAPER_SELECT_RATIO if self.select_ratio is None else self.select_ratio),)
        return PAPER_RUNGS if self.policy == "paper" else None

    @property
    def _basis(self) -> Preset:
        """The rungs, with the defaults of ``min_kept``, ``finish_from`` and ``clear_from``."""
        given = self._given_rungs
        if given is None:
            return PRESETS[self.preset or "default"]
        return Preset(rungs=given, min_kept=(1,) * len(given), finish_from=None)

    @property
    def _halving(self) -> Preset:
        """The effective settings, with every default filled in."""
        basis = self._basis
        finish = basis.finish_from if self.finish_from is None else self.finish_from
        finish = None if finish == 1 else finish
        rungs = basis.rungs if finish is None else tuple(pair for pair in basis.rungs if pair[0] < finish)
        if isinstance(self.min_kept, int):
            min_kept = (self.min_kept,) * len(rungs)
        else:
            min_kept = (self.min_kept or basis.min_kept)[: len(rungs)]
        clear = basis.clear_from if self.clear_from is None and finish is not None else self.clear_from
        return Preset(rungs=rungs, min_kept=min_kept, finish_from=finish, clear_from=clear)


def _check_given_once(given: Mapping[str, Any]) -> None:
    clashing = " and ".join(key for key in ("warmup_ratio", "select_ratio") if given.get(key) is not None)
    if given.get("rungs") is not None and clashing:
        raise ConflictingKeysError(
            f"early_exit gives both rungs and {clashing}; expected one. Remove {clashing}, or make it a rung."
        )
    if given.get("preset") is None:
        return
    if given.get("rungs") is not None or clashing:
        other = clashing or "rungs"
        raise ConflictingKeysError(f"early_exit gives both preset and {other}; expected one. Remove one of them.")
    if given.get("policy") == "paper":
        raise ConflictingKeysError(
            "early_exit gives a preset with policy 'paper', which has no presets; expected one of the two. Remove one."
        )


def _rules(given: object) -> dict[str, Rule]:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise SpecError(
            f"rules should map names of rules to their settings, found {quoted(given)}. For example: "
            "{my_rule: {threshold: 0.3}}, or {my_rule: true} for its defaults."
        )
    return {name: _rule(name, settings) for name, settings in given.items()}


def _rule(name: str, settings: object) -> Rule:
    RULES.check_not_taken(name)
    kind = RULES.find(name)
    if isinstance(settings, kind):
        return settings
    settings = {} if settings is True else settings
    if not isinstance(settings, Mapping):
        raise SpecError(
            f"rules.{name} should be a mapping of settings, or true for the defaults, found {quoted(settings)}. Remove "
            "the key for a rule that is not wanted."
        )
    given = canonical_keys(settings, fields=kind.model_fields, aliases={}, where=f"early_exit.rules.{name}")
    try:
        return kind(**given)
    except SpecError as error:
        raise SpecError(f"rules.{name}.{error}") from None


def _are_two_numbers(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and all(map(is_finite_number, pair))
