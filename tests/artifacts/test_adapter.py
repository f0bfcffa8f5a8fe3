"""The folder of a task's best adapter: its files, its numbers, and a card that says how to use it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from alto.artifacts.adapter import export_best
from alto.artifacts.card import ModelUse
from alto.backbone import load_tokenizer
from alto.errors import RunWriteError
from alto.records import ExitReason, JobResult, LabelSet, TaskOutcome
from alto.spec import BaseModelSpec

BASE = BaseModelSpec(id="alto-tiny")
USE = ModelUse(model_class="AutoModelForCausalLM", has_template=True)
TOKENIZER = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
CONFIG = {"learning_rate": 3e-4, "r": 8, "target_modules": "all-linear"}


def job(name: str, loss: float, **changes: Any) -> JobResult:
    result = JobResult(
        job=name,
        config=CONFIG,
        steps=30,
        total_steps=30,
        exit_reason=None,
        exit_evidence={},
        best_step=20,
        best_validation_loss=loss,
        samples_trained=100,
        samples_budgeted=100,
    )
    return replace(result, **changes)


@pytest.fixture
def result(tmp_path: Path) -> TaskOutcome:
    loser = job("job-000", 2.5, config={"r": 99}, exit_reason=ExitReason.UNDERPERFORMING, samples_trained=25)
    return TaskOutcome(
        task="sums",
        run_dir=str(tmp_path),
        adapter_dir=str(tmp_path / "best"),
        best_job="job-001",
        best_validation_loss=1.23456,
        jobs=(loser, job("job-001", 1.23456)),
        duration_s=12.34567,
    )


@pytest.fixture
def best_of_job(tmp_path: Path) -> Path:
    folder = tmp_path / "jobs" / "job-001" / "best"
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/models/o'base"}))
    return folder


def base_model_of(folder: Path) -> str:
    name: str = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    return name


def export(result: TaskOutcome, best_of_job: Path, **facts: Any) -> Path:
    known = {"model": "m", "use": USE, "dataset": "d", "method": "sft", "tokenizer": load_tokenizer(BASE)}
    assert export_best(result, best_of_job, base_model_of, **(known | facts)) == ()
    return Path(result.adapter_dir)


def test_folder_holds_the_winner_and_its_numbers(result: TaskOutcome, best_of_job: Path) -> None:
    folder = export(result, best_of_job, model="o'base", dataset="rows.jsonl")
    assert str(folder) == result.adapter_dir
    names = ["README.md", "adapter_config.json", "adapter_model.safetensors", "metrics.json", *TOKENIZER]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert (folder / "adapter_model.safetensors").read_bytes() == b"weights"
    assert json.loads((folder / "metrics.json").read_text()) == {
        "task": "sums",
        "job": "job-001",
        "config": CONFIG,
        "metric": "loss",
        "validation_loss": 1.23456,
        "metrics": {},
        "step": 20,
        "total_steps": 30,
        "num_jobs": 2,
        "samples_trained": 125,
        "samples_budgeted": 200,
        "samples_saved": 0.375,
        "samples_cut_off": 0.0,
        "duration_s": 12.346,
    }


def test_a_classifier_keeps_its_labels_and_its_card_loads_it_with_them(result: TaskOutcome, best_of_job: Path) -> None:
    labels = LabelSet(problem_type="single_label_classification", names=("bad", "good"))
    folder = export(result, best_of_job, method="classification", use=replace(USE, labels=labels))
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: text-classification" in card
    assert "AutoModelForSequenceClassification.from_pretrained(" in card
    assert "num_labels=2, problem_type='single_label_classification', id2label={0: 'bad', 1: 'good'}" in card
    assert json.loads((folder / "labels.json").read_text())["label2id"] == {"bad": 0, "good": 1}


def test_the_job_keeps_its_own_copy(result: TaskOutcome, best_of_job: Path) -> None:
    export(result, best_of_job)
    assert sorted(path.name for path in best_of_job.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_card_shows_digits_of_a_small_loss(result: TaskOutcome, best_of_job: Path) -> None:
    (best, *others) = sorted(result.jobs, key=lambda job: job.job != result.best_job)
    small = replace(result, jobs=(replace(best, best_validation_loss=1.63e-5), *others))
    card = (export(small, best_of_job, model="base") / "README.md").read_text(encoding="utf-8")
    assert "validation loss 1.63e-5 (nats per token)" in card


def test_card_names_base_and_loss_and_its_header_is_yaml(result: TaskOutcome, best_of_job: Path) -> None:
    folder = export(result, best_of_job, model="o'base", dataset="rows.jsonl")
    card = (folder / "README.md").read_text(encoding="utf-8")
    header = yaml.safe_load(card.split("---\n")[1])
    assert header["base_model"] == "/models/o'base"
    assert header["library_name"] == "peft"
    assert "validation loss 1.2346 (nats per token)\nat step 20 of 30" in card
    assert "the best of\n2 configurations, " in card
    assert "| learning_rate | 0.0003 |" in card
    assert "measured" not in card
    code = card.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    assert 'from_pretrained("/models/o\'base")' in code


def test_the_card_of_a_model_that_reads_images_names_its_class(result: TaskOutcome, best_of_job: Path) -> None:
    folder = export(result, best_of_job, use=replace(USE, model_class="AutoModelForImageTextToText"))
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "from transformers import AutoModelForImageTextToText, AutoTokenizer\n" in card
    assert "base = AutoModelForImageTextToText.from_pretrained(" in card
    assert "AutoModelForCausalLM" not in card
    assert yaml.safe_load(card.split("---\n")[1])["pipeline_tag"] == "image-text-to-text"


@pytest.fixture
def chosen_by_accuracy(result: TaskOutcome) -> TaskOutcome:
    metrics = {"reward_accuracy": 0.715, "reward_margin": 0.21, "kl": float("nan")}
    loser, winner = result.jobs
    tested = {"reward_accuracy": 0.625, "kl": float("nan")}
    jobs = (loser, replace(winner, best_metrics=metrics, test_loss=1.5, test_metrics=tested))
    return replace(result, jobs=jobs, metric="reward_accuracy", best_metrics=metrics)


def test_what_was_measured_beside_the_loss_goes_with_the_adapter(
    chosen_by_accuracy: TaskOutcome, best_of_job: Path
) -> None:
    folder = export(chosen_by_accuracy, best_of_job, method="dpo")
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["metric"] == "reward_accuracy"
    assert metrics["metrics"] == {"reward_accuracy": 0.715, "reward_margin": 0.21, "kl": "nan"}
    assert metrics["test_metrics"] == {"reward_accuracy": 0.625, "kl": "nan"}
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "2 configurations by reward accuracy, validation loss 1.2346 (mean over pairs)\nat step 20 of 30" in card
    measured, tested, settings = card.split("```\n\n")[1].split("\n\n")
    assert "| measured on the test rows | value |\n|---|---|\n| reward accuracy | 62.5 % |" in tested
    assert "| measured on the validation rows | value |\n|---|---|\n| reward accuracy | 71.5 % |" in measured
    assert "| reward margin | 0.2100 |" in measured
    assert "| r | 8 |" in settings
    assert "; 1.5000 on the test rows." in card
    again = export(replace(chosen_by_accuracy, num_known_test=6), best_of_job, method="dpo")
    card = (again / "README.md").read_text(encoding="utf-8")
    assert "; 1.5000 on the test rows, of which 6 are also in the training or validation data." in card


def test_exporting_again_replaces(result: TaskOutcome, best_of_job: Path) -> None:
    export(result, best_of_job)
    (best_of_job / "adapter_model.safetensors").write_bytes(b"better")
    export(result, best_of_job)
    assert (Path(result.adapter_dir) / "adapter_model.safetensors").read_bytes() == b"better"


def test_the_tokenizer_beside_the_adapter_has_the_template_of_the_task(result: TaskOutcome, best_of_job: Path) -> None:
    base = replace(BASE, chat_template="{% for message in messages %}{{ message.content }}{% endfor %}")
    folder = export(result, best_of_job, tokenizer=load_tokenizer(base), chat_template=base.chat_template)
    found = AutoTokenizer.from_pretrained(folder)
    assert found.chat_template == base.chat_template
    assert found("Hello there")["input_ids"] == load_tokenizer(BASE)("Hello there")["input_ids"]
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "tokenizer = AutoTokenizer.from_pretrained(folder)\n" in card
    assert "It was trained with the chat template in `chat_template.jinja`" in card


class Unsaveable:
    """A tokenizer of somebody, which fails after it has written a file."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer_config.json").touch()
        raise self.error


def test_a_tokenizer_that_cannot_be_saved_costs_no_result(result: TaskOutcome, best_of_job: Path) -> None:
    broken: Any = Unsaveable(NotImplementedError("save_vocabulary"))
    notices = export_best(
        result, best_of_job, base_model_of, model="m", dataset="d", method="sft", use=USE, tokenizer=broken
    )
    assert notices == ("The best adapter has no tokenizer: Unsaveable cannot be saved (save_vocabulary).",)
    folder = Path(result.adapter_dir)
    assert not list(folder.glob("tokenizer*"))
    assert 'AutoTokenizer.from_pretrained("/models/o\'base")' in (folder / "README.md").read_text(encoding="utf-8")


def test_a_full_disk_is_no_fault_of_the_tokenizer(result: TaskOutcome, best_of_job: Path) -> None:
    full: Any = Unsaveable(Exception("No space left on device (os error 28)"))
    with pytest.raises(RunWriteError):
        export(result, best_of_job, tokenizer=full)
    assert not Path(result.adapter_dir).exists()
