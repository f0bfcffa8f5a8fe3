"""``gradient_accumulation_steps`` works as in transformers' own ``Trainer``, which divides each micro-batch's loss by
the trained tokens of the whole step (``num_items_in_batch``); rows with labels use the mean of the micro-batches'
means."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from isolation import assert_micro_batches_change_nothing
from oracle import flat, padded_batch, peft_settings, plain_name, relative_distance, turned
from oracle_classification import (
    ONE_LABEL,
    ONE_NUMBER,
    SEVERAL_LABELS,
    TWO_NUMBERS,
    as_classifier,
    data_of,
    padded_texts,
)
from peft import LoraConfig, get_peft_model
from resident_jobs import Bank, make_model, make_task
from torch import Tensor
from transformers import Trainer, TrainingArguments

from alto.data import DataOrder, EncodedDataset
from alto.executor import JobState
from alto.lora import AdapterWeights
from alto.records import LabelSet

pytestmark = pytest.mark.filterwarnings("ignore")

JOBS = [
    {"lr": 2e-4, "r": 4, "batch_size": 3, "gradient_accumulation_steps": 3, "max_grad_norm": 0.5, "seed": 51},
    {"lr": 5e-4, "r": 8, "batch_size": 2, "gradient_accumulation_steps": 4, "weight_decay": 0.1, "seed": 52},
    {"lr": 2e-4, "r": 8, "batch_size": 5, "gradient_accumulation_steps": 1, "seed": 53},
]


class InOrder(Trainer):
    """A trainer that follows ALTO's order of rows and records the loss of every step."""

    def __init__(self, order: DataOrder, steps_per_epoch: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._order, self._steps_per_epoch = order, steps_per_epoch
        self.losses: list[float] = []

    def _get_train_sampler(self, *_: object) -> Any:
        order, steps, epochs, dataset = self._order, self._steps_per_epoch, itertools.count(), self.train_dataset

        class Rows(torch.utils.data.Sampler[int]):
            def __iter__(self) -> Iterator[int]:
                first = next(epochs) * steps
                return itertools.chain.from_iterable(order.rows_of_step(first + step) for step in range(steps))

            def __len__(self) -> int:
                return len(dataset)

        return Rows()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def trained_by_transformers(
    job: JobState,
    initial: AdapterWeights,
    folder: Path,
    model: Any = None,
    *,
    collate: Callable[[EncodedDataset, Any], dict[str, Tensor]] = padded_batch,
    divides_by_tokens: bool = True,
    adds_up: bool = True,
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of all steps, and the final weights."""
    config, rows = job.config, job.context.data.train
    task_type = "CAUSAL_LM" if model is None else "SEQ_CLS"
    model = get_peft_model(
        copy.deepcopy(make_model("llama") if model is None else model),
        LoraConfig(**peft_settings(config) | {"task_type": task_type}),
    )
    parameters = {plain_name(name): value for name, value in model.named_parameters() if value.requires_grad}
    with torch.no_grad():
        for name, tensor in flat(initial).items():
            parameters[name].copy_(turned(name, tensor))
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
        config.steps_per_epoch(len(rows)),
        model=model,
        args=arguments,
        train_dataset=list(range(len(rows))),
        data_collator=lambda indices: collate(rows, indices),
    )
    if not divides_by_tokens:
        trainer.model_accepts_loss_kwargs = False
    if not adds_up:
        trainer.loss_is_scaled_for_ga = False
    trainer.train()
    return trainer.losses, {name: turned(name, value.detach()).clone() for name, value in parameters.items()}


@pytest.fixture(scope="module")
def trained() -> tuple[Bank, dict[str, AdapterWeights], dict[str, list[float]]]:
    """All jobs trained to their ends in one bank; their initial weights and their losses."""
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
    """Rows have different numbers of tokens, and the last micro-batch has fewer rows; so the comparison can fail."""
    bank, initial, losses = trained
    job = bank.jobs[0]
    other, weights = trained_by_transformers(job, initial[job.id], tmp_path, divides_by_tokens=False)
    assert len(other) == len(losses[job.id])
    assert relative_distance(flat(bank.trainer.bank.read(job.slot)), weights) > 1e-3


LABELLED_JOBS = [*JOBS, {"lr": 1e-3, "r": 4, "batch_size": 3, "gradient_accumulation_steps": 8, "seed": 54}]
"""Jobs; the second step of the last one has micro-steps of 3 rows and of 1 row."""


def labelled_bank(labels: LabelSet, **settings: Any) -> Bank:
    method = "regression" if labels.problem_type == "regression" else "classification"
    task = make_task(LABELLED_JOBS, method=method, **settings).with_labels(labels)
    return Bank(make_model("llama"), task, slots=[2, 0, 3, 1], data=data_of(labels))


@pytest.mark.parametrize(
    "labels", [ONE_LABEL, SEVERAL_LABELS, ONE_NUMBER, TWO_NUMBERS], ids=lambda of: f"{of.problem_type}_{of.num_labels}"
)
def test_rows_with_labels_are_trained_as_transformers_trainer_does(labels: LabelSet, tmp_path: Path) -> None:
    bank = labelled_bank(labels)
    initial = {job.id: bank.trainer.bank.read(job.slot) for job in bank.jobs}
    losses: dict[str, list[float]] = {job.id: [] for job in bank.jobs}
    while bank.training:
        for name, facts in bank.step().items():
            losses[name].append(facts.loss)
    for job in bank.jobs:
        expected, weights = trained_by_transformers(
            job,
            initial[job.id],
            tmp_path / job.id,
            as_classifier(make_model("llama"), labels),
            collate=padded_texts,
            adds_up=False,
        )
        assert len(expected) == job.total_steps == len(losses[job.id])
        assert losses[job.id] == pytest.approx(expected, rel=1e-4)
        assert relative_distance(flat(bank.trainer.bank.read(job.slot)), weights) <= 1e-4


@pytest.mark.parametrize("labels", [ONE_LABEL, TWO_NUMBERS], ids=lambda of: of.problem_type)
def test_without_its_setting_transformers_adds_means_of_micro_batches_up(labels: LabelSet, tmp_path: Path) -> None:
    """This is why ``loss_is_scaled_for_ga`` exists: the loss of a head is not divided by ``num_items_in_batch``."""
    bank = labelled_bank(labels)
    job = bank.jobs[0]
    initial = bank.trainer.bank.read(job.slot)
    expected, _ = trained_by_transformers(
        job, initial, tmp_path, as_classifier(make_model("llama"), labels), collate=padded_texts
    )
    assert expected[0] == pytest.approx(bank.step()[job.id].loss * job.config.gradient_accumulation_steps, rel=1e-4)


def test_a_small_last_micro_step_counts_as_much_as_the_others() -> None:
    """This holds if memory forces a split of its rows, too."""
    whole, split = labelled_bank(ONE_LABEL), labelled_bank(ONE_LABEL, max_tokens_per_pass=60)
    job = whole.jobs[-1]
    assert job.config.row_factors(len(job.order.rows_of_step(0))) == (1.0,) * 24
    assert job.config.row_factors(len(job.order.rows_of_step(1))) == (2 / 3,) * 3 + (2.0,)
    assert_micro_batches_change_nothing(whole, split)
