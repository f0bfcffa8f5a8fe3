"""The oracle of law 1 on mixtures of experts: one step of one job alone, with PEFT's ``target_parameters`` and torch's
AdamW on the unmodified model, and the loss of TRL's trainers with the load-balancing loss of the routers.

Matrices have PEFT's names and shapes, so the comparison relies on the tests of this package's export
(``tests/lora/test_experts.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from moe_models import MODELS
from oracle import StepFacts, as_trl_has_it, make_dpo_trainer, padded_batch, reference_model
from peft import PeftModel
from resident_jobs import DATA, VOCABULARY, Bank
from torch import Tensor
from transformers import PreTrainedModel

from alto.data import EncodedDataset, TaskData
from alto.lora import AdapterWeights, ModuleNames, as_in_peft, write_adapter
from alto.spec import JobConfig, Task

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ROUTER = {"gpt-oss": "router.weight"}
OWN_COEFFICIENT = 0.3
"""Value of ``router_aux_loss_coef`` in the models; far above the usual 0.001, so that an error in the loss shows."""


def make_mixture(name: str, **changes: Any) -> PreTrainedModel:
    return MODELS[name](**({"vocab_size": VOCABULARY, "router_aux_loss_coef": OWN_COEFFICIENT} | changes))


def trained_bank(name: str, task: Task, slots: list[int] | None = None, data: TaskData = DATA, **changes: Any) -> Bank:
    """Return jobs in slots, with adapters as after some training: no matrix is zero."""
    bank = Bank(make_mixture(name, **changes), task, slots=slots, data=data)
    for job in bank.jobs:
        generator = torch.Generator().manual_seed(job.config.seed)
        for _, _, b in bank.trainer.bank.matrices(bank.trainer.bank.params_ZP, job.slot):
            b.copy_(torch.randn(b.shape, generator=generator) * 0.05)
    return bank


def in_peft(flat: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an adapter as :class:`StepFacts` has them, by PEFT's names."""
    modules = dict.fromkeys(name.rpartition(".")[0] for name in flat)  # grouped by owner, in the model's order
    weights = AdapterWeights({module: (flat[f"{module}.A"], flat[f"{module}.B"]) for module in modules})
    return {
        f"{name}.lora_{which}": matrix
        for name, pair in as_in_peft(weights).items()
        for which, matrix in zip("AB", pair, strict=True)
    }


def facts_in_peft(facts: StepFacts) -> StepFacts:
    return replace(facts, gradients=in_peft(dict(facts.gradients)), updates=in_peft(dict(facts.updates)))


def step_alone(
    base: PreTrainedModel, config: JobConfig, weights: AdapterWeights, folder: Path, loss_of: Callable[[Any], Tensor]
) -> StepFacts:
    """Take the first optimizer step of a job that begins with ``weights`` and at its full rate."""
    base = copy.deepcopy(base)
    write_adapter(folder, weights, config, "tiny", ModuleNames.of(base))
    model: Any = PeftModel.from_pretrained(base, str(folder), is_trainable=True)
    parameters = {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    optimizer = torch.optim.AdamW(parameters.values(), config.learning_rate, weight_decay=config.weight_decay)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    loss = loss_of(model)
    loss.backward()
    # An expert that no token has chosen has no gradient, which counts as zero.
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in parameters.items()}
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), config.max_grad_norm or float("inf"))
    optimizer.step()
    updates = {name: parameter.detach() - before[name] for name, parameter in parameters.items()}
    return StepFacts(loss=float(loss.detach()), grad_norm=float(norm), gradients=gradients, updates=updates)


@dataclass(frozen=True, slots=True)
class TrlSft:
    """The loss of TRL's ``SFTTrainer``.

    Attributes:
        trainer: Trainer from :func:`make_sft_trainer`; its own model and data are not used.
    """

    trainer: Any

    def loss(self, model: Any, dataset: EncodedDataset, rows: Sequence[int], batch_size: int, weight: float) -> Tensor:
        """Return the loss of one step over ``rows`` in micro-steps of ``batch_size``, with the load-balancing loss
        times ``weight``."""
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy", "is_top1"))
        model.train()
        parts = [rows[first : first + batch_size] for first in range(0, len(rows), batch_size)]
        trainer = self.trainer
        trainer.aux_loss_enabled, trainer.router_aux_loss_coef = weight > 0, weight
        trainer.current_gradient_accumulation_steps = len(parts)
        for values in trainer._metrics.values():
            values.clear()
        num_trained = sum(dataset.num_trained[row] for row in rows)
        losses = [
            trainer.compute_loss(model, padded_batch(dataset, part), num_items_in_batch=torch.tensor(num_trained))
            for part in parts
        ]
        total: Tensor = torch.stack(losses).sum()
        return total

    def mean_balance(self) -> float:
        """Return the load-balancing loss of the last step: the mean over its micro-steps."""
        return _mean_balance(self.trainer)


def make_sft_trainer(folder: Path) -> TrlSft:
    from datasets import Dataset
    from tiny import load_tokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = load_tokenizer()
    settings = SFTConfig(
        output_dir=str(folder),
        report_to="none",
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        gradient_checkpointing=False,
    )
    rows = Dataset.from_list([{"prompt": "1 plus 1?", "completion": " 2"}])
    model = make_mixture("mixtral", vocab_size=len(tokenizer))
    return TrlSft(SFTTrainer(model=model, args=settings, train_dataset=rows, processing_class=tokenizer))


@dataclass(frozen=True, slots=True)
class TrlDpo:
    """The loss of TRL's ``DPOTrainer``, with the sigmoid form."""

    trainer: Any

    def loss(
        self,
        model: Any,
        base: PreTrainedModel,
        dataset: EncodedDataset,
        rows: Sequence[int],
        beta: float,
        weight: float,
    ) -> Tensor:
        """Return the loss of one step over pairs, with the load-balancing loss times ``weight``."""
        from trl.trainer.utils import add_fused_lm_head

        trl = self.trainer
        add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
        trl.ref_model, trl.beta, trl.label_smoothing = reference_model(base), beta, 0.0
        trl.loss_types, trl.loss_weights, trl.ld_alpha = ["sigmoid"], [1.0], None
        trl.aux_loss_enabled, trl.router_aux_loss_coef = weight > 0, weight
        for values in trl._metrics.values():
            values.clear()
        batch = as_trl_has_it(padded_batch(dataset, rows))
        loss: Tensor = trl._compute_loss(model, batch, return_outputs=False)
        return loss

    def mean_balance(self) -> float:
        """Return the load-balancing loss of the last step."""
        return _mean_balance(self.trainer)


def _mean_balance(trainer: Any) -> float:
    """Return the mean of the load-balancing losses that TRL has counted, whether as of training or of an evaluation."""
    values = [value for of_mode in trainer._metrics.values() for value in of_mode.get("aux_loss", ())]
    return float(sum(values) / max(1, len(values)))


def make_trl_dpo(folder: Path) -> TrlDpo:
    return TrlDpo(make_dpo_trainer(folder))
