"""Adapters of all kinds of jobs, as a run leaves them: PEFT loads each with the journal's loss, also merged, and ``alto
eval`` finds the same loss."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build_tiny
from job_kinds import KINDS, Config
from optional import needs_bitsandbytes
from oracle_classification import as_classifier
from peft import PeftModel
from resident_jobs import make_task
from tiny import load_tokenizer, write_rows
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from alto.backbone import Backbone, load_network
from alto.backbone.quantised import QuantisedLinear
from alto.data import EncodedDataset, read_task_rows
from alto.engine import Engine
from alto.evaluation import PeftCheck
from alto.lora import read_adapter
from alto.runs import RunDir, read_history
from alto.spec import Task, load_task

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*fan_in_fan_out.*:UserWarning")

Loss = Callable[[Any, EncodedDataset], float]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("base"), load_tokenizer()
    build_tiny("llama-bias", vocab_size=len(tokenizer), max_position_embeddings=128).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def trained(base: Path, folder: Path, kinds: dict[str, Config], **keys: Any) -> RunDir:
    """Train a run with a job of every kind, for a few steps each."""
    rows = {
        "dataset": str(write_rows(folder / "train.jsonl")),
        "validation_dataset": str(write_rows(folder / "validation.jsonl", 6, first=100)),
    }
    settings = {"model": str(base), "name": "exports", "max_steps": 4, "eval_steps": 0.5, "early_exit": False}
    task = make_task(list(kinds.values()), **{**settings, **rows, "report_to": "none", **keys})
    return RunDir.open(Engine(output_dir=folder / "runs").tune(task).run_dir)


def best_losses(run: RunDir) -> dict[str, float]:
    return {name: job.best_validation_loss for name, job in read_history(run.root).jobs.items()}


def of_tokens(model: Any, rows: EncodedDataset) -> float:
    total = 0.0
    for ids, targets in zip(rows.input_ids, rows.targets, strict=True):
        logits = model(input_ids=ids[None]).logits[0].float()
        total += float(F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"))
    return total / rows.num_trained_tokens


def of_texts(model: Any, rows: EncodedDataset) -> float:
    assert rows.classes is not None
    losses = [
        float(model(input_ids=ids[None], labels=torch.tensor([label])).loss)
        for ids, label in zip(rows.input_ids, rows.classes, strict=True)
    ]
    return sum(losses) / len(losses)


@torch.no_grad()
def assert_peft_has_the_losses(run: RunDir, model: Callable[[], PreTrainedModel], loss: Loss, tolerance: float) -> None:
    """Check each job's loss in PEFT, with its adapter beside the base and merged into it."""
    task = load_task(run.task_file)
    rows = read_task_rows(task).encode(load_tokenizer()).validation
    alone = loss(model(), rows)
    for job, expected in best_losses(run).items():
        folder = run.job(job, "best")
        peft = PeftModel.from_pretrained(model(), folder).eval()
        assert loss(peft, rows) == pytest.approx(expected, rel=tolerance), job
        assert loss(peft.merge_and_unload(), rows) == pytest.approx(expected, rel=tolerance), job
        assert abs(expected - alone) > 2 * tolerance * alone, "the adapter changes the loss"


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return trained(base, tmp_path_factory.mktemp("run"), KINDS)


def test_peft_loads_and_merges_adapters_of_all_kinds_with_the_same_loss(run: RunDir, base: Path) -> None:
    assert_peft_has_the_losses(run, lambda: AutoModelForCausalLM.from_pretrained(base).eval(), of_tokens, 1e-4)
    extras = [len(read_adapter(run.job(job, "best")).extras) for job in best_losses(run)]
    assert len(set(extras)) >= 3, "the kinds hold different tensors"


def test_an_evaluation_finds_the_losses_of_the_journal(run: RunDir, tmp_path: Path) -> None:
    result = Engine(output_dir=tmp_path).evaluate(run.root, all_jobs=True, metric="loss")
    found = {adapter.name: adapter.evaluation.loss for adapter in result.adapters}
    assert found == pytest.approx(best_losses(run), rel=1e-6)


def test_the_check_with_peft_passes_for_all_kinds(run: RunDir, base: Path) -> None:
    backbone = Backbone(AutoModelForCausalLM.from_pretrained(base), load_tokenizer(), str(base))
    for job in best_losses(run):
        check = PeftCheck(backbone)(run.job(job, "best"))
        assert (check.status, check.why) == ("equal", ""), job
    assert read_history(run.root).adapter_check.status == "equal"


def test_heads_of_all_kinds_are_loaded_and_merged_with_the_same_loss(base: Path, tmp_path: Path) -> None:
    words = {"good": "warm", "bad": "dull", "fair": "long"}
    rows = [{"text": f"Film {n} is {words[k]}.", "label": k} for n in range(8) for k in words]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    keys = {"dataset": str(tmp_path / "rows.jsonl"), "validation_dataset": None, "validation_split": 0.25}
    run = trained(base, tmp_path, KINDS, method="classification", **keys)
    task = load_task(run.task_file)
    assert task.label_set is not None
    labels = task.label_set

    def classifier() -> PreTrainedModel:
        return as_classifier(AutoModelForCausalLM.from_pretrained(base), labels)

    assert_peft_has_the_losses(run, classifier, of_texts, 1e-4)


@pytest.fixture(params=[pytest.param("8bit", marks=needs_bitsandbytes), "bfloat16"])
def precision(request: pytest.FixtureRequest, base: Path) -> Iterator[tuple[dict[str, Any], dict[str, Config], Any]]:
    """Keys of the task, its jobs, and a function that loads the base as it was trained on."""
    if request.param == "bfloat16":
        yield (
            {"dtype": "bfloat16", "adapter_dtype": "bfloat16"},
            {name: {**config, "lr": 5 * config["lr"]} for name, config in KINDS.items()},
            lambda: AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).eval(),
        )
        return

    def unpacked() -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(base).eval()
        task = Task(model=str(base), dataset="unused.jsonl", load_in_8bit=True)
        for name, module in load_network(task.base_model).named_modules():
            if isinstance(module, QuantisedLinear):
                model.get_submodule(name).weight.data.copy_(module.weight)
        return model

    yield {"load_in_8bit": True}, {name: {**config, "use_dora": False} for name, config in KINDS.items()}, unpacked


@pytest.mark.slow("models")
@pytest.mark.usefixtures("computes_in_half")
def test_on_other_precisions_too(
    precision: tuple[dict[str, Any], dict[str, Config], Any], base: Path, tmp_path: Path
) -> None:
    keys, kinds, model = precision
    run = trained(base, tmp_path, kinds, **keys)
    tolerance = 1e-4 if "load_in_8bit" in keys else 1e-2
    assert_peft_has_the_losses(run, model, of_tokens, tolerance)
    result = Engine(output_dir=tmp_path).evaluate(run.root, all_jobs=True, metric="loss")
    found = {adapter.name: adapter.evaluation.loss for adapter in result.adapters}
    assert found == pytest.approx(best_losses(run), rel=1e-6 if "load_in_8bit" in keys else 5e-3)
