"""``gradient_accumulation_steps`` are those of transformers' own ``Trainer``, which divides every micro-batch's loss by
the trained tokens of the whole step (``num_items_in_batch``)."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import PREFIX, flat, padded_batch, peft_settings, relative_distance
from peft import LoraConfig, get_peft_model
from resident_jobs import DATA, Bank, make_model, make_task
from torch import Tensor
from transformers import Trainer, TrainingArguments

from alto.data import DataOrder
from alto.executor import JobState
from alto.lora import AdapterWeights

pytestmark = pytest.mark.filterwarnings("ignore")

JOBS = [
    {"lr": 2e-4, "r": 4, "batch_size": 3, "gradient_accumulation_steps": 3, "max_grad_norm": 0.5, "seed": 51},
    {"lr": 5e-4, "r": 8, "batch_size": 2, "gradient_accumulation_steps": 4, "weight_decay": 0.1, "seed": 52},
    {"lr": 2e-4, "r": 8, "batch_size": 5, "gradient_accumulation_steps": 1, "seed": 53},
]


class InOrder(Trainer):
    """The trainer on ALTO's order of rows, with the loss of every step noted."""

    def __init__(self, order: DataOrder, steps_per_epoch: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._order, self._steps_per_epoch = order, steps_per_epoch
        self.losses: list[float] = []

    def _get_train_sampler(self, *_: object) -> Any:
        order, steps, epochs = self._order, self._steps_per_epoch, itertools.count()

        class Rows(torch.utils.data.Sampler[int]):
            def __iter__(self) -> Iterator[int]:
                first = next(epochs) * steps
                return itertools.chain.from_iterable(order.rows_of_step(first + step) for step in range(steps))

            def __len__(self) -> int:
                return len(DATA.train)

        return Rows()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def trained_by_transformers(
    job: JobState, initial: AdapterWeights, folder: Path, *, divides_by_tokens: bool = True
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of all steps, and the weights at the end."""
    config = job.config
    model = get_peft_model(copy.deepcopy(make_model("llama")), LoraConfig(**peft_settings(config)))
    parameters = {
        name.removeprefix(PREFIX).replace(".lora_A.default.weight", ".A").replace(".lora_B.default.weight", ".B"): value
        for name, value in model.named_parameters()
        if value.requires_grad
    }
    with torch.no_grad():
        for name, matrix in flat(initial).items():
            parameters[name].copy_(matrix.T)
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=config.per_device_train_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        num_train_epochs=config.num_train_epochs,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        lr_scheduler_type=config.lr_scheduler_type,
        optim="adamw_torch",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = InOrder(
        job.order,
        config.steps_per_epoch(len(DATA.train)),
        model=model,
        args=arguments,
        train_dataset=list(range(len(DATA.train))),
        data_collator=lambda rows: padded_batch(DATA.train, rows),
    )
    trainer.model_accepts_loss_kwargs = divides_by_tokens
    trainer.train()
    return trainer.losses, {name: value.detach().T.clone() for name, value in parameters.items()}


@pytest.fixture(scope="module")
def trained() -> tuple[Bank, dict[str, AdapterWeights], dict[str, list[float]]]:
    """All jobs in one bank, to their ends: their first weights and their losses."""
    bank = Bank(make_model("llama"), make_task(JOBS), slots=[2, 0, 1])
    initial = {job.id: bank.trainer.bank.read(job.slot) for job in bank.jobs}
    losses: dict[str, list[float]] = {job.id: [] for job in bank.jobs}
    while bank.training:
        for name, facts in bank.step().items():
            losses[name].append(facts.loss)
    return bank, initial, losses


@pytest.mark.parametrize("index", range(len(JOBS)))
def test_a_job_is_trained_as_transformers_trainer_does(
    trained: tuple[Bank, dict[str, AdapterWeights], dict[str, list[float]]], index: int, tmp_path: Path
) -> None:
    bank, initial, losses = trained
    job = bank.jobs[index]
    expected, weights = trained_by_transformers(job, initial[job.id], tmp_path)
    assert len(expected) == job.total_steps == len(losses[job.id])
    assert losses[job.id] == pytest.approx(expected, rel=1e-4)
    assert relative_distance(flat(bank.trainer.bank.read(job.slot)), weights) <= 1e-4


def test_means_of_micro_batches_would_differ(
    trained: tuple[Bank, dict[str, AdapterWeights], dict[str, list[float]]], tmp_path: Path
) -> None:
    """What the comparison is about: rows have different numbers of tokens, and the last micro-batch fewer rows."""
    bank, initial, losses = trained
    job = bank.jobs[0]
    other, weights = trained_by_transformers(job, initial[job.id], tmp_path, divides_by_tokens=False)
    assert len(other) == len(losses[job.id])
    assert relative_distance(flat(bank.trainer.bank.read(job.slot)), weights) > 1e-3
