"""A task on texts with labels, from its file to an adapter that PEFT loads."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path

import pytest
import torch
from oracle_classification import ONE_LABEL, as_classifier, data_of
from peft import PeftModel
from resident_jobs import Bank, make_model, make_task
from tiny import load_tiny, random_llama, read_journal, run_task

from alto.backbone import Backbone, check_classifier
from alto.data import read_task_rows
from alto.engine import Engine
from alto.errors import UnsupportedModelError
from alto.evaluation import PeftCheck
from alto.executor.checkpoint import read_state, write_state
from alto.lora import ModuleNames, write_adapter
from alto.runs import RunDir
from alto.spec import Task

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def reviews(folder: Path, name: str = "reviews.jsonl", *, seed: int = 0) -> Path:
    """Write 48 short texts of two kinds."""
    drawn = random.Random(seed)
    words = {"good": ["warm", "gripping", "a joy"], "bad": ["dull", "a mess", "too long"]}
    rows = [{"text": f"The film {n} is {drawn.choice(words[k])}.", "label": k} for n in range(24) for k in words]
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_task_trains_to_its_end_and_peft_loads_its_best_adapter_with_the_same_losses(tmp_path: Path) -> None:
    task = Task(
        model="alto-tiny",
        dataset=str(reviews(tmp_path)),
        validation_split=0.25,
        test_dataset=str(reviews(tmp_path, "test.jsonl", seed=1)),
        task_type="SEQ_CLS",
        metric="macro_f1",
        batch_size=6,
        num_train_epochs=4,
        eval_steps=0.5,
        search_space={"learning_rate": [1e-3, 1e-2], "r": [4, 8]},
        early_exit={"enabled": False},
    )
    rows = read_task_rows(task)
    assert rows.labels is not None
    task = task.with_labels(rows.labels.labels)
    run_dir = RunDir.create(tmp_path / "runs", task)
    result = run_task(task, run_dir)
    assert result.best_job is not None
    events = [event for event in read_journal(run_dir.root) if event["event"] == "eval"]
    assert {frozenset(event["metrics"]) for event in events} == {frozenset({"accuracy", "macro_f1"})}
    best = next(event for event in reversed(events) if event["job"] == result.best_job and event["is_best"])
    assert best["metrics"]["accuracy"] >= 0.9, "it learns"
    assert set(best["test_metrics"]) == {"accuracy", "macro_f1"}
    assert result.test_metrics == best["test_metrics"]
    folder = run_dir.job(result.best_job, "best")
    assert json.loads((folder / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    backbone, data = load_tiny(task)
    assert data.validation.label_set is not None
    assert data.validation.classes is not None
    model = PeftModel.from_pretrained(
        as_classifier(random_llama(len(backbone.tokenizer)), data.validation.label_set), folder
    )
    assert data.test is not None
    assert data.test.classes is not None
    with torch.no_grad():
        losses = [
            model(input_ids=ids[None], labels=torch.tensor([label])).loss.item()
            for ids, label in zip(data.validation.input_ids, data.validation.classes, strict=True)
        ]
        right = [
            int(model(input_ids=ids[None]).logits.argmax()) == label
            for ids, label in zip(data.test.input_ids, data.test.classes, strict=True)
        ]
    assert best["test_metrics"]["accuracy"] == pytest.approx(sum(right) / len(right))
    assert losses == pytest.approx(best["loss_rows"], rel=1e-3, abs=1e-5)
    check = PeftCheck(backbone)(folder)
    assert (check.status, check.why) == ("equal", "")
    tensors = {name: tensor for name, tensor in model.state_dict().items() if "score" in name}
    assert any("modules_to_save" in name for name in tensors)


def test_the_check_with_peft_finds_a_changed_head(tmp_path: Path) -> None:
    bank = Bank(
        make_model("llama"),
        make_task([{"r": 4}], method="classification").with_labels(ONE_LABEL),
        data=data_of(ONE_LABEL),
    )
    (job,) = bank.jobs
    weights = bank.trainer.bank.read(job.slot)
    names = ModuleNames.of(bank.backbone.model)
    write_adapter(tmp_path, weights, job.config, "unused", names)
    check = PeftCheck(bank.backbone)
    assert check(tmp_path).status == "equal"
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config["task_type"], config["modules_to_save"] = "CAUSAL_LM", None
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert check(tmp_path).status == "different"


def test_a_parked_job_continues_bit_by_bit(tmp_path: Path) -> None:
    configs: list[dict[str, object]] = [{"r": 4, "lr": 1e-3, "seed": 1}, {"r": 8, "lr": 5e-3, "seed": 2}]
    task = make_task(configs, method="classification").with_labels(ONE_LABEL)
    whole, parted = (Bank(make_model("llama"), task, data=data_of(ONE_LABEL)) for _ in range(2))
    for bank in (whole, parted):
        bank.step()
    job, trainer = parted.jobs[1], parted.trainer
    write_adapter(tmp_path, trainer.bank.read(1), job.config, "unused", ModuleNames.of(parted.backbone.model))
    write_state(tmp_path, trainer.optimizer.read(1))
    (tmp_path / "state.json").write_text('{"step": 1}', encoding="utf-8")
    trainer.bank.release(1)
    job.slot = 2
    trainer.admit(job, 2, *read_state(tmp_path))
    for _ in range(2):
        expected, found = whole.step(), parted.step()
        for one in whole.jobs:
            assert found[one.id].loss == expected[one.id].loss
            for name, update in expected[one.id].updates.items():
                assert torch.equal(found[one.id].updates[name], update), name


def test_a_base_model_whose_classifier_reads_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = Backbone(make_model("llama"), None, "unused")
    check_classifier(backbone, ONE_LABEL)
    own = backbone.hidden_states
    monkeypatch.setattr(backbone, "hidden_states", lambda *args: own(*args) * 1.01)
    with pytest.raises(UnsupportedModelError, match="read the hidden state of the last token"):
        check_classifier(backbone, ONE_LABEL)
    without = copy.copy(backbone)
    without.model = copy.deepcopy(backbone.model)
    without.model.config.model_type = "llama4_text"
    without.model.config.__class__ = type("OtherConfig", (type(backbone.model.config),), {})
    with pytest.raises(UnsupportedModelError, match="sequence classification model of it"):
        check_classifier(without, ONE_LABEL)


def test_a_regression_on_equal_numbers_has_a_result_and_a_note_on_what_is_missing(tmp_path: Path) -> None:
    rows = [{"text": f"Number {n} of a film.", "label": 0.1} for n in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = Task(
        model="alto-tiny",
        dataset=str(tmp_path / "rows.jsonl"),
        validation_split=0.25,
        method="regression",
        metric="pearson",
        batch_size=6,
        max_steps=4,
        eval_steps=0.5,
        search_space={"learning_rate": [1e-3, 1e-2], "r": [4]},
        report_to="none",
    )
    result = Engine(output_dir=tmp_path / "runs").tune(task)
    events = read_journal(result.run_dir)
    evaluations = [event for event in events if event["event"] == "eval"]
    assert {event["metrics"]["pearson"] for event in evaluations} == {"nan"}
    best = {}
    for event in evaluations:
        best[event["job"]] = min(event["validation_loss"], best.get(event["job"], math.inf))
    assert result.best_job == min(best, key=best.__getitem__)
    notes = events[0]["notes"]
    assert "All training rows have the same value of LABEL_0: there is nothing to learn." in notes
    assert "All validation rows have the same value of LABEL_0: pearson, the correlation, is undefined." in notes
    assert json.loads((Path(result.adapter_dir) / "metrics.json").read_text())["metrics"]["pearson"] == "nan"
    assert (Path(result.run_dir) / "report.html").is_file()


def test_checkpointed_layers_are_still_recomputed_after_the_checks_with_transformers_and_peft(tmp_path: Path) -> None:
    """Both checks wrap the layers into a model of transformers or PEFT, in evaluation mode."""
    backbone = Backbone(make_model("llama"), None, "unused", gradient_checkpointing=True)
    layers = [module for module in backbone.model.modules() if module.training]
    assert len(layers) == 2
    check_classifier(backbone, ONE_LABEL)
    assert all(layer.training for layer in layers)
    task = make_task([{"r": 4}], method="classification").with_labels(ONE_LABEL)
    bank = Bank(make_model("llama"), task, data=data_of(ONE_LABEL))
    (job,) = bank.jobs
    write_adapter(tmp_path, bank.trainer.bank.read(job.slot), job.config, "unused", ModuleNames.of(bank.backbone.model))
    assert PeftCheck(backbone)(tmp_path).status == "equal"
    assert [module for module in backbone.model.modules() if module.training] == layers
