"""Entries of objectives, without torch: their metrics, settings and the names of their implementations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from alto.errors import SpecError
from alto.records import ProblemType
from alto.spec.objective_settings import (
    LOSS_TYPES,
    CpoSettings,
    DpoSettings,
    KtoSettings,
    LossType,
    ObjectiveSettings,
    OrpoSettings,
)
from alto.spec.registry import Registry
from alto.spec.validation import check_defaults

__all__ = [
    "LOSS_TYPES",
    "OBJECTIVES",
    "PREFERENCE_METRICS",
    "PREFERENCE_SCORES",
    "CpoSettings",
    "DpoSettings",
    "KtoSettings",
    "LossType",
    "ObjectiveEntry",
    "ObjectiveSettings",
    "OrpoSettings",
]

PREFERENCE_SCORES = ("reward_accuracy", "reward_margin")
PREFERENCE_METRICS = (*PREFERENCE_SCORES, "chosen_reward", "rejected_reward")
"""The metrics of :func:`alto.objectives.preference_metrics`; for those in ``PREFERENCE_SCORES``, higher is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveEntry:
    """The entry of an objective, registered under ``alto.objectives`` by the name of its method.

    The module that holds it must not import torch: it is imported whenever a task names the method.
    ``docs/objectives.md`` has an example.

    Attributes:
        implementation: ``module:class`` of the loss (:class:`alto.objectives.ObjectiveImplementation`); imported only
            for training and evaluation.
        settings: Settings of the objective in addition to those of every job.
        is_paired: Whether it learns from preference pairs; None if it accepts either kind of rows.
        is_labelled: Whether it learns from replies labelled as desirable or not (pairs are converted to them);
            ``is_paired`` must be false then.
        problem_types: Problems that its classification head can learn, if every job trains a head of its own; rows are
            then texts with labels, and ``is_paired`` must be false. Empty if it learns from the losses of tokens.
        needs_reference: Whether it needs reference log-probs (``batch.references_Q2``).
        metrics: Names of its metrics, without the loss.
        derived: Metrics that are not means over rows; the implementation derives them from sums
            (:class:`alto.objectives.DerivedMetrics`).
        scores: Metrics for which higher is better; a task may select by one of them (``metric``).
        scaled_by: The settings that decide the scale of each metric. All settings count for the scale of the loss.

    Raises:
        SpecError: A field does not have its type, a named metric or setting does not exist, or a default of the
            settings is out of its domain.
    """

    implementation: str
    settings: type[ObjectiveSettings] = ObjectiveSettings
    is_paired: bool | None = None
    is_labelled: bool = False
    problem_types: tuple[ProblemType, ...] = ()
    needs_reference: bool = False
    metrics: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    scores: tuple[str, ...] = ()
    scaled_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.settings, type) or not issubclass(self.settings, ObjectiveSettings):
            raise SpecError(
                f"settings: expected a subclass of ObjectiveSettings, found {self.settings!r}. Make it such a subclass."
            )
        check_defaults(self.settings)
        if not isinstance(self.implementation, str) or ":" not in self.implementation:
            raise SpecError(
                f"implementation: expected text such as 'package.module:Class', found {self.implementation!r}. Write "
                "it in this form; the class is imported when training starts."
            )
        if self.problem_types and (self.is_paired is not False or self.is_labelled or self.needs_reference):
            raise SpecError(
                "problem_types: expected is_paired to be false with it, and is_labelled and needs_reference not to be "
                "set. Texts with labels are not replies."
            )
        if self.is_labelled and self.is_paired is not False:
            raise SpecError(
                f"is_labelled: expected is_paired to be false with it, found {self.is_paired}. Labelled rows are not "
                "pairs."
            )
        named = {name: getattr(self, name) for name in ("problem_types", "metrics", "derived", "scores")}
        for name, given in (*named.items(), *self.scaled_by.items()):
            if not isinstance(given, tuple) or not all(isinstance(item, str) for item in given):
                raise SpecError(f'{name}: expected a tuple of names, found {given!r}. Write ("one",) for a single one.')
        if "loss" in self.metrics or not {*self.scores, *self.derived} <= {*self.metrics}:
            raise SpecError(
                f"expected every score and derived metric among the metrics and no metric called 'loss', found metrics "
                f"{self.metrics}, derived {self.derived} and scores {self.scores}. Correct them."
            )
        for metric, keys in self.scaled_by.items():
            if metric not in self.metrics or not set(keys) <= self.settings.model_fields.keys():
                raise SpecError(
                    f"scaled_by: expected settings of {self.settings.__name__} by the name of a metric, found "
                    f"{metric!r}: {keys}. Correct it."
                )


def _entry(found: object) -> ObjectiveEntry:
    if not isinstance(found, ObjectiveEntry):
        kind = found.__name__ if isinstance(found, type) else type(found).__name__
        raise SpecError(f"expected an alto.spec.ObjectiveEntry, found {kind}")
    return found


OBJECTIVES: Registry[ObjectiveEntry] = Registry(
    group="alto.objectives",
    key="method",
    page="docs/objectives.md",
    own={
        "sft": ObjectiveEntry(implementation="alto.objectives.sft:Sft", is_paired=False),
        "dpo": ObjectiveEntry(
            implementation="alto.objectives.dpo:Dpo",
            settings=DpoSettings,
            is_paired=True,
            needs_reference=True,
            metrics=(*PREFERENCE_METRICS, "kl"),
            scores=PREFERENCE_SCORES,
            scaled_by={"reward_margin": ("beta", "ld_alpha")},
        ),
        "orpo": ObjectiveEntry(
            implementation="alto.objectives.orpo:Orpo",
            settings=OrpoSettings,
            is_paired=True,
            metrics=(*PREFERENCE_METRICS, "chosen_loss"),
            scores=PREFERENCE_SCORES,
            scaled_by={"reward_margin": ("beta",)},
        ),
        "cpo": ObjectiveEntry(
            implementation="alto.objectives.cpo:Cpo",
            settings=CpoSettings,
            is_paired=True,
            metrics=(*PREFERENCE_METRICS, "chosen_loss"),
            scores=PREFERENCE_SCORES,
            scaled_by={"reward_margin": ("beta", "loss_type")},
        ),
        "kto": ObjectiveEntry(
            implementation="alto.objectives.kto:Kto",
            settings=KtoSettings,
            is_paired=False,
            is_labelled=True,
            needs_reference=True,
            metrics=("reward_margin", "chosen_reward", "rejected_reward", "kl"),
            scores=("reward_margin",),
            scaled_by={"reward_margin": ("beta",)},
        ),
        "classification": ObjectiveEntry(
            implementation="alto.objectives.classification:Classification",
            is_paired=False,
            problem_types=("single_label_classification", "multi_label_classification"),
            metrics=("accuracy", "macro_f1"),
            derived=("macro_f1",),
            scores=("accuracy", "macro_f1"),
        ),
        "regression": ObjectiveEntry(
            implementation="alto.objectives.regression:Regression",
            is_paired=False,
            problem_types=("regression",),
            metrics=("mse", "pearson"),
            derived=("pearson",),
            scores=("pearson",),
        ),
    },
    check=_entry,
)
