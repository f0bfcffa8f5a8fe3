"""The oracle of law 1: one job alone, trained by Hugging Face PEFT and the Trainer's optimizer on an unmodified model;
on preference pairs with the loss of TRL's ``DPOTrainer``.

It uses none of ALTO's arithmetic: the model's own attention and loss on a padded batch, PEFT's adapter, torch's
optimizer (or bitsandbytes') and clipping, transformers' learning-rate schedule.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from architectures import build_tiny
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from preference_pairs import whole_sequences
from tiny import load_tokenizer
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments, get_scheduler

from alto.data import DataOrder, EncodedDataset, MixtureOrder
from alto.lora import AdapterWeights, OptimizerState
from alto.spec import JobConfig
from alto.spec.objective_settings import CpoSettings, DpoSettings

PREFIX = "base_model.model."


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """Results of one optimizer step; matrices are named ``<module>.A`` (``[K, r]``) and ``<module>.B`` (``[r, N]``),
    further tensors have their own names."""

    loss: float
    grad_norm: float
    gradients: Mapping[str, Tensor]
    updates: Mapping[str, Tensor]


class SoloJob:
    """One job on its own copy of the base model.

    Args:
        padding: Pad tokens added to every batch beyond its longest row, on the left if negative; this changes only
            rounding.
        tamper: Changes PEFT's own settings, for tests that must fail.
        first_step: Position in the data order at which to begin, for tests that must fail.
        autocast_adapter_dtype: Argument of PEFT; false gives the adapter the dtype of the base.
        order: Rows of every step, if they are drawn from a mixture.
        saved: Folder of a saved adapter that PEFT loads to train it further; None begins with a new one.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        dataset: EncodedDataset,
        config: JobConfig,
        *,
        padding: int = 0,
        tamper: Mapping[str, Any] | None = None,
        first_step: int = 0,
        dropout: Callable[[str, int], torch.nn.Module] | None = None,
        autocast_adapter_dtype: bool = True,
        order: DataOrder | MixtureOrder | None = None,
        saved: Path | None = None,
    ) -> None:
        self.config = config
        self.step = 0
        self._dataset = dataset
        self._rows: Sequence[int] = ()
        self._padding = padding
        self._first_step = first_step
        self._order = order or DataOrder(len(dataset), config.rows_per_step, config.seed)
        self.model: Any
        if saved is not None:
            self.model = PeftModel.from_pretrained(copy.deepcopy(base), saved, is_trainable=True)
        else:
            self.model = get_peft_model(
                copy.deepcopy(base),
                LoraConfig(**(peft_settings(config) | dict(tamper or {}))),
                autocast_adapter_dtype=autocast_adapter_dtype,
            )
        if dropout is not None:
            for name, module in self.model.named_modules():
                if hasattr(module, "lora_dropout"):
                    module.lora_dropout["default"] = dropout(name.removeprefix(PREFIX), module.in_features)
        self.model.train()
        self._parameters = {
            plain_name(name): parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }
        optimizer, settings = _optimizer(config)
        # With a ratio of 1 this is one optimizer over all parameters at one rate.
        self._optimizer = create_loraplus_optimizer(
            self.model,
            optimizer,
            lr=config.learning_rate,
            loraplus_lr_ratio=config.loraplus_lr_ratio,
            loraplus_lr_embedding=config.learning_rate,  # only with a ratio of 1, which is that optimizer
            loraplus_weight_decay=config.weight_decay,
            **settings,
        )
        total = config.total_steps(len(dataset))
        self._scheduler = get_scheduler(
            config.lr_scheduler_type,
            self._optimizer,
            config.num_warmup_steps(total),
            num_training_steps=total,
            scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs),
        )

    def load(self, weights: AdapterWeights, optimizer: OptimizerState | None = None) -> None:
        """Continue from a given adapter and optimizer state."""
        for name, parameter in self._parameters.items():
            with torch.no_grad():
                parameter.copy_(turned(name, flat(weights)[name]))
            if optimizer is not None and optimizer.step:
                self._optimizer.state[parameter] = self._state_of(name, optimizer)
        if optimizer is not None:
            while self.step < optimizer.step:
                self._optimizer._opt_called = True  # the scheduler only checks that somebody stepped
                self._scheduler.step()
                self.step += 1

    def _state_of(self, name: str, optimizer: OptimizerState) -> dict[str, Any]:
        """Return the optimizer's state for one matrix."""
        parts = {
            key.removeprefix(f"{name}."): tensor.clone()
            for key, tensor in optimizer.tensors.items()
            if key.startswith(f"{name}.")
        }
        if "exp_avg" in parts:
            return {"step": torch.tensor(float(optimizer.step))} | {
                part: turned(name, parts[part]).clone() for part in parts
            }
        if self.config.optim == "adafactor":
            return parts | {"step": optimizer.step}
        if not self.config.optim.endswith("8bit"):
            return parts
        if "absmax1" in parts:
            maps = self._optimizer.name2qmap
            parts |= {"qmap1": maps["dynamic"], "qmap2": maps["udynamic"]}
        return {"step": optimizer.step} | parts

    def weights(self) -> dict[str, Tensor]:
        return {name: turned(name, parameter.detach()).clone() for name, parameter in self._parameters.items()}

    def train_step(self) -> StepFacts:
        self._rows = self._order.rows_of_step(self.step + self._first_step)
        loss = self._loss(padded_batch(self._dataset, self._rows, self._padding))
        self._optimizer.zero_grad()
        loss.backward()
        return self._update(float(loss.detach()))

    def _update(self, loss: float) -> StepFacts:
        """Take the step of the optimizer with the gradients that are there."""
        before = self.weights()
        gradients = {name: turned(name, parameter.grad).clone() for name, parameter in self._parameters.items()}
        limit = self.config.max_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), limit)
        self._optimizer.step()
        self._scheduler.step()
        self.step += 1
        updates = {name: after - before[name] for name, after in self.weights().items()}
        return StepFacts(loss=loss, grad_norm=float(norm), gradients=gradients, updates=updates)

    def train(self) -> list[float]:
        """Train to the end of the job, and return the losses of all steps."""
        return [self.train_step().loss for _ in range(self.config.total_steps(len(self._dataset)))]

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss


class SoloWithReference(SoloJob):
    """One job whose loss TRL computes with a reference model.

    Args:
        trl: Trainer from :func:`make_dpo_trainer` or its like; several jobs may share it.
        reference: Model from :func:`reference_model`.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        dataset: EncodedDataset,
        config: JobConfig,
        *,
        trl: Any,
        reference: PreTrainedModel,
        **settings: Any,
    ) -> None:
        from trl.trainer.utils import add_fused_lm_head

        super().__init__(base, dataset, config, **settings)
        self._trl, self._reference = trl, reference
        add_fused_lm_head(self.model.get_base_model(), outputs=("log_probs", "entropy", "mean_logits", "is_top1"))

    @torch.no_grad()
    def evaluate(self, dataset: EncodedDataset) -> dict[str, float]:
        """Return TRL's metrics, and ``loss``, of all rows of ``dataset`` as one batch."""
        self._trl._metrics["eval"].clear()
        own, self._dataset, self._rows = self._dataset, dataset, range(len(dataset))
        loss = self._loss(padded_batch(dataset, self._rows))
        self._dataset = own
        return {"loss": float(loss)} | {name: values[-1] for name, values in self._trl._metrics["eval"].items()}


class SoloPairs(SoloWithReference):
    """One job on preference pairs, whose loss TRL's ``DPOTrainer`` computes."""

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        trl, settings = self._trl, self.config.objective
        assert isinstance(settings, DpoSettings)
        trl.ref_model, trl.beta, trl.label_smoothing = self._reference, settings.beta, settings.label_smoothing
        trl.loss_types, trl.loss_weights = list(settings.forms), list(settings.forms.values())
        trl.ld_alpha, trl.f_divergence_type = settings.ld_alpha, settings.f_divergence_type
        trl.f_alpha_divergence_coef, trl.args.discopop_tau = settings.f_alpha_divergence_coef, settings.discopop_tau
        loss: Tensor = trl._compute_loss(self.model, as_trl_has_it(batch), return_outputs=False)
        return loss


class SoloCpo(SoloJob):
    """One job on preference pairs, whose loss TRL's ``CPOTrainer`` computes.

    Args:
        trl: Trainer from :func:`make_cpo_trainer`; several jobs may share it.
    """

    def __init__(
        self, base: PreTrainedModel, dataset: EncodedDataset, config: JobConfig, *, trl: Any, **settings: Any
    ) -> None:
        super().__init__(base, dataset, config, **settings)
        self._trl = trl

    @torch.no_grad()
    def evaluate(self, dataset: EncodedDataset) -> dict[str, float]:
        """Return TRL's metrics, and ``loss``, of all pairs of ``dataset``."""
        loss, metrics = self._loss_and_metrics(padded_batch(dataset, range(len(dataset))))
        return {"loss": float(loss), **metrics}

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self._loss_and_metrics(batch)[0]

    def _loss_and_metrics(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        trl, settings = self._trl, self.config.objective
        assert isinstance(settings, CpoSettings)
        trl.beta, trl.label_smoothing, trl.loss_type = settings.beta, settings.label_smoothing, settings.loss_type
        trl.cpo_alpha, trl.simpo_gamma = settings.cpo_alpha, settings.target_margin
        sides = {name: tensor.chunk(2) for name, tensor in batch.items()}
        given = {
            f"{side}_{name}": halves[index]
            for index, side in enumerate(("chosen", "rejected"))
            for name, halves in sides.items()
        }
        found: tuple[Tensor, dict[str, float]] = trl.get_batch_loss_metrics(self.model, given)
        return found


def make_cpo_trainer(folder: Path) -> Any:
    """Return TRL's trainer, of which only the loss is used, not its model and data."""
    from datasets import Dataset
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    rows = Dataset.from_list([{"prompt": "1", "chosen": "2", "rejected": "3"}])
    settings = CPOConfig(**quiet_settings(folder))
    return CPOTrainer(build_tiny("llama"), args=settings, train_dataset=rows, processing_class=load_tokenizer())


def quiet_settings(folder: Path) -> dict[str, Any]:
    """Return arguments of TRL's configurations for a trainer on this CPU that reports nothing."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
    }


def peft_settings(config: JobConfig) -> dict[str, Any]:
    """Return the arguments of PEFT's ``LoraConfig`` for a job, without dropout, because its masks would differ."""

    def listed(value: str | tuple[Any, ...] | None) -> str | list[Any] | None:
        return list(value) if isinstance(value, tuple) else value

    return {
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "target_modules": listed(config.target_modules),
        "exclude_modules": listed(config.exclude_modules),
        "layers_to_transform": listed(config.layers_to_transform),
        "layers_pattern": listed(config.layers_pattern),
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
        "lora_dropout": 0.0,
        "use_rslora": config.use_rslora,
        "bias": config.bias,
        "use_dora": config.use_dora,
        "modules_to_save": None if config.modules_to_save is None else list(config.modules_to_save),
        "task_type": "CAUSAL_LM",
    }


def make_dpo_trainer(folder: Path) -> Any:
    """Return TRL's trainer, of which only the loss is used, not its model and data. Takes seconds."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model, tokenizer = build_tiny("llama"), load_tokenizer()
    settings = DPOConfig(**quiet_settings(folder))
    rows = Dataset.from_list([{"prompt": "1", "chosen": "2", "rejected": "3"}])
    trainer = DPOTrainer(model, copy.deepcopy(model), args=settings, train_dataset=rows, processing_class=tokenizer)
    trainer.model.eval()  # its metrics are computed in evaluation mode
    return trainer


def reference_model(base: PreTrainedModel) -> PreTrainedModel:
    """Return a frozen copy of ``base`` as TRL's trainer keeps it."""
    from trl.trainer.utils import add_fused_lm_head

    reference = copy.deepcopy(base).requires_grad_(False).eval()
    add_fused_lm_head(reference)
    return reference


def as_trl_has_it(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch with a mask of the replies' tokens in place of the labels of Hugging Face's models."""
    rest = {name: tensor for name, tensor in batch.items() if name != "labels"}
    return {**rest, "completion_mask": (batch["labels"] >= 0).long()}


def padded_batch(dataset: EncodedDataset, rows: Sequence[int], padding: int = 0) -> dict[str, Tensor]:
    """Return rows as the collators of Hugging Face and TRL make them: padded, masked, with labels not shifted yet; for
    pairs first all chosen sides, then all rejected ones."""
    of_rows = [whole_sequences(dataset, row) for row in rows]
    sequences = [sequence for side in zip(*of_rows, strict=True) for sequence in side]
    length = max(ids.numel() for ids, _ in sequences) + abs(padding)
    first = max(0, -padding)
    input_ids = torch.zeros(len(sequences), length, dtype=torch.long)
    attention_mask = torch.zeros(len(sequences), length, dtype=torch.long)
    labels = torch.full((len(sequences), length), -100, dtype=torch.long)
    for index, (ids, targets) in enumerate(sequences):
        end = first + ids.numel()
        input_ids[index, first:end] = ids
        attention_mask[index, first:end] = 1
        labels[index, first + 1 : end] = targets[:-1]
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def flat(weights: AdapterWeights) -> dict[str, Tensor]:
    """Return tensors by the names that :class:`StepFacts` uses."""
    matrices = {
        f"{name}.{which}": matrix for name, pair in weights.items() for which, matrix in zip("AB", pair, strict=True)
    }
    return matrices | weights.extras


def relative_distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the distance of two adapters in norm, relative to the expected one."""
    assert found.keys() == expected.keys()
    apart = sum(float((found[name] - expected[name]).double().square().sum()) for name in expected)
    size = sum(float(matrix.double().square().sum()) for matrix in expected.values())
    return (apart / size) ** 0.5 if size else apart**0.5


def _optimizer(config: JobConfig) -> tuple[Any, dict[str, Any]]:
    """Return the class of the optimizer and its settings as transformers' Trainer chooses them, without its rates."""
    args = ",".join(f"{name}={value}" for name, value in config.optim_args)
    with tempfile.TemporaryDirectory() as folder, _kept_accelerator():
        arguments = TrainingArguments(
            output_dir=folder,
            optim=config.optim,
            optim_args=args or None,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_epsilon=config.adam_epsilon,
            use_cpu=True,
        )
    optimizer, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
    return optimizer, {name: value for name, value in settings.items() if name != "lr"}


@contextlib.contextmanager
def _kept_accelerator() -> Iterator[None]:
    """Keep the state that all of accelerate shares: new training arguments clear it, and an earlier trainer would miss
    it."""
    states = (AcceleratorState._shared_state, PartialState._shared_state)
    kept = [dict(state) for state in states]
    try:
        yield
    finally:
        for state, values in zip(states, kept, strict=True):
            state.clear()
            state.update(values)


def plain_name(name: str) -> str:
    """Return the plain name: ``base_model.model.<module>.lora_A.default.weight`` becomes ``<module>.A``; further
    tensors get ALTO's names."""
    name = name.removeprefix(PREFIX)
    for theirs, ours in (
        (".lora_A.default.weight", ".A"),
        (".lora_B.default.weight", ".B"),
        (".lora_embedding_A.default", ".A"),
        (".lora_embedding_B.default", ".B"),
        (".lora_magnitude_vector.default.weight", ".lora_magnitude_vector"),
        (".base_layer.", "."),
        (".modules_to_save.default.", "."),
    ):
        name = name.replace(theirs, ours)
    return name


def turned(name: str, tensor: Tensor) -> Tensor:
    """Return a low-rank matrix in the other orientation; a further tensor unchanged."""
    return tensor.T if name.endswith((".A", ".B")) else tensor
