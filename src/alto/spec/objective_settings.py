"""Settings of objectives: the base class, and the settings of ALTO's own objectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from pydantic import Field, field_validator, model_validator

from alto.base import Registry, quoted
from alto.errors import SpecError
from alto.records import ProblemType
from alto.spec.keys import canonical_keys
from alto.spec.validation import SpecModel, check_defaults, plain

LossType: TypeAlias = Literal[
    "sigmoid",
    "sigmoid_norm",
    "ipo",
    "hinge",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
]
"""Forms of the loss of ``dpo``."""

LOSS_TYPES: tuple[LossType, ...] = get_args(LossType)

_SMOOTHED: tuple[LossType, ...] = ("sigmoid", "robust", "exo_pair")
"""The forms that have ``label_smoothing``."""

_OF_RATIOS: tuple[LossType, ...] = ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")
_DIVERGING = tuple(form for form in LOSS_TYPES if form not in _OF_RATIOS)
"""The forms that have ``f_divergence_type``: losses of the difference between two scores."""

Divergence: TypeAlias = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
"""Divergences between the adapter and the base that DPO can limit (f-DPO, arXiv:2309.16240)."""

CpoLossType: TypeAlias = Literal["sigmoid", "hinge", "ipo", "simpo"]
"""Forms of the loss of ``cpo``."""

CPO_LOSS_TYPES: tuple[CpoLossType, ...] = get_args(CpoLossType)

KtoLossType: TypeAlias = Literal["kto", "apo_zero_unpaired"]
"""Forms of the loss of ``kto``."""

KTO_LOSS_TYPES: tuple[KtoLossType, ...] = get_args(KtoLossType)

GrpoLossType: TypeAlias = Literal["grpo", "bnpo", "dr_grpo", "dapo"]
"""Forms of the loss of ``grpo``: what the sum over tokens is divided by."""

GRPO_LOSS_TYPES: tuple[GrpoLossType, ...] = get_args(GrpoLossType)

_SMOOTHED_CPO: tuple[CpoLossType, ...] = ("sigmoid", "simpo")

_METHODS_BY_FORM: Mapping[str, str] = {
    "orpo": "method: orpo",
    "cpo": "method: cpo",
    "kto": "method: kto",
    "simpo": "method: cpo and loss_type: simpo",
}
"""Names that other programs list as forms of DPO's loss, with the keys to write in ALTO."""

_SORTED = "sorts the log-ratios of the whole batch, which ALTO may split over micro-batches"
_REFUSED_FORMS: Mapping[str, str] = {"aot": _SORTED, "aot_unpaired": _SORTED}
"""TRL's forms of the loss that are not supported, with the reason."""

_DISCOPOP_TAU = 0.05
_ALPHA_COEF = 0.5


class ObjectiveSettings(SpecModel):
    """Settings of an objective, in addition to those of every job (:class:`alto.spec.JobConfig`). The base class has
    none.

    A subclass declares them as pydantic fields with bounds and a description. A task gives them in the same places as a
    job's other settings: at its top level, or under ``search_space``. Null means the default.

    Raises:
        SpecError: A value is out of its domain.
        UnknownKeyError, ConflictingKeysError: See :func:`alto.spec.keys.canonical_keys`.
    """

    aliases: ClassVar[Mapping[str, str]] = {}
    """Other spellings of the settings."""

    @property
    def needs_kl(self) -> bool:
        """Whether the loss needs ``batch.kl_J``, the estimated divergence of the adapter from the base model over the
        job's whole batch; estimating it takes two more forward passes."""
        return False

    @property
    def completions_per_row(self) -> int:
        """Number of rows of a step's batch that come from one row of the dataset: completions of a prompt, or 1."""
        return 1

    @property
    def logit_scale(self) -> float:
        """Factor on the logits in the loss: the inverse of a temperature, or 1."""
        return 1.0

    def __init__(self, /, **values: Any) -> None:
        kind = type(self)
        given = canonical_keys(values, fields=kind.model_fields, aliases=kind.aliases, where=kind.__name__)
        super().__init__(**{key: plain(value) for key, value in given.items() if value is not None})


class OrpoSettings(ObjectiveSettings):
    """Settings of ``orpo``."""

    aliases: ClassVar[Mapping[str, str]] = {"pref_beta": "beta", "rl_beta": "beta"}

    beta: float = Field(default=0.1, ge=1e-6, le=1e6, description="weight of the odds-ratio loss")


class DpoSettings(ObjectiveSettings):
    """Settings of ``dpo``.

    ``loss_type`` may be a list of forms. Their losses are multiplied by ``loss_weights`` (by default 1) and added. A
    list with one form is stored as that form.
    """

    aliases: ClassVar[Mapping[str, str]] = {
        "pref_beta": "beta",
        "rl_beta": "beta",
        "pref_loss": "loss_type",
        "dpo_label_smoothing": "label_smoothing",
    }

    beta: float = Field(
        default=0.1, ge=1e-6, le=1e6, description="strength of the penalty for deviating from the base model"
    )
    loss_type: LossType | tuple[LossType, ...] = Field(
        default="sigmoid", description="form of the loss, or several forms that are summed"
    )
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5, description="assumed share of pairs in the wrong order")
    loss_weights: tuple[float, ...] | None = Field(
        default=None, description="weight of each form of loss_type, if there are several"
    )
    rpo_alpha: float | None = Field(
        default=None, ge=0, le=1e6, description="weight of the chosen replies' cross-entropy that is added to the loss"
    )
    ld_alpha: float | None = Field(
        default=None, ge=0, le=1, description="weight of a reply's tokens beyond the length of the shorter reply"
    )
    f_divergence_type: Divergence = Field(
        default="reverse_kl", description="divergence from the base model that the loss limits"
    )
    f_alpha_divergence_coef: float = Field(
        default=_ALPHA_COEF, ge=-1e3, le=1e3, description="alpha of f_divergence_type alpha_divergence"
    )
    discopop_tau: float = Field(default=_DISCOPOP_TAU, gt=0, le=1e6, description="temperature of loss_type discopop")

    @property
    def forms(self) -> Mapping[LossType, float]:
        """The weight of each form of the loss; ``rpo_alpha`` is the weight of ``sft``."""
        names: tuple[LossType, ...] = self.loss_type if isinstance(self.loss_type, tuple) else (self.loss_type,)
        found = dict(zip(names, self.loss_weights or (1.0,) * len(names), strict=True))
        return found if self.rpo_alpha is None else {**found, "sft": self.rpo_alpha}

    @field_validator("loss_type", mode="before")
    @classmethod
    def _name_the_forms(cls, value: Any) -> Any:
        names = value if isinstance(value, list | tuple) else [value]
        for name in names:
            if isinstance(name, str) and name not in LOSS_TYPES:
                remedy = f"Set {_METHODS_BY_FORM[name]}." if name in _METHODS_BY_FORM else "Use one of them."
                reason = f", which {_REFUSED_FORMS[name]}" if name in _REFUSED_FORMS else ""
                raise ValueError(f"should be one of {', '.join(LOSS_TYPES)}, found {quoted(name)}{reason}. {remedy}")
        if not isinstance(value, list | tuple):
            return value
        if not names or len(set(map(str, names))) < len(names):
            raise ValueError(
                f"should name one or more forms, each once, found {quoted(list(names))}. Correct the list."
            )
        return names[0] if len(names) == 1 else tuple(names)

    @field_validator("loss_weights", mode="before")
    @classmethod
    def _take_lists(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        if not all(isinstance(weight, int | float) and not isinstance(weight, bool) and weight > 0 for weight in value):
            raise ValueError(f"should be numbers > 0, found {quoted(list(value))}. Leave out a form without weight.")
        return tuple(float(weight) for weight in value)

    @model_validator(mode="after")
    def _check_forms(self) -> DpoSettings:
        names = self.loss_type if isinstance(self.loss_type, tuple) else (self.loss_type,)
        if self.loss_weights is not None and len(self.loss_weights) != len(names):
            raise ValueError(
                f"loss_weights should be {len(names)} numbers, one for each form of loss_type, found "
                f"{len(self.loss_weights)}. Give every form its weight, or remove the key."
            )
        if self.rpo_alpha is not None and "sft" in names:
            raise ValueError(
                "rpo_alpha is the weight of the form 'sft', expected one of the two, found both. Remove rpo_alpha, or "
                "'sft' from loss_type."
            )
        if self.label_smoothing and not set(names) & set(_SMOOTHED):
            raise ValueError(
                f"label_smoothing should be 0 with loss_type {', '.join(map(repr, names))}, found "
                f"{self.label_smoothing}. Remove it, or use one of the forms that have it: {' or '.join(_SMOOTHED)}."
            )
        if "exo_pair" in names and not self.label_smoothing:
            raise ValueError(
                "label_smoothing should be above 0 with loss_type 'exo_pair', found 0. Set label_smoothing: 1.0e-3, "
                "as in its paper."
            )
        others = [name for name in names if name not in _DIVERGING]
        if self.f_divergence_type != "reverse_kl" and others:
            raise ValueError(
                f"f_divergence_type should be 'reverse_kl' with loss_type {others[0]!r}, found "
                f"{self.f_divergence_type!r}. Remove it, or use forms that have it: {', '.join(_DIVERGING)}."
            )
        if self.f_alpha_divergence_coef != _ALPHA_COEF and self.f_divergence_type != "alpha_divergence":
            raise ValueError(
                f"f_alpha_divergence_coef should be {_ALPHA_COEF} with f_divergence_type {self.f_divergence_type!r}, "
                f"found {self.f_alpha_divergence_coef}. Remove it, or set f_divergence_type: alpha_divergence."
            )
        if self.discopop_tau != _DISCOPOP_TAU and "discopop" not in names:
            raise ValueError(
                f"discopop_tau should be {_DISCOPOP_TAU} with loss_type {', '.join(map(repr, names))}, found "
                f"{self.discopop_tau}. Remove it, or set loss_type: discopop."
            )
        return self


class CpoSettings(ObjectiveSettings):
    """Settings of ``cpo``."""

    aliases: ClassVar[Mapping[str, str]] = {"pref_beta": "beta", "rl_beta": "beta", "pref_loss": "loss_type"}

    beta: float = Field(default=0.1, ge=1e-6, le=1e6, description="weight of a reward")
    loss_type: CpoLossType = Field(default="sigmoid", description="form of the loss")
    cpo_alpha: float = Field(
        default=1.0, ge=0, le=1e6, description="weight of the chosen replies' cross-entropy that is added to the loss"
    )
    simpo_gamma: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="margin that the chosen reply's reward should have; only for loss_type simpo",
    )
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5, description="assumed share of pairs in the wrong order")

    @property
    def target_margin(self) -> float:
        """The target margin between the rewards of the chosen and the rejected reply; by default TRL's."""
        return 0.5 if self.simpo_gamma is None else self.simpo_gamma

    @model_validator(mode="after")
    def _check_forms(self) -> CpoSettings:
        if self.label_smoothing and self.loss_type not in _SMOOTHED_CPO:
            raise ValueError(
                f"label_smoothing should be 0 with loss_type {self.loss_type!r}, found {self.label_smoothing}. Remove "
                f"it, or use one of the forms that have it: {' or '.join(_SMOOTHED_CPO)}."
            )
        if self.simpo_gamma is not None and self.loss_type != "simpo":
            raise ValueError(
                f"simpo_gamma belongs to loss_type 'simpo', found {self.simpo_gamma} with {self.loss_type!r}. Remove "
                "it, or set loss_type: simpo."
            )
        return self


class KtoSettings(ObjectiveSettings):
    """Settings of ``kto``."""

    aliases: ClassVar[Mapping[str, str]] = {
        "pref_beta": "beta",
        "rl_beta": "beta",
        "kto_chosen_weight": "desirable_weight",
        "kto_rejected_weight": "undesirable_weight",
        "kto_desirable_weight": "desirable_weight",
        "kto_undesirable_weight": "undesirable_weight",
    }

    beta: float = Field(
        default=0.1, ge=1e-6, le=1e6, description="strength of the penalty for deviating from the base model"
    )
    loss_type: KtoLossType = Field(default="kto", description="form of the loss")
    desirable_weight: float = Field(default=1.0, ge=0, le=1e6, description="weight of the losses of desirable replies")
    undesirable_weight: float = Field(
        default=1.0, ge=0, le=1e6, description="weight of the losses of undesirable replies"
    )

    @property
    def needs_kl(self) -> bool:
        return self.loss_type == "kto"


class GrpoSettings(ObjectiveSettings):
    """Settings of ``grpo``, with the names and the meaning of TRL's ``GRPOConfig``."""

    num_generations: int = Field(default=8, ge=2, le=1024, description="number of completions per prompt")
    max_completion_length: int = Field(
        default=256, ge=1, le=2**17, description="maximum number of tokens of a completion"
    )
    temperature: float = Field(default=1.0, gt=0, le=100, description="temperature of sampling and of the loss")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="share of probability that the most likely tokens have, to sample from"
    )
    top_k: int = Field(default=0, ge=0, le=10**6, description="number of most likely tokens to sample from; 0: all")
    beta: float = Field(
        default=0.0, ge=0, le=1e6, description="weight of the divergence from the base model in the loss"
    )
    loss_type: GrpoLossType = Field(default="dapo", description="what the sum over tokens is divided by")
    scale_rewards: Literal["group", "batch", "none"] = Field(
        default="group", description="rewards whose standard deviation divides the advantages"
    )
    mask_truncated_completions: bool = Field(
        default=False, description="whether completions that did not end are left out of the loss"
    )
    epsilon: float = Field(
        default=0.2, gt=0, le=1e6, description="clipping of probability ratios; no effect with one iteration"
    )
    epsilon_high: float | None = Field(
        default=None, gt=0, le=1e6, description="upper clipping; by default epsilon; no effect with one iteration"
    )
    num_iterations: int = Field(default=1, description="number of steps per generation; only 1 is supported")
    dynamic_sampling: int = Field(
        default=0,
        ge=0,
        le=100,
        description="how often another prompt is drawn for one whose completions all have the same reward (DAPO)",
    )

    @property
    def completions_per_row(self) -> int:
        return self.num_generations

    @property
    def logit_scale(self) -> float:
        return 1.0 / self.temperature

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _name_scale(cls, value: Any) -> Any:
        return {True: "group", False: "none"}.get(value, value) if isinstance(value, bool) else value

    @field_validator("num_iterations")
    @classmethod
    def _check_iterations(cls, value: int) -> int:
        if value != 1:
            raise ValueError(
                f"should be 1, found {value}: further steps on the same completions need clipped probability ratios, "
                "which ALTO does not compute yet. Remove the key."
            )
        return value


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
        scaled_by: For each metric, the settings that decide its scale. The scale of the loss depends on all settings.
        loss_unit: Unit of the loss, for reports; empty names the method instead.
        has_row_losses: Whether a job's loss is the mean of losses of independent rows, which the implementation returns
            (``rows["loss"]`` of its terms). Then evaluations on some of the rows can be compared.
        generates: Whether the model generates the replies that it learns from; rows are then prompts, each with a reply
            that a reward may compare with, and the task names its rewards (``reward_funcs``).
        follows_output_router_logits: Whether a job of a mixture of experts trains with the routers' load-balancing loss
            by default only if ``output_router_logits`` is true in the model's configuration.

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
    loss_unit: str = ""
    has_row_losses: bool = False
    generates: bool = False
    follows_output_router_logits: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.settings, type) or not issubclass(self.settings, ObjectiveSettings):
            raise SpecError(
                f"settings: expected a subclass of ObjectiveSettings, found {self.settings!r}. Make it such a subclass."
            )
        check_defaults(self.settings)
        if not isinstance(self.implementation, str) or ":" not in self.implementation:
            raise SpecError(
                f"implementation: expected text such as 'package.module:Class', found {self.implementation!r}. Give "
                "it in this form; the class is imported when training starts."
            )
        if self.problem_types and (self.is_paired is not False or self.is_labelled or self.needs_reference):
            raise SpecError(
                "problem_types: expected is_paired to be false with this field, and is_labelled and needs_reference "
                "not to be set. Texts with labels are not replies."
            )
        if self.is_labelled and self.is_paired is not False:
            raise SpecError(
                f"is_labelled: expected is_paired to be false with this field, found {self.is_paired}. Labelled rows "
                "are not pairs."
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
        "sft": ObjectiveEntry(
            implementation="alto.objectives.sft:Sft", is_paired=False, loss_unit="nats per token", has_row_losses=True
        ),
        "dpo": ObjectiveEntry(
            implementation="alto.objectives.dpo:Dpo",
            settings=DpoSettings,
            is_paired=True,
            needs_reference=True,
            metrics=(*PREFERENCE_METRICS, "kl"),
            scores=PREFERENCE_SCORES,
            scaled_by={"reward_margin": ("beta", "ld_alpha")},
            loss_unit="mean over pairs",
            has_row_losses=True,
        ),
        "orpo": ObjectiveEntry(
            implementation="alto.objectives.orpo:Orpo",
            settings=OrpoSettings,
            is_paired=True,
            metrics=(*PREFERENCE_METRICS, "chosen_loss"),
            scores=PREFERENCE_SCORES,
            scaled_by={"reward_margin": ("beta",)},
            loss_unit="mean over pairs",
            has_row_losses=True,
            follows_output_router_logits=True,
        ),
        "cpo": ObjectiveEntry(
            implementation="alto.objectives.cpo:Cpo",
            settings=CpoSettings,
            is_paired=True,
            metrics=(*PREFERENCE_METRICS, "chosen_loss"),
            scores=PREFERENCE_SCORES,
            scaled_by={"reward_margin": ("beta", "loss_type")},
            has_row_losses=True,
            follows_output_router_logits=True,
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
            implementation="alto.objectives.labelled:Classification",
            is_paired=False,
            problem_types=("single_label_classification", "multi_label_classification"),
            metrics=("accuracy", "macro_f1"),
            derived=("macro_f1",),
            scores=("accuracy", "macro_f1"),
            loss_unit="nats per row",
        ),
        "regression": ObjectiveEntry(
            implementation="alto.objectives.labelled:Regression",
            is_paired=False,
            problem_types=("regression",),
            metrics=("mse", "pearson"),
            derived=("pearson",),
            scores=("pearson",),
            loss_unit="mean squared error",
        ),
        "grpo": ObjectiveEntry(
            implementation="alto.objectives.grpo:Grpo",
            settings=GrpoSettings,
            is_paired=False,
            metrics=("reward", "completion_tokens", "truncated", "entropy"),
            scores=("reward",),
            loss_unit="negative mean reward",
            has_row_losses=True,
            generates=True,
        ),
    },
    check=_entry,
)
