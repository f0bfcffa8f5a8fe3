"""Tasks on a model and a tokenizer given as Python objects: their training, the objects afterwards, the need for an
id."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_task, read_journal, save_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from typer.testing import CliRunner

import alto
from alto.backbone.named_base import NamedBase
from alto.cli import app
from alto.errors import (
    ModelNotFoundError,
    RunChangedError,
    SpecError,
    TaskInterruptedError,
    UnsupportedError,
)
from alto.executor.profiling import planning
from alto.lora import read_adapter
from alto.runs import JournalEntry

SPACE = {"lr": [1e-3, 1e-2]}
LIMITS = {"max_slots": 4, "max_tokens_per_step": 4096, "max_tokens_per_pass": 4096}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


def load(folder: Path) -> tuple[PreTrainedModel, Any]:
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def changed(model: PreTrainedModel) -> PreTrainedModel:
    """Give the model weights that no name loads."""
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    return model


def task_of(rows: Path, model: Any, tokenizer: Any = None, **changes: Any) -> alto.Task:
    keys = {"num_train_epochs": 2, "search_space": SPACE, "r": 4, "report_to": "none", **LIMITS}
    given = {"model": model} if tokenizer is None else {"model": model, "tokenizer": tokenizer}
    return make_task(rows, **(keys | given | changes))


def numbers(result: alto.TaskResult) -> list[tuple[str, Any]]:
    events = (event for event in read_journal(result.run_dir) if event["event"] in ("train", "eval"))
    return sorted(
        (event["job"], json.dumps({key: event[key] for key in ("losses", "validation_loss") if key in event}))
        for event in events
    )


def state_of(model: PreTrainedModel) -> tuple[dict[str, Tensor], list[Any], str]:
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        [
            *((name, type(module), module.training) for name, module in model.named_modules()),
            *((name, id(one), one.requires_grad) for name, one in model.named_parameters()),
            *((name, sorted(vars(module))) for name, module in model.named_modules()),
        ],
        model.config.to_json_string(use_diff=False) + str(model.config._attn_implementation),
    )


def assert_unchanged(model: PreTrainedModel, before: tuple[dict[str, Tensor], list[Any], str]) -> None:
    tensors, modules, config = state_of(model)
    assert tensors.keys() == before[0].keys()
    assert all(torch.equal(before[0][name], tensor) for name, tensor in tensors.items())
    assert modules == before[1]
    assert config == before[2]


@pytest.fixture(scope="module")
def by_name(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> alto.TaskResult:
    rows = tmp_path_factory.mktemp("by-name")
    return alto.Engine(output_dir=rows / "runs").tune(task_of(rows, str(folder)))


def test_a_loaded_model_trains_as_its_name_does(folder: Path, tmp_path: Path, by_name: alto.TaskResult) -> None:
    model, tokenizer = load(folder)
    model.train()
    before = state_of(model)
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task_of(tmp_path, model, tokenizer))
    assert numbers(result) == numbers(by_name)
    assert_unchanged(model, before)


def test_its_run_names_what_loads_the_same(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load(folder)
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task_of(tmp_path, model, tokenizer))
    written = alto.load_task(Path(result.run_dir) / "task.yaml")
    assert (written.model, written.dtype, written.objects) == (str(folder), "float32", None)
    config = json.loads((Path(result.adapter_dir) / "adapter_config.json").read_text("utf-8"))
    assert config["base_model_name_or_path"] == str(folder)
    started = read_journal(result.run_dir)[0]
    assert started["base"]["files"], "the fingerprint of the files"
    scores = alto.Engine().evaluate(result.run_dir)
    assert scores.adapters[0].evaluation.loss == pytest.approx(result.best_validation_loss, rel=1e-5)
    assert result.load_best() is not None


@pytest.fixture(scope="module")
def of_object(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Any, alto.TaskResult, Any]:
    """A changed model, its tokenizer, the result of a task on it, and the model's state before."""
    rows = tmp_path_factory.mktemp("of-object")
    model, tokenizer = load(folder)
    before = state_of(changed(model))
    result = alto.Engine(output_dir=rows / "runs").tune(task_of(rows, model, tokenizer))
    return model, tokenizer, result, before


def test_a_model_that_no_name_loads_is_trained_itself(
    of_object: tuple[PreTrainedModel, Any, alto.TaskResult, Any], tmp_path: Path
) -> None:
    model, tokenizer, result, before = of_object
    assert_unchanged(model, before)
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = alto.Engine(output_dir=tmp_path / "runs").tune(task_of(tmp_path, str(tmp_path / "saved")))
    assert numbers(result) == numbers(saved)
    base = {key: read_journal(one.run_dir)[0]["base"][key] for one in (result, saved) for key in ("weights", "config")}
    assert base == {key: read_journal(result.run_dir)[0]["base"][key] for key in ("weights", "config")}


def test_its_run_says_in_words_that_it_was_an_object(
    of_object: tuple[PreTrainedModel, Any, alto.TaskResult, Any], folder: Path
) -> None:
    _, _, result, _ = of_object
    words = f"<LlamaForCausalLM object named '{folder}'>"
    assert alto.load_task(Path(result.run_dir) / "task.yaml").model == words
    config = json.loads((Path(result.adapter_dir) / "adapter_config.json").read_text("utf-8"))
    assert config["base_model_name_or_path"] == words
    started = read_journal(result.run_dir)[0]
    assert (started["model"], started["base_model"]) == (words, words)
    assert any("no name was found that loads the same" in note for note in started["notes"])
    card = (Path(result.adapter_dir) / "README.md").read_text("utf-8")
    assert "base = ...  # the model that ALTO was given as an object" in card
    assert "\nbase_model:" not in card
    assert "from_pretrained('<" not in card
    assert "&lt;LlamaForCausalLM object" in (Path(result.run_dir) / "report.html").read_text("utf-8")


def test_its_adapter_is_loaded_onto_the_object(
    of_object: tuple[PreTrainedModel, Any, alto.TaskResult, Any], folder: Path
) -> None:
    _, _, result, _ = of_object
    assert result.adapter_check is not None
    assert result.adapter_check.status in ("equal", "unchecked")
    assert result.load_best(changed(load(folder)[0])) is not None
    with pytest.raises(ModelNotFoundError, match=r"was given to alto.Task as an object .* result.load_best"):
        result.load_best()


def interrupted(folder: Path, rows: Path, *, is_changed: bool) -> tuple[PreTrainedModel, Any, Path, Any]:
    """Stop a run in the middle; return its model, tokenizer and folder, and the model's state before."""
    model, tokenizer = load(folder)
    before = state_of(changed(model) if is_changed else model)
    seen: list[JournalEntry] = []
    engine = alto.Engine(
        output_dir=rows / "runs",
        observers=[seen.append],
        is_interrupted=lambda: sum(entry.name == "eval" for entry in list(seen)) > 3,
    )
    with pytest.raises(TaskInterruptedError):
        engine.tune(task_of(rows, model, tokenizer, num_train_epochs=20, early_exit=False))
    (run,) = (rows / "runs").iterdir()
    return model, tokenizer, run, before


@pytest.mark.parametrize("is_changed", [True, False])
def test_a_run_is_resumed_with_the_object(folder: Path, tmp_path: Path, is_changed: bool) -> None:
    model, tokenizer, run, before = interrupted(folder, tmp_path, is_changed=is_changed)
    assert_unchanged(model, before)
    other, _ = load(folder)
    with torch.no_grad():
        other.lm_head.weight[3] += 1
    with pytest.raises(RunChangedError, match="other weights"):
        alto.Engine().resume(run, model=other, tokenizer=tokenizer)
    result = alto.Engine().resume(run, model=model, tokenizer=tokenizer)
    assert {job.steps for job in result.job_results} == {job.total_steps for job in result.job_results}
    assert_unchanged(model, before)
    again = alto.Engine().resume(run, model=model, tokenizer=tokenizer)
    assert again.best_validation_loss == result.best_validation_loss


def test_the_refit_of_a_named_object_loads_the_model_by_its_name_or_takes_the_object(
    folder: Path, tmp_path: Path
) -> None:
    model, tokenizer = load(folder)
    before = state_of(model)
    tuned = alto.Engine(output_dir=tmp_path / "runs").tune(task_of(tmp_path, model, tokenizer))
    by_name = alto.Engine().refit(tuned.run_dir)
    with_object = alto.Engine().refit(tuned.run_dir, model=model, tokenizer=tokenizer)
    assert numbers(with_object) == numbers(by_name)
    assert len(numbers(by_name)) >= 1
    assert_unchanged(model, before)
    for result in (by_name, with_object):
        assert result.refit_of == tuned.run_dir
        assert alto.load_task(Path(result.run_dir) / "task.yaml").model == str(folder)


def test_the_refit_of_an_object_without_a_name_trains_that_object(
    of_object: tuple[PreTrainedModel, Any, alto.TaskResult, Any], tmp_path: Path
) -> None:
    model, tokenizer, tuned, before = of_object
    result = alto.Engine().refit(tuned.run_dir, to=tmp_path / "refit", model=model, tokenizer=tokenizer)
    assert_unchanged(model, before)
    assert result.refit_of == tuned.run_dir
    started = read_journal(result.run_dir)[0]
    assert (started["num_train"], started["num_validation"]) == (24 + 6, 0)
    assert started["base"]["weights"] == read_journal(tuned.run_dir)[0]["base"]["weights"]
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = alto.Engine(output_dir=tmp_path / "runs").tune(task_of(tmp_path, str(tmp_path / "saved")))
    assert numbers(result) == numbers(alto.Engine().refit(saved.run_dir))


def test_a_refit_without_the_object_or_on_another_model_is_refused(
    of_object: tuple[PreTrainedModel, Any, alto.TaskResult, Any],
    by_name: alto.TaskResult,
    folder: Path,
    tmp_path: Path,
) -> None:
    _, tokenizer, tuned, _ = of_object
    with pytest.raises(ModelNotFoundError, match=r"as an object, found none: .* engine.refit\(RUN, model=…"):
        alto.Engine().refit(tuned.run_dir, to=tmp_path / "refit")
    found = CliRunner().invoke(app, ["refit", tuned.run_dir, "--output-dir", str(tmp_path / "refit")])
    assert isinstance(found.exception, ModelNotFoundError)  # alto.cli prints it
    other, _ = load(folder)
    with torch.no_grad():
        other.lm_head.weight[3] += 1
    for run in (tuned.run_dir, by_name.run_dir):
        with pytest.raises(RunChangedError, match=r"other weights .* tune again on the current model"):
            alto.Engine().refit(run, to=tmp_path / "refit", model=other, tokenizer=tokenizer)
    with pytest.raises(SpecError, match="tokenizer should be the loaded tokenizer"):
        alto.Engine().refit(tuned.run_dir, to=tmp_path / "refit", model=other)
    assert not (tmp_path / "refit").exists()


def test_an_interrupted_refit_of_an_object_is_resumed_with_it(
    of_object: tuple[PreTrainedModel, Any, alto.TaskResult, Any], tmp_path: Path
) -> None:
    model, tokenizer, tuned, before = of_object
    calls = iter(range(3))
    engine = alto.Engine(is_interrupted=lambda: next(calls, None) is None)
    with pytest.raises(TaskInterruptedError):
        engine.refit(tuned.run_dir, to=tmp_path / "cut", model=model, tokenizer=tokenizer)
    [run] = (tmp_path / "cut").iterdir()
    result = alto.Engine().resume(run, model=model, tokenizer=tokenizer)
    whole = alto.Engine().refit(tuned.run_dir, to=tmp_path / "whole", model=model, tokenizer=tokenizer)
    ours, theirs = (read_adapter(Path(one.adapter_dir)) for one in (result, whole))
    assert all(torch.equal(a, b) for name in theirs for a, b in zip(ours[name], theirs[name], strict=True))
    assert_unchanged(model, before)


def test_a_run_that_began_on_an_object_without_a_name_stays_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that appear later have another fingerprint."""
    model, tokenizer, run, _ = interrupted(folder, tmp_path, is_changed=True)
    named = NamedBase(model=str(folder), dtype="float32", chat_template=None)
    monkeypatch.setattr("alto.engine.objects.find_named_base", lambda objects: named)
    assert alto.Engine().resume(run, model=model, tokenizer=tokenizer).best_job


def test_without_the_object_a_run_is_resumed_only_by_name(folder: Path, tmp_path: Path) -> None:
    *_, run, _ = interrupted(folder, tmp_path, is_changed=False)
    assert alto.Engine().resume(run).best_job
    *_, run, _ = interrupted(folder, tmp_path / "changed", is_changed=True)
    with pytest.raises(ModelNotFoundError, match=r"give the object again: engine.resume\(RUN, model=…"):
        alto.Engine().resume(run)


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path) -> None:
    (tmp_path / "changed").mkdir()


@pytest.mark.parametrize("given", [{"model": "alto-tiny"}, {"tokenizer": object()}])
def test_a_run_is_resumed_with_both_objects(given: dict[str, Any], tmp_path: Path, by_name: alto.TaskResult) -> None:
    with pytest.raises(SpecError, match=r"model should be the loaded model|tokenizer should come with a model"):
        alto.Engine().resume(by_name.run_dir, **given)


@pytest.mark.parametrize("where", ["reading", "packing", "training", "exporting"])
def test_after_an_error_the_model_is_as_before(
    where: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load(folder)
    before = state_of(changed(model))

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"while {where}")

    changes: dict[str, Any] = {}
    match where:
        case "reading":
            monkeypatch.setattr("alto.engine.runner.limits_of", fail)
        case "packing":
            monkeypatch.setattr("alto.engine.runner.pack", fail)
        case "training":
            monkeypatch.setattr("alto.executor.trainer.Trainer.update", fail)
        case "exporting":
            monkeypatch.setattr("alto.engine.runner.export_best", fail)
    with pytest.raises(RuntimeError, match=f"while {where}"):
        alto.Engine(output_dir=tmp_path / "runs").tune(task_of(tmp_path, model, tokenizer, **changes))
    assert_unchanged(model, before)


def test_preview_and_plan_leave_it_as_it_is(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load(folder)
    before = state_of(model)
    task = task_of(tmp_path, model, tokenizer)
    engine = alto.Engine(output_dir=tmp_path / "runs")
    shown = engine.preview(task)
    assert shown.examples
    assert engine.plan(task).model == str(folder), "it is measured in another process, by its name"
    assert_unchanged(model, before)


def test_on_a_cpu_what_has_no_name_cannot_be_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load(folder)
    task = task_of(tmp_path, changed(model), tokenizer, max_slots=None)
    engine = alto.Engine(output_dir=tmp_path / "runs")
    with pytest.raises(UnsupportedError, match=r"profile: expected .* that can be loaded by name, .* max_slots"):
        engine.plan(task)
    monkeypatch.setattr(planning, "_is_roomy", lambda context: False)
    with pytest.raises(UnsupportedError, match="profile: expected"):
        engine.tune(task)
    assert not (tmp_path / "runs").exists()


CALLS: dict[str, Callable[[alto.Engine, alto.Task], object]] = {
    "batched_execution": lambda engine, task: engine.batched_execution([task]),
    "schedule": lambda engine, task: engine.schedule([task], method="lpt"),
    "queue": lambda engine, task: engine.queue([task], method="lpt").__enter__(),
    "several GPUs": lambda engine, task: engine.tune(task.replace(num_gpus=2)),
    "planned on several": lambda engine, task: engine.plan(task.replace(num_gpus=2)),
    "packing_from": lambda engine, task: engine.tune(task, packing_from="runs"),
}


@pytest.mark.parametrize("call", CALLS)
def test_where_other_processes_load_it_an_id_is_asked_for(call: str, folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load(folder)
    before = state_of(model)
    engine = alto.Engine(output_dir=tmp_path / "runs", total_gpus=2)
    with pytest.raises(
        UnsupportedError, match=r"model: expected the id of a model, or a folder, for .*save_pretrained"
    ):
        CALLS[call](engine, task_of(tmp_path, model, tokenizer))
    assert not (tmp_path / "runs").exists()
    assert_unchanged(model, before)


def test_a_reference_of_an_object_is_not_taken_from_another(folder: Path, tmp_path: Path) -> None:
    """A fingerprint samples weights, so results computed with an object are not cached for later tasks."""
    rows = [{"prompt": f"{n}?", "chosen": f" {n} yes", "rejected": f" {n} no"} for n in range(8)]
    model, tokenizer = load(folder)
    changed(model)
    keys: dict[str, Any] = {"dataset": rows, "method": "dpo", "max_steps": 2, "report_to": "none", **LIMITS}
    started = []
    for _ in range(2):
        result = alto.Engine(output_dir=tmp_path / "runs").tune(alto.Task(model=model, tokenizer=tokenizer, **keys))
        started.append(read_journal(result.run_dir)[0])
        with torch.no_grad():
            model.get_input_embeddings().weight[100] += 1  # between the windows that a fingerprint reads
    assert started[0]["base"]["weights"] == started[1]["base"]["weights"]
    assert [one["references"]["is_cached"] for one in started] == [False, False]
