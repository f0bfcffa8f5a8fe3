"""Files and settings that must not change between the stop of a run and its resumption, and those that may."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from architectures import build_tiny
from safetensors.torch import load_file, save_file
from tiny import load_tokenizer, make_task, read_journal, save_model

import alto
from alto.errors import RunChangedError, TaskInterruptedError


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, ``base``, and a run on it that was stopped half-way, ``run``."""
    folder = tmp_path_factory.mktemp("stopped")
    task = make_task(
        folder,
        model=str(save_model(folder / "base")),
        search_space={"lr": [1e-3, 1e-2]},
        num_train_epochs=2,
        checkpoint_interval_s=0,
        report_to="none",
    )
    calls = iter(range(4))
    engine = alto.Engine(output_dir=folder / "runs", is_interrupted=lambda: next(calls, None) is None)
    with pytest.raises(TaskInterruptedError):
        engine.tune(task)
    next((folder / "runs").iterdir()).rename(folder / "run")
    return folder


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(stopped_once, tmp_path / "copy")
    change_task(folder, model=str(folder / "base"))
    return folder


def change_task(folder: Path, **changes: Any) -> None:
    file = folder / "run" / "task.yaml"
    file.write_text(alto.load_task(file).replace(**changes).to_yaml())


def other_weights(folder: Path) -> None:
    file = folder / "base" / "model.safetensors"
    weights = load_file(file)
    weights[sorted(weights)[-1]].view(-1)[-1] += 0.5
    save_file(weights, file, metadata={"format": "pt"})


def other_config(folder: Path) -> None:
    file = folder / "base" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": 0.5}))


def other_shape(folder: Path) -> None:
    tokenizer = load_tokenizer()
    tokenizer.save_pretrained(folder / "other")
    build_tiny("llama", seed=1, vocab_size=len(tokenizer), hidden_size=32).save_pretrained(folder / "other")
    change_task(folder, model=str(folder / "other"))


def other_rows(folder: Path) -> None:
    task = alto.load_task(folder / "run" / "task.yaml")
    rows = Path(task.dataset).read_text().replace("plus", "and")
    (folder / "rows.jsonl").write_text(rows)
    change_task(folder, dataset=str(folder / "rows.jsonl"))


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights": (other_weights, r"model: expected the base model that the run began with, found other weights in "),
    "config": (other_config, r"found a different config\.json in .*; put it back as it was, or start a new run"),
    "shape": (other_shape, r"other weights: model\.safetensors \(.*bytes, expected; .*\), a different config\.json"),
    "dtype": (
        lambda folder: change_task(folder, dtype="bfloat16"),
        r"the precision that the run began with \(dtype: float32\), found dtype: bfloat16; set it back in its task\.y",
    ),
    "adapter_dtype": (
        lambda folder: change_task(folder, adapter_dtype="bfloat16"),
        r"\(adapter_dtype: float32\), found adapter_dtype: bfloat16",
    ),
    "optim_state_dtype": (
        lambda folder: change_task(folder, optim_state_dtype="bfloat16"),
        r"\(optim_state_dtype: null\), found optim_state_dtype: bfloat16",
    ),
    "rows": (other_rows, r"found different rows or tokens"),
    "eval_steps": (lambda folder: change_task(folder, eval_steps=0.5), r"different settings of eval_steps; put it"),
    "jobs": (lambda folder: change_task(folder, search_space={"lr": [1e-3, 2e-2]}), r"different settings of job-001"),
    "more jobs": (
        lambda folder: change_task(folder, search_space={"lr": [1e-3, 1e-2, 1e-1]}),
        r"different settings of job-002; put it back",
    ),
}


@pytest.mark.usefixtures("computes_in_half")
@pytest.mark.parametrize("what", REFUSED)
def test_a_run_does_not_go_on_with_another(what: str, stopped: Path) -> None:
    change, message = REFUSED[what]
    before = read_journal(stopped / "run")
    change(stopped)
    with pytest.raises(RunChangedError, match=message):
        alto.Engine().resume(stopped / "run")
    if what not in ("rows", "eval_steps", "jobs", "more jobs"):
        assert read_journal(stopped / "run") == before  # a refusal changes nothing


def test_a_model_that_has_moved_is_the_same(stopped: Path) -> None:
    (stopped / "base").rename(stopped / "moved")
    for file in (stopped / "moved").iterdir():
        os.utime(file, (1e9, 1e9))
    change_task(stopped, model=str(stopped / "moved"), dtype="float32")
    alto.Engine().resume(stopped / "run")
    events = read_journal(stopped / "run")
    assert events[-1]["event"] == "task_completed"
    assert ["base" in event for event in events if event["event"] in ("task_started", "task_resumed")] == [True, False]


def test_a_run_of_version_0_1_goes_on_with_a_notice_and_knows_its_base_from_then_on(stopped: Path) -> None:
    journal = stopped / "run" / "journal.jsonl"
    first, *others = read_journal(stopped / "run")
    base = first.pop("base")
    journal.write_text("".join(json.dumps(event) + "\n" for event in (first, *others)))
    alto.Engine().resume(stopped / "run")
    (resumed,) = [event for event in read_journal(stopped / "run") if event["event"] == "task_resumed"]
    assert resumed["notes"][-1].startswith("The journal of the run does not record its base model")
    assert {key: value for key, value in resumed["base"].items() if key != "files"} == {
        key: value for key, value in base.items() if key != "files"
    }
    other_weights(stopped)
    with pytest.raises(RunChangedError, match=r"other weights in .*; put it back as it was, or name .* with --base"):
        alto.Engine().evaluate(stopped / "run", metric="loss")
    result = alto.Engine().evaluate(stopped / "run", metric="loss", base=str(stopped / "base"))
    assert result.adapters[0].evaluation.loss is not None


@pytest.mark.parametrize("damage", [{}, 7, {"weights": None}, {"files": {"a": 1}}])
def test_a_base_that_the_journal_has_damaged_is_as_good_as_none(damage: Any, stopped: Path) -> None:
    first, *others = read_journal(stopped / "run")
    first["base"] = first["base"] | damage if isinstance(damage, dict) and "files" in damage else damage
    (stopped / "run" / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (first, *others)))
    alto.Engine().resume(stopped / "run")
    (resumed,) = [event for event in read_journal(stopped / "run") if event["event"] == "task_resumed"]
    assert resumed["notes"][-1].startswith("The journal of the run does not record its base model")
    assert resumed["base"]["weights"]


def test_other_tokens_of_a_run_of_version_0_1_are_explained_by_the_version(stopped: Path) -> None:
    first, *others = read_journal(stopped / "run")
    del first["base"]
    first["data"]["fingerprint"] = "of other tokens"
    (stopped / "run" / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (first, *others)))
    with pytest.raises(
        RunChangedError, match=r"version 0\.1 of ALTO, which began the run, made different tokens .* start a new run"
    ):
        alto.Engine().resume(stopped / "run")
