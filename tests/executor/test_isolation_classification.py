"""Isolation of classification heads: a job beside jobs of other ranks, rates and batch sizes equals the job alone.

The oracle is transformers' ``...ForSequenceClassification`` with PEFT and torch's AdamW on the unmodified model
(``tests/support/oracle_classification.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from biased_models import llama
from isolation import assert_micro_batches_change_nothing, assert_nan_stays_alone
from job_kinds import compare
from optional import needs_bitsandbytes
from oracle_classification import ONE_LABEL, ONE_NUMBER, SEVERAL_LABELS, TWO_NUMBERS, SoloClassifier, data_of
from resident_jobs import LOSS_TOLERANCE, Bank, assert_same_step, make_model, make_task, state_of
from transformers import PreTrainedModel

from alto.records import LabelSet

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

JOBS: list[dict[str, object]] = [
    {"lr": 1e-3, "r": 4, "batch_size": 2, "seed": 1},
    {"lr": 5e-4, "r": 8, "batch_size": 5, "weight_decay": 0.1, "seed": 2},
    {"lr": 2e-4, "r": 32, "batch_size": 8, "max_grad_norm": 0.05, "seed": 3},
    {"lr": 5e-4, "r": 8, "batch_size": 1, "loraplus_lr_ratio": 4.0, "seed": 4},
    {"lr": 1e-3, "r": 16, "batch_size": 7, "target_modules": ["q_proj", "v_proj"], "seed": 5},
]
SLOTS = [5, 2, 0, 4, 1]


def bank_of(labels: LabelSet, slots: list[int] | None = None, name: str = "llama", **settings: Any) -> Bank:
    configs = settings.pop("configs", JOBS)
    method = "regression" if labels.problem_type == "regression" else "classification"
    task = make_task(configs, method=method, **settings).with_labels(labels)
    return Bank(make_model(name), task, slots=slots, data=data_of(labels))


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        (ONE_LABEL, "llama"),
        (SEVERAL_LABELS, "qwen3"),
        (ONE_NUMBER, "gemma"),
        (TWO_NUMBERS, "llama"),
    ],
    ids=lambda of: of if isinstance(of, str) else f"{of.problem_type}_{of.num_labels}",
)
def test_from_equal_state_every_step_beside_other_jobs_equals_peft_alone(labels: LabelSet, name: str) -> None:
    bank = bank_of(labels, SLOTS, name)
    compare_heads(lambda: make_model(name), bank, labels)
    assert all("score.weight" in bank.trainer.bank.read(job.slot).extras for job in bank.jobs)


def compare_heads(model: Callable[[], PreTrainedModel], bank: Bank, labels: LabelSet, num_steps: int = 2) -> None:
    compare(model, bank, num_steps, data=data_of(labels), solo=SoloClassifier, same=assert_same_step)


EXTRAS: list[dict[str, object]] = [
    {**JOBS[0], "bias": "all", "weight_decay": 0.1},
    {**JOBS[1], "use_dora": True},
    {**JOBS[2], "use_dora": True, "bias": "lora_only", "loraplus_lr_ratio": 4.0},
    JOBS[3],
]


@pytest.mark.parametrize(
    "optim", ["adamw_torch", pytest.param("adamw_8bit", marks=needs_bitsandbytes), "sgd", "rmsprop", "adafactor"]
)
def test_heads_with_biases_and_magnitudes_equal_peft_alone(optim: str) -> None:
    task = make_task([{**config, "optim": optim} for config in EXTRAS], method="classification")
    bank = Bank(llama(), task.with_labels(ONE_LABEL), slots=[3, 0, 1, 2], data=data_of(ONE_LABEL))
    compare_heads(llama, bank, ONE_LABEL)
    trained = [{name.rpartition(".")[2] for name in bank.trainer.bank.read(job.slot).extras} for job in bank.jobs]
    assert trained == [
        {"weight", "bias"},
        {"weight", "lora_magnitude_vector"},
        {"weight", "bias", "lora_magnitude_vector"},
        {"weight"},
    ]


def test_heads_with_trained_embeddings_equal_peft_alone() -> None:
    configs = [
        {**JOBS[0], "modules_to_save": ["embed_tokens"]},
        {**JOBS[1], "target_modules": ["embed_tokens", "q_proj"]},
        JOBS[3],
    ]
    bank = bank_of(ONE_LABEL, [2, 0, 1], configs=configs)
    compare_heads(lambda: make_model("llama"), bank, ONE_LABEL, num_steps=3)
    assert set(bank.trainer.bank.read(bank.jobs[0].slot).extras) == {"score.weight", "model.embed_tokens.weight"}


@pytest.mark.parametrize("labels", [ONE_LABEL, SEVERAL_LABELS, ONE_NUMBER, TWO_NUMBERS], ids=lambda of: of.problem_type)
def test_an_evaluation_equals_that_of_transformers(labels: LabelSet) -> None:
    base, bank = make_model("llama"), bank_of(labels, SLOTS)
    for _ in range(3):
        bank.step()
    data = data_of(labels)
    actual = torch.tensor(data.validation.classes)
    for job, found in zip(bank.jobs, bank.trainer.evaluate(bank.jobs), strict=True):
        solo = SoloClassifier(base, data.train, job.config)
        solo.load(*state_of(bank, job))
        logits = solo.logits(data.validation)
        expected, metrics = reference(logits, actual, labels)
        assert found.loss == pytest.approx(expected, rel=LOSS_TOLERANCE)
        assert found.metrics == pytest.approx(metrics, rel=1e-4)
        rows = found.rows["loss"]
        assert sum(rows) / len(rows) == pytest.approx(expected, rel=LOSS_TOLERANCE)


def reference(logits: torch.Tensor, actual: torch.Tensor, labels: LabelSet) -> tuple[float, dict[str, float]]:
    """Return loss and metrics, computed without ALTO."""
    if labels.problem_type == "regression":
        actual = actual.view_as(logits)
        loss = torch.nn.functional.mse_loss(logits, actual).item()
        both = [torch.corrcoef(torch.stack(pair))[0, 1].item() for pair in zip(logits.T, actual.T, strict=True)]
        return loss, {"mse": loss, "pearson": sum(both) / len(both)}
    if labels.problem_type == "single_label_classification":
        loss = torch.nn.functional.cross_entropy(logits, actual).item()
        predicted = logits.argmax(1)
        accuracy = (predicted == actual).float().mean().item()
        kinds = sorted({*predicted.tolist(), *actual.tolist()})
        scores = [f1(predicted == kind, actual == kind) for kind in kinds]
    else:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, actual).item()
        predicted = (logits > 0).float()
        accuracy = (predicted == actual).all(1).float().mean().item()
        scores = [f1(predicted[:, kind] > 0, actual[:, kind] > 0) for kind in range(labels.num_labels)]
    return loss, {"accuracy": accuracy, "macro_f1": sum(scores) / len(scores)}


def f1(predicted: torch.Tensor, actual: torch.Tensor) -> float:
    hits = int((predicted & actual).sum())
    wrong = int((predicted != actual).sum())
    return 2 * hits / (2 * hits + wrong) if hits + wrong else 0.0


@pytest.mark.parametrize("change", [{"lr": 2e-3}, {"weight_decay": 0.5}, {"labels": True}])
def test_the_comparison_fails_for(change: dict[str, Any]) -> None:
    bank, base = bank_of(ONE_LABEL, configs=JOBS[1:2]), make_model("llama")
    bank.step()
    (job,), data = bank.jobs, data_of(ONE_LABEL).train
    if "labels" in change:
        object.__setattr__(
            data, "classes", tuple((label + 1) % 3 for label in data.classes or () if label in (0, 1, 2))
        )
    settings = {"learning_rate": change["lr"]} if "lr" in change else {}
    settings |= {key: change[key] for key in ("weight_decay",) if key in change}
    solo = SoloClassifier(base, data, job.config.replace(**settings))
    solo.load(*state_of(bank, job))
    found, expected = bank.step()[job.id], solo.train_step()
    with pytest.raises(AssertionError):
        assert_same_step(found, expected)


def test_a_job_has_the_same_bits_beside_any_others() -> None:
    alone, together = bank_of(ONE_LABEL, configs=JOBS[1:2]), bank_of(ONE_LABEL, [4, 0, 2, 5, 1])
    for _ in range(2):
        (found,) = alone.step().values()
        beside = together.step()[together.jobs[1].id]
        assert torch.equal(found.gradients["score.weight"], beside.gradients["score.weight"])
        assert found.loss == beside.loss


def test_the_head_is_drawn_as_transformers_draws_it_and_depends_on_the_seed_alone() -> None:
    bank, base = bank_of(ONE_LABEL, SLOTS), make_model("llama")
    for job in bank.jobs:
        linear = torch.nn.Linear(64, 3, bias=False)
        torch.manual_seed(job.config.seed)
        base._init_weights(linear)
        assert torch.equal(bank.trainer.bank.read(job.slot).extras["score.weight"], linear.weight)


def test_a_step_in_micro_batches_that_split_a_batch_is_the_same_step() -> None:
    whole, split = (bank_of(SEVERAL_LABELS, max_tokens_per_pass=tokens) for tokens in (10_000, 60))
    assert_micro_batches_change_nothing(whole, split)


def test_a_job_that_goes_nan_changes_no_other_job_by_one_bit() -> None:
    assert_nan_stays_alone(lambda: bank_of(ONE_LABEL))


def test_a_label_that_no_validation_row_has_is_counted_where_it_is_predicted() -> None:
    """scikit-learn does the same: its mean is over the labels that are true or predicted for some row."""
    data = data_of(ONE_LABEL)
    assert data.validation.classes is not None
    validation = replace(data.validation, classes=tuple(min(int(label), 1) for label in data.validation.classes))
    data = replace(data, validation=validation)
    base, task = make_model("llama"), make_task(JOBS, method="classification").with_labels(ONE_LABEL)
    bank = Bank(make_model("llama"), task, slots=SLOTS, data=data)
    for _ in range(3):
        bank.step()
    predicted = []
    for job, found in zip(bank.jobs, bank.trainer.evaluate(bank.jobs), strict=True):
        solo = SoloClassifier(base, data.train, job.config)
        solo.load(*state_of(bank, job))
        logits = solo.logits(validation)
        predicted.append({*logits.argmax(1).tolist()})
        expected, metrics = reference(logits, torch.tensor(validation.classes), ONE_LABEL)
        assert found.loss == pytest.approx(expected, rel=LOSS_TOLERANCE)
        assert found.metrics == pytest.approx(metrics, rel=1e-4)
    assert any(2 in of_job for of_job in predicted), "no row is predicted as the label that no row has"


@pytest.mark.parametrize("number", [0.0, 0.1, 1e6 + 0.1])
def test_a_correlation_with_equal_numbers_has_no_value(number: float) -> None:
    """Rounding makes sums of squares of such numbers differ from the squares of their sums."""
    data = data_of(ONE_NUMBER)
    validation = replace(data.validation, classes=((number,),) * len(data.validation))
    task = make_task(JOBS, method="regression").with_labels(ONE_NUMBER)
    bank = Bank(make_model("llama"), task, data=replace(data, validation=validation))
    bank.step()
    for found in bank.trainer.evaluate(bank.jobs):
        assert math.isnan(found.metrics["pearson"])
        assert found.metrics["mse"] == pytest.approx(found.loss)
        assert math.isfinite(found.loss)
