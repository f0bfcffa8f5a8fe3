"""One configuration of a search space: the settings of a job, and the values derived from them."""

from __future__ import annotations

import math
import re
import textwrap
import warnings
from collections.abc import Mapping
from typing import Any, Literal, Self, TypeAlias

from pydantic import (
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from alto.errors import UnsupportedError
from alto.spec.keys import JOB_ALIASES, canonical_keys
from alto.spec.method import Method, find_method
from alto.spec.mixture import MIXTURE_WEIGHTS, Weights, normalised
from alto.spec.objectives import ObjectiveSettings
from alto.spec.quoting import quoted
from alto.spec.validation import SpecModel

__all__ = ["ALL_LINEAR", "JOB_FIELDS", "InitLoraWeights", "JobConfig", "LrSchedulerType", "OptimizerName"]

ALL_LINEAR = "all-linear"
"""As in PEFT: every linear layer of the model except its output head."""

LrSchedulerType: TypeAlias = Literal["linear", "cosine", "constant", "constant_with_warmup"]

InitLoraWeights: TypeAlias = Literal["default", "gaussian"]
"""How ``A`` starts; ``default`` is PEFT's ``True``: Kaiming-uniform."""

OptimizerName: TypeAlias = Literal["adamw_torch", "adamw_8bit", "paged_adamw_8bit"]
"""AdamW with its state in 32 bits, or in 8 bits as bitsandbytes keeps it, or that in memory that can be paged out."""

_MAX_SEED = 2**32 - 1
_MAX_STEPS = 10**9
_MODULE_NAME = r"[A-Za-z0-9_.-]+"
_OTHER_INITS = ("corda", "eva", "loftq", "lora_ga", "mica", "olora", "orthogonal", "pissa")
_OTHER_SPELLINGS_OF_OPTIM = {"adamw": "adamw_torch", "adamw_torch_fused": "adamw_torch", "adamw_bnb_8bit": "adamw_8bit"}
_MULTIPLE_OF_R = re.compile(r"(?:(?P<factor>\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*\*\s*)?r")


class JobConfig(SpecModel):
    """All settings of one job's trajectory, resolved and checked.

    Fields carry the spelling of Hugging Face's ``TrainingArguments`` and PEFT's ``LoraConfig``; the constructor also
    takes the aliases in :data:`alto.spec.keys.JOB_ALIASES`. Steps are optimizer steps, rows are training examples;
    a row count given to a method is that of the training split.

    ``lora_alpha`` may be given as a number, ``"r"`` or ``"<number>*r"``; the finished object holds the number.
    ``target_modules`` may be given as one name, several, or a pattern; the finished object holds ``"all-linear"``, a
    sorted tuple of names, or a regular expression. ``init_lora_weights`` true is stored as ``"default"``;
    ``mixture_weights`` are given as a mapping, and stored as shares that add up to 1; ``max_grad_norm`` 0 as None: no
    clipping; ``optim`` in one spelling where there are several. ``objective`` holds the
    settings of the method; :meth:`of` takes them beside the others, as a task file does, and so does :meth:`to_dict`.

    Raises:
        SpecError: A value is out of its domain, or two of them contradict each other.
        UnsupportedError: One of PEFT's other ways to start an adapter.
        UnknownKeyError, ConflictingKeysError, UnsupportedError: See :func:`alto.spec.keys.canonical_keys`.
    """

    learning_rate: float = Field(default=2e-4, gt=0, description="the peak learning rate")
    per_device_train_batch_size: int = Field(default=8, ge=1, le=4096, description="rows of one step")
    r: int = Field(default=16, ge=1, le=1024, description="the adapter's rank")
    lora_alpha: float = Field(
        default_factory=lambda fields: 2.0 * fields["r"], gt=0, description="adapter outputs are scaled by lora_alpha/r"
    )
    use_rslora: bool = Field(default=False, description="scale adapter outputs by lora_alpha/sqrt(r) instead")
    init_lora_weights: InitLoraWeights = Field(default="default", description="how the adapter's A starts")
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="share of adapter inputs dropped in training")
    target_modules: str | tuple[str, ...] = Field(default=ALL_LINEAR, description="which linear layers get an adapter")
    target_parameters: tuple[str, ...] = Field(
        default=(), description="parameters of stacked experts that get an adapter per expert"
    )
    loraplus_lr_ratio: float = Field(default=1.0, gt=0, description="learning rate of B over that of A (LoRA+)")
    num_train_epochs: int = Field(default=3, ge=1, le=_MAX_STEPS, description="epochs over the training rows")
    max_steps: int | None = Field(default=None, ge=1, le=_MAX_STEPS, description="steps; overrides num_train_epochs")
    lr_scheduler_type: LrSchedulerType = Field(default="linear", description="course of the learning rate")
    warmup_steps: int = Field(
        default=0, ge=0, le=_MAX_STEPS, description="steps of rising learning rate; a share is warmup_ratio"
    )
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1, description="share of the steps with rising learning rate")
    optim: OptimizerName = Field(default="adamw_torch", description="which AdamW")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled decay")
    max_grad_norm: float | None = Field(default=1.0, ge=0, description="gradients are clipped to this norm")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's decay of the first moment")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="AdamW's decay of the second moment")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="AdamW's term in the denominator")
    seed: int = Field(default=42, ge=0, le=_MAX_SEED, description="of initial weights, data order and dropout")
    mixture_weights: Weights | None = Field(
        default=None, description="weight of every source of a mixture, by name; those of the sources by default"
    )
    objective: SerializeAsAny[ObjectiveSettings] = Field(
        default=ObjectiveSettings(), description="settings of the method"
    )

    def __init__(self, /, **values: Any) -> None:
        if not values.keys() <= JobConfig.model_fields.keys():
            # A setting of another method is refused as such, and not as a misspelt field.
            method = find_method("sft")
            fields, aliases = (*JobConfig.model_fields, *method.known_keys), {**JOB_ALIASES, **method.aliases}
            given = canonical_keys(values, fields=fields, aliases=aliases, where="the job")
            values = method.without_others(given)
        super().__init__(**values)

    @classmethod
    def of(cls, method: Method, values: Mapping[str, Any]) -> JobConfig:
        """The configuration of a job of ``method`` from one flat mapping, as task files and journals have it.

        Args:
            values: Fields of every job and settings of the method, in any spelling; settings of ALTO's other methods
                are allowed if they are null.

        Raises:
            SpecError, UnknownKeyError, ConflictingKeysError, UnsupportedError: As the constructor does.
        """
        fields, aliases = (*JOB_FIELDS, *method.known_keys), {**JOB_ALIASES, **method.aliases}
        given = method.without_others(canonical_keys(values, fields=fields, aliases=aliases, where="the job"))
        common = {key: value for key, value in given.items() if key not in method.fields}
        return cls(**common, objective=method.settings(given))

    def replace(self, **changes: Any) -> Self:
        """A new, fully checked object with some fields, or settings of the same method, changed (canonical names).

        Raises:
            SpecError: As the constructor does.
        """
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
                "Write one of these, a number without quotes and with a point before its exponent."
            )
        # A refused rank is reported separately; any positive number replaces it here.
        return float(match["factor"] or 1) * info.data.get("r", 1)

    @field_validator("target_modules", mode="before")
    @classmethod
    def _normalise_targets(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value.lower() == ALL_LINEAR:
                return ALL_LINEAR
            return (value,) if re.fullmatch(_MODULE_NAME, value) else _checked_pattern(value)
        if not isinstance(value, list | tuple):
            raise ValueError(
                f"should be {ALL_LINEAR!r}, a module name, a list of names or a pattern, found {quoted(value)}. "
                f"Write for example [q_proj, v_proj]."
            )
        for name in value:
            if not isinstance(name, str) or not re.fullmatch(_MODULE_NAME, name):
                raise ValueError(
                    f"should name modules by letters, digits, '_', '.' and '-', found {quoted(name)} in a list. "
                    f"A pattern cannot be in a list: join several with '|'."
                )
        if len(set(value)) < len(value):
            raise ValueError(f"should name each module once, found {quoted(value)}. Remove the repeated name.")
        if ALL_LINEAR in value:
            if len(value) > 1:
                raise ValueError(f"should be {ALL_LINEAR!r} alone or names alone, found {quoted(value)}. Choose one.")
            return ALL_LINEAR
        return tuple(sorted(value))

    @field_validator("target_parameters", mode="before")
    @classmethod
    def _normalise_parameters(cls, value: Any) -> Any:
        names = (value,) if isinstance(value, str) else value or ()
        if not isinstance(names, list | tuple) or not all(
            isinstance(name, str) and re.fullmatch(_MODULE_NAME, name) for name in names
        ):
            raise ValueError(
                f"should be a list of names of parameters, found {quoted(value)}. Write for example "
                "[experts.gate_up_proj, experts.down_proj]."
            )
        if len(set(names)) < len(names):
            raise ValueError(f"should name each parameter once, found {quoted(value)}. Remove the repeated name.")
        return tuple(sorted(names))

    @field_validator("init_lora_weights", mode="before")
    @classmethod
    def _name_the_init(cls, value: Any) -> Any:
        if value is True:
            return "default"
        if value is False:
            raise UnsupportedError(
                "init_lora_weights: expected 'default' or 'gaussian', found false: with A and B both random, training "
                "would not start from the base model. Remove the key."
            )
        if isinstance(value, str):
            value = value.lower()
            if value.startswith(_OTHER_INITS):
                raise UnsupportedError(
                    f"init_lora_weights: expected 'default' or 'gaussian', found {quoted(value)}, which is not "
                    f"supported. Write one of the two."
                )
        return value

    @field_validator("optim", mode="before")
    @classmethod
    def _choose_a_spelling(cls, value: Any) -> Any:
        return _OTHER_SPELLINGS_OF_OPTIM.get(value, value) if isinstance(value, str) else value

    @field_validator("num_train_epochs", mode="before")
    @classmethod
    def _accept_whole_float(cls, value: Any) -> Any:
        # Hugging Face types this field as a float, so existing files have 3.0.
        return int(value) if isinstance(value, float) and value.is_integer() else value

    @field_validator("mixture_weights", mode="before")
    @classmethod
    def _normalise_weights(cls, value: Any) -> Any:
        return None if value is None else normalised(value)

    @field_validator("max_grad_norm", mode="after")
    @classmethod
    def _zero_is_no_clipping(cls, value: float | None) -> float | None:
        return value or None

    @model_validator(mode="after")
    def _check_targets(self) -> JobConfig:
        if not self.target_modules and not self.target_parameters:
            raise ValueError(
                f"target_modules should be {ALL_LINEAR!r}, a module name, a list of names or a pattern, found []. "
                "Write for example [q_proj, v_proj]."
            )
        if self.target_parameters and self.lora_dropout:
            raise ValueError(
                f"lora_dropout should be 0 with target_parameters, found {self.lora_dropout:g}: PEFT adds the adapter "
                "to the weights of experts, where there is no input to drop. Remove one of the two."
            )
        if self.target_parameters and self.optim.endswith("8bit"):
            raise ValueError(
                f"optim should be 'adamw_torch' with target_parameters, found {quoted(self.optim)}, whose blocks of "
                "numbers would differ from those of PEFT's matrices. Remove one of the two."
            )
        return self

    @model_validator(mode="after")
    def _check_warmup(self) -> JobConfig:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"warmup_steps and warmup_ratio exclude each other: expected one of them, found warmup_steps="
                f"{self.warmup_steps} and warmup_ratio={self.warmup_ratio}. Remove one."
            )
        if self.lr_scheduler_type == "constant" and (self.warmup_steps or self.warmup_ratio):
            # Hugging Face silently ignores the warmup here.
            raise ValueError(
                "lr_scheduler_type 'constant' has no warmup, found one of warmup_steps or warmup_ratio above 0. "
                "Write 'constant_with_warmup', or remove the warmup."
            )
        return self

    @model_validator(mode="after")
    def _check_batch_of_others(self) -> JobConfig:
        if self.objective.needs_kl and self.per_device_train_batch_size < 2:
            raise ValueError(
                "per_device_train_batch_size should be above 1 with loss_type 'kto', found 1: the divergence is "
                "estimated from replies of other rows of a batch. Raise it, or write loss_type: apo_zero_unpaired."
            )
        return self

    def steps_per_epoch(self, num_rows: int) -> int:
        """Steps of one epoch over ``num_rows`` rows; a last, smaller batch is kept, as HF's Trainer does."""
        assert num_rows >= 1, f"an epoch needs rows, got {num_rows}"
        return math.ceil(num_rows / self.per_device_train_batch_size)

    def total_steps(self, num_rows: int) -> int:
        """Steps of the whole job if nothing ends it early."""
        return self.max_steps or self.num_train_epochs * self.steps_per_epoch(num_rows)

    def samples_after(self, step: int, num_rows: int) -> int:
        """Rows trained on after ``step`` steps, repeats over epochs counted."""
        assert step >= 0, f"steps are counted from 0, got {step}"
        epochs, steps = divmod(step, self.steps_per_epoch(num_rows))
        return epochs * num_rows + steps * self.per_device_train_batch_size

    def num_warmup_steps(self, total_steps: int) -> int:
        """Steps of rising learning rate in a job of ``total_steps``: a ratio is rounded up, as HF's Trainer does."""
        return self.warmup_steps or math.ceil(total_steps * self.warmup_ratio)

    def lr_warmup_share(self, total_steps: int) -> float:
        """The share of ``total_steps`` in which the learning rate rises, at most 1."""
        return min(1.0, self.num_warmup_steps(total_steps) / total_steps)

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """The rate that the step with 0-based index ``step`` uses: ``transformers.get_scheduler``, to the last bit."""
        return self.learning_rate * self._schedule_factor(step, total_steps)

    def _schedule_factor(self, step: int, total_steps: int) -> float:
        warmup = self.num_warmup_steps(total_steps)
        if step < warmup:
            return step / warmup
        decay_steps = max(1, total_steps - warmup)
        match self.lr_scheduler_type:
            case "constant" | "constant_with_warmup":
                return 1.0
            case "linear":
                return max(0.0, (total_steps - step) / decay_steps)
            case "cosine":
                return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((step - warmup) / decay_steps))))


def _checked_pattern(text: str) -> str:
    """``text`` if it can be a regular expression over module names.

    Raises:
        ValueError: It cannot, or is a list of names that has lost its brackets.
    """
    if not text.strip():
        raise ValueError(
            f"should be {ALL_LINEAR!r}, names or a pattern, found {quoted(text)}. Remove the key for the default."
        )
    names = re.split(r"[\s,;]+", text.strip())
    if all(re.fullmatch(_MODULE_NAME, name) for name in names):
        listed = textwrap.shorten(", ".join(names), 80, placeholder=" ...")
        raise ValueError(f"should be a list to hold several names, found {quoted(text)}. Write [{listed}].")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the meaning of the pattern in a later Python
            re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(
            f"should be a name, a list of names or a regular expression, found {quoted(text)}: {error}. "
            f"Write for example '.*\\.(q|v)_proj'."
        ) from None
    return text


JOB_FIELDS: tuple[str, ...] = tuple(key for key in JobConfig.model_fields if key != "objective")
"""Canonical names of all fields that may vary between jobs of any method."""
