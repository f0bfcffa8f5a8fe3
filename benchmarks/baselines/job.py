"""Common parts of the baselines that train one job at a time: the prepared task, a job's settings, and its results.

All choices here favour the baselines: rows are tokenised and the base model is loaded once per sweep, not once per job.
The loss means the same in all of them and in ALTO: the mean over the trained tokens of the batch; for a validation set,
the mean over all of its trained tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "CONFIG_KEYS",
    "FIXED",
    "IGNORED",
    "BaselineJob",
    "Evaluation",
    "JobSettings",
    "Order",
    "Prepared",
    "check_eval_steps",
    "common_prefix",
    "epoch_order",
    "prepare",
]

IGNORED = -100
"""Label of a token that is not trained."""

Order = Callable[[int], Sequence[int]]
"""Function from the number of an epoch, from 0, to the row indices in the order of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """One configuration with canonical keys, whose meanings are those of Transformers, PEFT and TRL.

    Settings of a preference loss are None in supervised fine-tuning.
    """

    learning_rate: float
    per_device_train_batch_size: int
    r: int
    lora_alpha: float
    seed: int
    lora_dropout: float = 0.0
    target_modules: str | Sequence[str] = "all-linear"
    num_train_epochs: float = 1.0
    lr_scheduler_type: str = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    beta: float | None = None
    loss_type: str | None = None
    label_smoothing: float | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> JobSettings:
        """Return settings from a mapping.

        Raises:
            ValueError: A key is not known here, or one of ``FIXED`` has another value.
        """
        differing = [f"{key}={config[key]!r}" for key in FIXED if key in config and config[key] != FIXED[key]]
        unknown = sorted(set(config) - set(CONFIG_KEYS) - set(FIXED))
        if differing or unknown:
            raise ValueError(
                f"Expected the keys {', '.join(CONFIG_KEYS)}, and {FIXED} where given, found "
                f"{', '.join(unknown + differing)}: the baselines would train another job."
            )
        return cls(**{key: value for key, value in config.items() if key in CONFIG_KEYS})

    @property
    def scheduler(self) -> str:
        """Name of the scheduler in Transformers, whose plain ``constant`` has no warmup."""
        if self.lr_scheduler_type == "constant" and self.warmup_steps > 0:
            return "constant_with_warmup"
        return self.lr_scheduler_type

    def lora(self) -> LoraConfig:
        """Return PEFT's configuration of the adapter."""
        targets = self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)
        return LoraConfig(
            r=self.r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=targets,
            task_type="CAUSAL_LM",
        )

    def total_steps(self, num_rows: int) -> int:
        """Return the optimizer steps of the job; the last batch of an epoch may be short."""
        return math.ceil(self.num_train_epochs * math.ceil(num_rows / self.per_device_train_batch_size))


CONFIG_KEYS = tuple(item.name for item in fields(JobSettings))

FIXED = {
    "max_steps": None,
    "gradient_accumulation_steps": 1,
    "warmup_ratio": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": None,
    "router_aux_loss_coef": None,
    "bias": "none",
    "init_lora_weights": "default",
    "target_parameters": None,
    "exclude_modules": None,
    "layers_to_transform": None,
    "layers_pattern": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "neftune_noise_alpha": None,
    "lr_scheduler_kwargs": {},
    "loraplus_lr_ratio": 1.0,
    "optim": "adamw_torch",
    "optim_args": {},
    "loss_weights": None,
    "rpo_alpha": None,
    "ld_alpha": None,
    "f_divergence_type": "reverse_kl",
    "f_alpha_divergence_coef": 0.5,
    "discopop_tau": 0.05,
}
"""Keys for which the baselines accept only these values, which are the defaults in every system."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation of a job after ``step`` optimizer steps, on the whole validation set.

    Attributes:
        loss: Nats per trained token; for pairs, the mean over them.
        reward_accuracy: Share of the pairs, in [0, 1], whose chosen reply has the higher reward; None for other rows.
    """

    step: int
    loss: float
    reward_accuracy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineJob:
    """The times and results of one job.

    Attributes:
        duration_s: All seconds: model copy, adapter, trainer set-up, training, evaluation.
        train_s: Seconds of the training loop without its evaluations.
        eval_s: Seconds of the evaluations.
        train_losses: Loss of every step, before that step's update.
        evaluations: Evaluations in the order of steps.
        samples: Rows trained, counting repeats.
    """

    duration_s: float
    train_s: float
    eval_s: float
    train_losses: tuple[float, ...]
    evaluations: tuple[Evaluation, ...]
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A task that is prepared for any number of jobs.

    Attributes:
        model: The base model; every job wraps a copy of its modules on the same weights.
        train: ``input_ids`` and ``labels`` of the training rows, in file order.
        validation: The same of the validation rows, sorted by length so that evaluation batches have little padding.
        duration_s: Seconds to load and tokenise, which count once for the sweep.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    train: Sequence[Mapping[str, list[int]]]
    validation: Sequence[Mapping[str, list[int]]]
    duration_s: float


def prepare(
    model: str | Path,
    train_rows: Iterable[Mapping[str, str]],
    validation_rows: Iterable[Mapping[str, str]],
    *,
    max_length: int,
    dtype: str = "float32",
) -> Prepared:
    """Load ``model`` (folder or hub id) onto the GPU, if there is one, and tokenise ``question``/``answer`` rows, cut
    to ``max_length`` tokens.

    Raises:
        ValueError: After tokenising, no training row or no validation row has a token to train.
    """
    start = time.perf_counter()
    base = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    base.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(model)
    train = _tokenize(tokenizer, train_rows, max_length)
    validation = sorted(_tokenize(tokenizer, validation_rows, max_length), key=lambda row: len(row["input_ids"]))
    if not train or not validation:
        raise ValueError(
            f"Expected training and validation rows with a completion inside {max_length} tokens, found {len(train)} "
            f"and {len(validation)}: give more rows or a larger max_length."
        )
    return Prepared(
        model=base,
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        duration_s=time.perf_counter() - start,
    )


def epoch_order(num_rows: int, seed: int) -> Order:
    """Return the order of rows in every epoch: a fresh shuffle that ``seed`` determines, the same as ALTO's."""

    def order(epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        return torch.randperm(num_rows, generator=generator).tolist()

    return order


def check_eval_steps(steps: Sequence[int], total_steps: int) -> frozenset[int]:
    """Return the steps as a set.

    Raises:
        ValueError: A step is outside of ``1..total_steps``.
    """
    outside = [step for step in steps if not 1 <= step <= total_steps]
    if outside:
        raise ValueError(f"Expected evaluation steps from 1 to {total_steps}, the job's last, found {outside}.")
    return frozenset(steps)


def _tokenize(
    tokenizer: PreTrainedTokenizerBase, rows: Iterable[Mapping[str, str]], max_length: int
) -> list[dict[str, list[int]]]:
    examples = []
    for row in rows:
        prompt = [{"role": "user", "content": row["question"]}]
        whole = [*prompt, {"role": "assistant", "content": row["answer"]}]
        prompt_ids: Any = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        ids: Any = tokenizer.apply_chat_template(whole, return_dict=False)
        num_prompt = common_prefix(prompt_ids, ids)
        labels = [IGNORED] * num_prompt + ids[num_prompt:]
        # The first token is never a target, so a row needs a trained token after it.
        if any(label != IGNORED for label in labels[1:max_length]):
            examples.append({"input_ids": ids[:max_length], "labels": labels[:max_length]})
    return examples


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of items with which both begin."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
