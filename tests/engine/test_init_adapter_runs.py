"""Runs whose jobs begin with a saved adapter: of another run, resumed, refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny import make_task, read_journal, save_model

import alto
from alto.engine.runner import portable
from alto.errors import (
    ConflictingKeysError,
    ModelError,
    RunChangedError,
    RunNotFoundError,
    TargetModuleError,
    TaskInterruptedError,
)
from alto.lora import read_adapter

QUIET: dict[str, Any] = {"report_to": "none", "num_train_epochs": 2, "eval_steps": 0.5, "max_slots": 2}
FIRST: dict[str, Any] = {"r": 4, "lora_alpha": 12, "use_rslora": True, "target_modules": ["q_proj", "up_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, ``base``, and a finished run on it, ``first``."""
    folder = tmp_path_factory.mktemp("init")
    task = make_task(folder, model=str(save_model(folder / "base")), lr=1e-2, **FIRST, **QUIET)
    alto.Engine(output_dir=folder / "runs").tune(task)
    next((folder / "runs").iterdir()).rename(folder / "first")
    return folder


def next_task(folder: Path, **settings: Any) -> alto.Task:
    keys = {"model": str(folder / "base"), "init_adapter": str(folder / "first"), "keep": "all", **QUIET}
    if "lr" not in settings.get("search_space", {}):
        keys["lr"] = 1e-2
    return make_task(folder, **(keys | settings))


def write_pairs(path: Path) -> str:
    rows = [{"prompt": f"{n} plus 1?", "chosen": f" It is {n + 1}.", "rejected": " No."} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_run_begins_with_the_best_adapter_of_another(folder: Path, tmp_path: Path) -> None:
    before = alto.load_run(folder / "first")
    result = alto.Engine(output_dir=tmp_path).tune(next_task(folder, search_space={"lr": [1e-2, 1e-30]}))
    events = read_journal(result.run_dir)
    started, base = events[0], next(event for event in events if event["event"] == "base_evaluated")
    assert started["init_adapter"]["path"] == str(folder / "first" / "best")
    assert "Every job begins with the adapter in" in started["notes"][0]
    config = started["jobs"][0]["config"]
    assert {key: config[key] for key in FIRST} == FIRST
    assert base["values"][0]["validation_loss"] == pytest.approx(before.best_validation_loss, rel=1e-5)
    start = read_adapter(folder / "first" / "best")
    stayed = read_adapter(Path(result.run_dir) / "jobs" / "job-001" / "last")
    for name, (a_KR, b_RN) in start.items():
        assert stayed[name][0].equal(a_KR), "at that rate the job learns nothing"
        assert stayed[name][1].equal(b_RN)
    assert result.best_job == "job-000"
    assert result.best_validation_loss < before.best_validation_loss
    if result.outcome.adapter_check is not None and result.outcome.adapter_check.status != "unchecked":
        assert result.outcome.adapter_check.status == "equal"


def test_dpo_after_sft_begins_at_no_difference_from_its_reference(folder: Path, tmp_path: Path) -> None:
    task = next_task(
        folder, dataset=write_pairs(tmp_path / "pairs.jsonl"), validation_dataset=None, method="dpo", beta=0.5
    )
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task)
    events = read_journal(result.run_dir)
    base = next(event for event in events if event["event"] == "base_evaluated")["values"][0]
    assert base["validation_loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert base["metrics"]["kl"] == pytest.approx(0.0, abs=1e-5)
    first = next(event for event in events if event["event"] == "train")
    assert first["losses"][0] == pytest.approx(math.log(2), abs=1e-5)
    assert "which is also the reference of dpo" in events[0]["notes"][0]


def test_an_interrupted_run_has_the_same_result(folder: Path, tmp_path: Path) -> None:
    task = next_task(folder, search_space={"lr": [1e-2, 3e-3]}, checkpoint_interval_s=0, max_slots=1)
    whole = alto.Engine(output_dir=tmp_path / "whole").tune(task)
    calls = iter(range(4))
    with pytest.raises(TaskInterruptedError):
        alto.Engine(output_dir=tmp_path / "cut", is_interrupted=lambda: next(calls, None) is None).tune(task)
    [run] = (tmp_path / "cut").iterdir()
    resumed = alto.Engine().resume(run)
    assert resumed.best_validation_loss == whole.best_validation_loss
    for job in ("job-000", "job-001"):
        ours, theirs = (read_adapter(Path(root) / "jobs" / job / "last") for root in (run, whole.run_dir))
        assert all(ours[name][1].equal(theirs[name][1]) for name in theirs)


PBT = {"algorithm": "pbt", "num_initial_jobs": 4, "interval": 0.3, "exchanged": 0.25}
RATES: dict[str, dict[str, Any]] = {
    "grid": {"search_space": {"lr": [1e-3, 5e-4, 2e-4]}},
    "pbt": {"search_space": {"lr": {"min": 1e-4, "max": 1e-3, "log": True}}, "search": PBT, "max_slots": 4},
}


@pytest.mark.parametrize("kind", RATES)
def test_a_run_on_two_ranks_is_that_on_one(kind: str, folder: Path, tmp_path: Path) -> None:
    if kind == "pbt":
        pytest.importorskip("optuna", reason="needs the search extra: pip install -e '.[search]'")
    one, two = (
        alto.Engine(output_dir=tmp_path / f"on-{num_gpus}").tune(
            next_task(folder, batch_size=4, num_gpus=num_gpus, **RATES[kind])
        )
        for num_gpus in (1, 2)
    )
    assert read_journal(two.run_dir)[0]["num_ranks"] == 2
    assert [job.config for job in two.job_results] == [job.config for job in one.job_results]
    assert (len(one.job_results) > 4) == (kind == "pbt"), "copies were made"
    for job, expected in one.history.jobs.items():
        found = two.history.jobs[job]
        assert found.train_losses == pytest.approx(expected.train_losses, rel=1e-4, nan_ok=True)
        assert found.best_validation_loss == pytest.approx(expected.best_validation_loss, rel=1e-4)
    assert two.best_job == one.best_job


@pytest.mark.parametrize("change", ["weights", "gone", "key"])
def test_a_run_is_not_resumed_with_another_adapter(change: str, folder: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(folder / "first" / "best", tmp_path / "adapter")
    calls = iter(range(4))
    engine = alto.Engine(output_dir=tmp_path / "runs", is_interrupted=lambda: next(calls, None) is None)
    with pytest.raises(TaskInterruptedError):
        engine.tune(next_task(folder, init_adapter=str(adapter)))
    [run] = (tmp_path / "runs").iterdir()
    error: type[Exception] = RunChangedError
    if change == "weights":
        other = alto.Engine(output_dir=tmp_path / "other").tune(next_task(folder, init_adapter=str(adapter), seed=7))
        shutil.copy(Path(other.adapter_dir) / "adapter_model.safetensors", adapter)
        reason = "found a different one in .*adapter; put its files back"
    elif change == "gone":
        shutil.rmtree(adapter)
        error, reason = RunNotFoundError, "expected the adapter that jobs begin with in .*, found no such folder"
    else:
        file = run / "task.yaml"
        lines = [line for line in file.read_text().splitlines() if not line.startswith("init_adapter")]
        file.write_text("\n".join(lines) + "\n")
        reason = r"init_adapter: expected the value that the run began with \(.*adapter\), found none"
    with pytest.raises(error, match=reason):
        alto.Engine().resume(run)


def test_the_shape_of_the_adapter_is_part_of_the_task(folder: Path) -> None:
    task = portable(next_task(folder))
    wanted = {**FIRST, "target_modules": ("q_proj", "up_proj")}
    assert {key: getattr(task.jobs[0].config, key) for key in FIRST} == wanted
    assert portable(task) == task


def test_the_automatic_search_space_leaves_the_shape_to_the_adapter(folder: Path) -> None:
    keys = {"model": str(folder / "base"), "init_adapter": str(folder / "first"), "search_space": "auto"} | QUIET
    task = portable(make_task(folder, **keys))
    assert {(job.config.r, job.config.lora_alpha) for job in task.jobs} == {(4, 12.0)}
    assert set(task.search_space.keys) == {"learning_rate", "per_device_train_batch_size"}


@pytest.mark.parametrize(
    ("settings", "error", "reason"),
    [
        ({"r": 8}, TargetModuleError, "init_adapter: expected job-000 to train .* found rank 8 on "),
        ({"search_space": {"r": [4, 8]}}, TargetModuleError, "expected job-001 to train"),
        ({"init_adapter": "nowhere"}, RunNotFoundError, r"init_adapter: expected a run .* found no such folder"),
        ({"model": "alto-tiny"}, ModelError, "found one that was trained on .*base, which has other weights"),
    ],
    ids=str,
)
def test_refused_before_a_run_begins(
    settings: dict[str, Any], error: type[Exception], reason: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=reason):
        alto.Engine(output_dir=tmp_path / "runs").tune(next_task(folder, **settings))
    assert not (tmp_path / "runs").exists()


def test_two_starts_are_one_too_many(folder: Path) -> None:
    for place in ({"init_lora_weights": "gaussian"}, {"search_space": {"init_lora_weights": ["gaussian", "default"]}}):
        with pytest.raises(ConflictingKeysError, match="init_lora_weights and init_adapter are both given"):
            next_task(folder, **place)


def test_a_base_of_another_name_is_noted(folder: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(folder / "first" / "best", tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for named, note in (("somebody/somewhere", "whether they are the same cannot be checked"), (None, "names no base")):
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": named}))
        plan = alto.Engine().plan(next_task(folder, init_adapter=str(adapter)))
        assert any(note in text for text in plan.notes), plan.notes
    moved = shutil.copytree(folder / "base", tmp_path / "same")
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(moved)}))
    plan = alto.Engine().plan(next_task(folder, init_adapter=str(adapter)))
    assert sum("init_adapter:" in text for text in plan.notes) == 0
