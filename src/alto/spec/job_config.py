"""One configuration of a search space: the settings of a job, and the values derived from them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from alto.base import quoted
from alto.errors import UnsupportedError
from alto.spec import lr_schedules, module_names
from alto.spec.data_keys import MIXTURE_WEIGHTS, Weights, normalised
from alto.spec.lr_schedules import LrSchedulerType, OptimizerName
from alto.spec.method import Method, find_method
from alto.spec.module_names import ALL_LINEAR, PEFT_DEFAULT
from alto.spec.objective_settings import ObjectiveSettings
from alto.spec.validation import SpecModel, is_finite_number

BiasMode: TypeAlias = Literal["none", "all", "lora_only"]
"""The biases of the base model that are trained: none, all, or those of the modules with adapters."""

InitLoraWeights: TypeAlias = Literal["default", "gaussian", "orthogonal"]
"""The initial weights; ``default`` is PEFT's ``True``: ``A`` Kaiming-uniform and ``B`` zero. With ``orthogonal`` both
are random, and their product is zero."""

_CHANGES_THE_BASE = (
    "it subtracts the adapter's initial product from the base model's weights, which all jobs share and which must "
    "not change"
)
_NEEDS_DATA = "it is computed from forward or backward passes of the base model on the training rows"
_OTHER_INITS = {
    "corda": _CHANGES_THE_BASE,
    "loftq": _CHANGES_THE_BASE,
    "mica": "it is a variant of LoRA, in which B is not trained",
    "olora": _CHANGES_THE_BASE,
    "pissa": _CHANGES_THE_BASE,
    "eva": _NEEDS_DATA,
    "lora_ga": _NEEDS_DATA,
}
"""PEFT's other initialisations, by the beginning of their names, with the reason why they are refused."""


MAPPING_FIELDS = ("alpha_pattern", "lr_scheduler_kwargs", "optim_args", "rank_pattern")
"""Fields of a job that are mappings; they are stored as tuples of pairs, in the order in which they were written."""

SHAPE_FIELDS = (
    *("r", "lora_alpha", "use_rslora", "target_modules", "target_parameters", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
    *("bias", "use_dora", "modules_to_save"),
)
"""Fields of a job that decide its adapter's modules, their ranks and scales, and its extra trained tensors."""

_WITH_TARGET_PARAMETERS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "init_lora_weights": (("default", "gaussian"), "the matrices of all experts would be initialised as one matrix"),
    "lora_dropout": ((0,), "PEFT adds the adapter to the weights of experts, where there is no input to drop"),
    "use_dora": ((False,), "PEFT has no DoRA for experts and routers"),
    "bias": (("none",), "PEFT's layers of experts and routers have no bias that it trains in this way"),
    "optim": (("adamw_torch",), "the shapes of its state would not match those of PEFT's matrices"),
}
"""Fields that ``target_parameters`` restricts: the allowed values, and why others are refused."""

_MAX_RANK = 1024
_MAX_SEED = 2**32 - 1
_MAX_STEPS = 10**9
_MULTIPLE_OF_R = re.compile(r"(?:(?P<factor>\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*\*\s*)?r")


def _supported_init(value: object) -> object:
    """Return ``value`` with true replaced by ``default`` and text in lower case.

    Raises:
        UnsupportedError: ``value`` is false or one of PEFT's other initialisations.
    """
    if value is True:
        return "default"
    if value is False:
        raise UnsupportedError(
            "init_lora_weights: expected 'default', 'gaussian' or 'orthogonal', found false: with A and B both "
            "random, training would not start from the base model. Remove the key."
        )
    if isinstance(value, str):
        value = value.lower()
        why = next((why for start, why in _OTHER_INITS.items() if value.startswith(start)), None)
        if why is not None:
            raise UnsupportedError(
                f"init_lora_weights: expected 'default', 'gaussian' or 'orthogonal', found {quoted(value)}: {why}. "
                "Use one of the three."
            )
    return value


def _ranks_by_module(value: object) -> object:
    allowed = f"a whole number >= 1 and <= {_MAX_RANK}"
    return module_names.per_module(value, allowed, lambda rank: isinstance(rank, int) and 1 <= rank <= _MAX_RANK)


def _alphas_by_module(value: object) -> object:
    found = module_names.per_module(value, "a finite number > 0", lambda alpha: is_finite_number(alpha) and alpha > 0)
    return tuple((name, float(alpha)) for name, alpha in found)


_RankPattern = Annotated[tuple[tuple[str, int], ...], BeforeValidator(_ranks_by_module), PlainSerializer(dict)]
_AlphaPattern = Annotated[tuple[tuple[str, float], ...], BeforeValidator(_alphas_by_module), PlainSerializer(dict)]
_OptimizerArgs = Annotated[
    tuple[tuple[str, Any], ...], BeforeValidator(lr_schedules.optimizer_args), PlainSerializer(dict)
]
_SchedulerKwargs = Annotated[
    tuple[tuple[str, Any], ...], BeforeValidator(lr_schedules.scheduler_kwargs), PlainSerializer(dict)
]


class JobConfig(SpecModel):
    """All settings that decide one job's training, resolved and checked.

    Fields are spelled as in Hugging Face's ``TrainingArguments`` and PEFT's ``LoraConfig``; the constructor also
    accepts the aliases in :data:`alto.spec.keys.JOB_ALIASES`. Steps are optimizer steps, rows are training examples;
    methods that take a number of rows expect the number of rows of the training split.

    Some values are stored in a different form:

    - ``lora_alpha`` may be ``"r"`` or ``"<number>*r"``; it is stored as a number.
    - ``target_modules`` may be one name, several names, or a pattern. It is stored as ``"all-linear"``,
      ``"peft-default"``, a sorted tuple of names, or a regular expression. ``exclude_modules`` is stored in the same
      way.
    - The mappings ``rank_pattern``, ``alpha_pattern``, ``lr_scheduler_kwargs`` and ``optim_args`` are stored as tuples
      of pairs; :meth:`to_dict` returns mappings. ``optim_args`` may also be text, ``"momentum=0.9,nesterov=true"``.
    - ``init_lora_weights`` true is stored as ``"default"``, and ``max_grad_norm`` 0 as None (no clipping).
    - ``mixture_weights`` is stored as shares that add up to 1.
    - ``optim`` is stored in one spelling if there are several.

    ``warmup_steps`` below 1 is a share of the steps. ``objective`` holds the settings of the method; :meth:`of` and
    :meth:`to_dict` have them as ordinary keys, as a task file does.

    Raises:
        SpecError: A value is out of its domain, or values contradict each other.
        UnsupportedError: An initialisation of PEFT or an optimizer of transformers is not supported.
        UnknownKeyError, ConflictingKeysError, UnsupportedError: See :func:`alto.spec.keys.canonical_keys`.
    """

    learning_rate: float = Field(default=2e-4, gt=0, description="the peak learning rate")
    per_device_train_batch_size: int = Field(default=8, ge=1, le=4096, description="number of rows in one micro-step")
    gradient_accumulation_steps: int = Field(
        default=1, ge=1, le=4096, description="number of micro-steps in one step, which multiply its rows"
    )
    r: int = Field(default=16, ge=1, le=_MAX_RANK, description="the adapter's rank")
    lora_alpha: float = Field(
        default_factory=lambda fields: 2.0 * fields["r"], gt=0, description="adapter outputs are scaled by lora_alpha/r"
    )
    use_rslora: bool = Field(default=False, description="scale adapter outputs by lora_alpha/sqrt(r) instead")
    use_dora: bool = Field(
        default=False, description="also train the magnitude of every row of an adapted weight (DoRA)"
    )
    init_lora_weights: Annotated[InitLoraWeights, BeforeValidator(_supported_init)] = Field(
        default="default", description="how the adapter starts"
    )
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="share of adapter inputs dropped in training")
    target_modules: Annotated[str | tuple[str, ...], BeforeValidator(module_names.targeted_modules)] = Field(
        default=ALL_LINEAR, description="which linear layers get an adapter"
    )
    target_parameters: Annotated[tuple[str, ...] | None, BeforeValidator(module_names.parameter_names)] = Field(
        default=None, description="parameters of stacked experts that get an adapter per expert"
    )
    exclude_modules: Annotated[str | tuple[str, ...] | None, BeforeValidator(module_names.chosen_modules)] = Field(
        default=None, description="which linear layers get no adapter"
    )
    layers_to_transform: Annotated[tuple[int, ...] | None, BeforeValidator(module_names.layer_indices)] = Field(
        default=None, description="indices of the model's layers with adapters"
    )
    layers_pattern: Annotated[tuple[str, ...] | None, BeforeValidator(module_names.layer_parents)] = Field(
        default=None, description="name of the list that holds the model's layers"
    )
    modules_to_save: Annotated[tuple[str, ...] | None, BeforeValidator(module_names.saved_modules)] = Field(
        default=None, description="which of the output head and the token embeddings are trained in full"
    )
    rank_pattern: _RankPattern = Field(default=(), description="ranks of some modules, by name or pattern")
    alpha_pattern: _AlphaPattern = Field(default=(), description="lora_alpha of some modules, by name or pattern")
    bias: BiasMode = Field(default="none", description="which biases of the base model are trained too")
    neftune_noise_alpha: float | None = Field(
        default=None, ge=0, description="size of the noise on token embeddings in training (NEFTune)"
    )
    router_aux_loss_coef: float | None = Field(
        default=None, ge=0, description="weight of the loss that balances the load of experts; by default as in TRL"
    )
    loraplus_lr_ratio: float = Field(default=1.0, gt=0, description="ratio of the learning rates of B and A (LoRA+)")
    num_train_epochs: float = Field(
        default=3, gt=0, le=_MAX_STEPS, description="epochs over the training rows; steps are rounded up"
    )
    max_steps: int | None = Field(
        default=None, ge=1, le=_MAX_STEPS, description="number of steps; overrides num_train_epochs"
    )
    lr_scheduler_type: Annotated[LrSchedulerType, BeforeValidator(lr_schedules.supported_scheduler)] = Field(
        default="linear", description="schedule of the learning rate"
    )
    lr_scheduler_kwargs: _SchedulerKwargs = Field(default=(), description="settings of the learning-rate schedule")
    warmup_steps: float = Field(
        default=0,
        ge=0,
        le=_MAX_STEPS,
        description="number of steps with rising learning rate, or their share if below 1",
    )
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1, description="share of the steps with rising learning rate")
    optim: Annotated[OptimizerName, BeforeValidator(lr_schedules.supported_optimizer)] = Field(
        default="adamw_torch", description="the optimizer, as in transformers"
    )
    optim_args: _OptimizerArgs = Field(default=(), description="settings of an optimizer other than AdamW")
    weight_decay: float = Field(
        default=0.0, ge=0, description="decoupled decay; L2 penalty with sgd, rmsprop and adagrad, as in torch"
    )
    max_grad_norm: float | None = Field(default=1.0, ge=0, description="gradients are clipped to this norm")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="decay rate of AdamW's first moment")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="decay rate of AdamW's second moment")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="term in the denominator of AdamW")
    seed: int = Field(default=42, ge=0, le=_MAX_SEED, description="seed of initial weights, data order and dropout")
    mixture_weights: Annotated[Weights | None, BeforeValidator(normalised)] = Field(
        default=None, description="weight of every source of a mixture, by name; by default those set in the sources"
    )
    objective: SerializeAsAny[ObjectiveSettings] = Field(
        default=ObjectiveSettings(), description="settings of the method"
    )

    def __init__(self, /, **values: Any) -> None:
        if not values.keys() <= JobConfig.model_fields.keys():
            # A setting of another method gets an error of its own, not that of a misspelt field.
            values = find_method("sft").canonical(values, JobConfig.model_fields, "the job")
        super().__init__(**values)

    @classmethod
    def of(cls, method: Method, values: Mapping[str, Any]) -> JobConfig:
        """Return the configuration of a job of ``method`` from one flat mapping, as in task files and journals.

        Args:
            values: Fields of every job and settings of the method, in any spelling; settings of ALTO's other methods
                are allowed if they are null.
        """
        given = method.canonical(values, JOB_FIELDS, "the job")
        common = {key: value for key, value in given.items() if key not in method.fields}
        config = cls(**common, objective=method.settings(given))
        if config.gradient_accumulation_steps > 1 and method.compares_replies:
            raise UnsupportedError(
                f"gradient_accumulation_steps: expected 1 with method {method.name!r}, found "
                f"{config.gradient_accumulation_steps}: TRL averages over micro-batches, not over the rows of a step, "
                "and the last micro-batch of an epoch may be smaller. Multiply per_device_train_batch_size by it."
            )
        if config.router_aux_loss_coef and method.entry.problem_types:
            raise UnsupportedError(
                f"router_aux_loss_coef: expected no value with method {method.name!r}, found "
                f"{config.router_aux_loss_coef:g}: transformers does not add this loss to that of a classification "
                "head. Remove the key."
            )
        if config.neftune_noise_alpha and method.compares_replies:
            raise UnsupportedError(
                f"neftune_noise_alpha: expected no value with method {method.name!r}, found "
                f"{config.neftune_noise_alpha}: replies to one prompt are compared, and the noise on each would "
                "differ. Remove the key."
            )
        return config

    def replace(self, **changes: Any) -> Self:
        """Return a new, fully checked object with some fields or settings of the method changed (canonical names)."""
        settings = type(self.objective)
        values = {"objective": None, **self.to_dict(), **changes}
        given = {key: values.pop(key) for key in settings.model_fields}
        values["objective"] = values["objective"] or settings(**given)
        return type(self)(**values)

    @model_serializer(mode="wrap")
    def _flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        settings = values.pop("objective", {})
        weights = values.pop(MIXTURE_WEIGHTS, None)
        mixture = {} if weights is None else {MIXTURE_WEIGHTS: dict(weights)}
        return {**values, **mixture, **settings}

    @field_validator("lora_alpha", mode="before")
    @classmethod
    def _resolve_alpha(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, str):
            return value
        match = _MULTIPLE_OF_R.fullmatch(value.strip())
        if match is None:
            raise ValueError(
                f"should be a number > 0, 'r', or a multiple of r such as '2*r', found {quoted(value)}. "
                "Use one of these, a number without quotes."
            )
        # An invalid rank is reported separately; any positive number will do here.
        return float(match["factor"] or 1) * info.data.get("r", 1)

    @field_validator("warmup_steps", mode="after")
    @classmethod
    def _check_warmup_steps(cls, value: float) -> float:
        if value > 1 and not value.is_integer():
            raise ValueError(
                f"should be an integer number of steps, or a fraction below 1, found {value}. Set one of the two."
            )
        return int(value) if value.is_integer() else value

    @field_validator("num_train_epochs", mode="after")
    @classmethod
    def _keep_whole_numbers(cls, value: float) -> float:
        # Hugging Face types this field as a float: 3.0 and 3 are the same configuration, and are shown as 3.
        return int(value) if value.is_integer() else value

    @field_validator("max_grad_norm", "neftune_noise_alpha", mode="after")
    @classmethod
    def _zero_is_off(cls, value: float | None) -> float | None:
        return value or None

    @model_validator(mode="after")
    def _check_targets(self) -> JobConfig:
        if not self.target_modules and not self.target_parameters:
            raise ValueError(
                f"target_modules should be {ALL_LINEAR!r}, a module name, a list of names or a pattern, found []. "
                "For example: [q_proj, v_proj]."
            )
        by_module = ("rank_pattern", "alpha_pattern", "layers_to_transform")
        if self.target_parameters and (given := next((key for key in by_module if getattr(self, key)), None)):
            raise ValueError(
                f"{given} should not come with target_parameters, found both: PEFT reads it differently for "
                "parameters and for modules. Remove one of the two."
            )
        for key, (allowed, why) in _WITH_TARGET_PARAMETERS.items() if self.target_parameters else ():
            if (found := getattr(self, key)) not in allowed:
                expected, shown = " or ".join(map(repr, allowed)).lower(), repr(found).lower()  # as YAML writes them
                raise ValueError(
                    f"{key} should be {expected} with target_parameters, found {shown}: {why}. Remove one of the two."
                )
        odd = next((rank for rank in (self.r, *(rank for _, rank in self.rank_pattern)) if rank % 2), None)
        if self.init_lora_weights == "orthogonal" and odd is not None:
            raise ValueError(
                "init_lora_weights 'orthogonal' should come with even ranks, because it gives half of a rank to A and "
                f"half to B, found rank {odd}. Use even ranks in r and rank_pattern, or a different init_lora_weights."
            )
        if self.layers_pattern is not None and self.layers_to_transform is None:
            raise ValueError(
                f"layers_pattern should come with layers_to_transform, found {', '.join(self.layers_pattern)} alone. "
                "Add layers_to_transform with the indices of the layers, or remove the key."
            )
        is_pattern = isinstance(self.target_modules, str) and self.target_modules not in (ALL_LINEAR, PEFT_DEFAULT)
        if is_pattern and self.layers_to_transform is not None:
            raise ValueError(
                "layers_to_transform should come with names in target_modules, found a pattern, which PEFT does not "
                "combine with it. Put the layers into the pattern, or name the modules."
            )
        return self

    @model_validator(mode="after")
    def _check_steps(self) -> JobConfig:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"warmup_steps and warmup_ratio exclude each other: expected one of them, found warmup_steps="
                f"{self.warmup_steps} and warmup_ratio={self.warmup_ratio}. Remove one."
            )
        if self.lr_scheduler_type == "constant" and (self.warmup_steps or self.warmup_ratio):
            # Hugging Face silently ignores the warmup here.
            raise ValueError(
                "lr_scheduler_type 'constant' has no warmup, found one of warmup_steps or warmup_ratio above 0. "
                "Use 'constant_with_warmup', or remove the warmup."
            )
        if self.objective.needs_kl and self.rows_per_step < 2:
            raise ValueError(
                "per_device_train_batch_size should be above 1 with loss_type 'kto', found 1: the divergence is "
                "estimated from replies of other rows of a batch. Raise it, or set loss_type: apo_zero_unpaired."
            )
        count = self.objective.completions_per_row
        if (batch := self.sequences_per_step) % count:
            raise ValueError(
                f"per_device_train_batch_size times gradient_accumulation_steps should be a multiple of "
                f"num_generations, because it counts completions, found {batch} and {count}. Change one of them; for "
                f"{max(1, round(batch / count))} prompts per step, the product is "
                f"{max(1, round(batch / count)) * count}."
            )
        lr_schedules.check_schedule(self.lr_scheduler_type, dict(self.lr_scheduler_kwargs), self.learning_rate)
        lr_schedules.check_optimizer_args(self.optim, dict(self.optim_args))
        return self

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step. The loss is computed over all of them together, so the division into
        micro-batches changes nothing, except for rows with labels (:meth:`row_factors`). With a method that generates,
        a batch counts completions, as in TRL, and the rows are its prompts."""
        return self.sequences_per_step // self.objective.completions_per_row

    @property
    def sequences_per_step(self) -> int:
        """Rows of a step, or completions if the job generates them."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    def row_factors(self, num_rows: int) -> tuple[float, ...]:
        """Return a factor per row of a step that turns the mean over rows into the mean over micro-step means.

        All factors are 1 if every micro-step has the same number of rows.

        Args:
            num_rows: Rows of the step; at the end of an epoch, the last micro-step may have fewer than the others.
        """
        size = self.per_device_train_batch_size
        num_micro_steps = math.ceil(num_rows / size)
        sizes = [min(size, num_rows - row // size * size) for row in range(num_rows)]
        return tuple(num_rows / (num_micro_steps * of_micro_step) for of_micro_step in sizes)

    def steps_per_epoch(self, num_rows: int) -> int:
        """Return the number of steps of one epoch; the last, smaller batch is kept, as in HF's Trainer."""
        assert num_rows >= 1, f"an epoch needs rows, got {num_rows}"
        return math.ceil(num_rows / self.rows_per_step)

    def total_steps(self, num_rows: int) -> int:
        """Return the number of steps of the job without early exit; a fraction is rounded up, as in HF's Trainer."""
        return self.max_steps or math.ceil(self.num_train_epochs * self.steps_per_epoch(num_rows))

    def samples_after(self, step: int, num_rows: int) -> int:
        """Return the number of rows trained after ``step`` steps, counting repeats over epochs."""
        assert step >= 0, f"steps are counted from 0, got {step}"
        epochs, steps = divmod(step, self.steps_per_epoch(num_rows))
        return epochs * num_rows + steps * self.rows_per_step

    def num_warmup_steps(self, total_steps: int) -> int:
        """Return the number of warmup steps in a job of ``total_steps``; a share is rounded up, as in HF's Trainer."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(total_steps * (self.warmup_steps or self.warmup_ratio))

    def lr_warmup_fraction(self, total_steps: int) -> float:
        """Return the share of ``total_steps`` in which the learning rate rises, at most 1."""
        return min(1.0, self.num_warmup_steps(total_steps) / total_steps)

    def earliest_rung(self, total_steps: int) -> float:
        """Return the share of ``total_steps`` before which the job cannot be compared: a quarter of its warmup, but two
        steps, because the first step of a warmup has a learning rate of 0. At most 2/3; 0 without a warmup."""
        num_warmup = min(self.num_warmup_steps(total_steps), total_steps)
        return min(max(EARLIEST_IN_WARMUP * num_warmup, 2) / total_steps, 2 / 3) if num_warmup else 0.0

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """Return the rate of the step with 0-based index ``step``, bit-equal to ``transformers.get_scheduler``."""
        return self.learning_rate * lr_schedules.schedule_factor(
            self.lr_scheduler_type,
            step,
            warmup=self.num_warmup_steps(total_steps),
            total_steps=total_steps,
            learning_rate=self.learning_rate,
            kwargs=dict(self.lr_scheduler_kwargs),
        )


EARLIEST_IN_WARMUP = 0.25
"""Share of a learning-rate warmup after which jobs may be compared. On recorded sweeps of supervised fine-tuning with
warmups of 3 to 10 %, comparing that early loses nothing (``benchmarks/policies``)."""

JOB_FIELDS: tuple[str, ...] = tuple(key for key in JobConfig.model_fields if key != "objective")
"""Canonical names of all fields that may vary between jobs of any method."""

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM allocates memory for (``--max-lora-rank``); an adapter uses the smallest that is large enough."""


def unserved_by_vllm(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings with which vLLM cannot serve an adapter; empty if it can.

    Args:
        settings: Settings of a job, or an ``adapter_config.json``.
    """
    found = [key for key in ("use_dora", "modules_to_save") if settings.get(key)]
    if settings.get("bias") not in (None, "none"):
        found.append("bias")
    ranks = [settings.get("r") or 0, *dict(settings.get("rank_pattern") or ()).values()]
    if max(ranks) > VLLM_RANKS[-1]:
        found.append(f"a rank above {VLLM_RANKS[-1]}")
    return found
