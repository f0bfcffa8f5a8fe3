"""The engine end to end on a tiny saved model: tuning, the paper's listing, its output, its errors, its files."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from observers import pass_time_for
from oracle import padded_batch
from peft import PeftModel
from tiny import load_tokenizer, make_task, read_journal
from transformers import AutoModelForCausalLM

import alto
from alto.backbone import Backbone
from alto.cluster.local import LocalCluster
from alto.data import JobRows, collate, read_task_rows
from alto.errors import (
    DataFileNotFoundError,
    ModelNotFoundError,
    NoResultError,
    SpecError,
    TargetModuleError,
    UnsupportedError,
)
from alto.executor import TaskContext
from alto.kernels import TokenSchedule
from alto.lora import AdapterBank, BankLayout, adapter_scale, inject, read_adapter
from alto.runs import FLUSH_TIMEOUT_S, Event, Journal, JournalEntry, read_events
from alto.runs.events import JobEvaluated

SPACE = {"lr": [1e-3, 1e-2], "batch_size": [4, 8]}


@pytest.fixture(scope="module")
def tuned(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[alto.Task, alto.TaskResult, list[Any]]:
    folder = tmp_path_factory.mktemp("tuned")
    seen: list[Mapping[str, Any]] = []
    task = make_task(folder, model=str(model), search_space=SPACE, r=4)
    result = alto.Engine(output_dir=folder / "runs", observers=[seen.append]).tune(task)
    return task, result, seen


def test_run_directory_holds_what_the_readme_says(tuned: tuple[alto.Task, alto.TaskResult, list[Any]]) -> None:
    task, result, seen = tuned
    root = Path(result.run_dir)
    names = {path.name for path in root.iterdir() if path.name != "tensorboard"}
    assert names == {"task.yaml", "journal.jsonl", "jobs", "best", "report.html", "run.lock"}
    resolved = alto.load_task(root / "task.yaml")
    limits = {key: getattr(resolved, key) for key in ("max_slots", "max_tokens_per_pass")}
    assert None not in limits.values()
    early_exit = resolved.early_exit
    assert resolved == task.replace(early_exit=early_exit, **limits)
    assert {rung.progress for rung in early_exit.selection_rungs} <= {
        rung.progress for rung in task.early_exit.resolved(steps=[15]).selection_rungs
    }
    assert early_exit.evaluations is not None
    assert early_exit.final_evaluations is not None
    assert Path(result.adapter_dir) == root / "best"
    assert result.best_job in (root / "report.html").read_text(encoding="utf-8")
    events = read_journal(root)
    assert [event["event"] for event in events] == [entry.name for entry in seen]
    assert events[-1]["best_validation_loss"] == result.best_validation_loss


def test_best_is_the_best_of_all_jobs(tuned: tuple[alto.Task, alto.TaskResult, list[Any]]) -> None:
    _, result, _ = tuned
    assert [job.job for job in result.job_results] == ["job-000", "job-001", "job-002", "job-003"]
    assert result.best_validation_loss == min(job.best_validation_loss for job in result.job_results)
    winner = Path(result.run_dir) / "jobs" / result.best_job / "best" / "adapter_model.safetensors"
    assert (Path(result.adapter_dir) / winner.name).read_bytes() == winner.read_bytes()


def test_metrics_tell_the_winner_and_the_saving(tuned: tuple[alto.Task, alto.TaskResult, list[Any]]) -> None:
    task, result, _ = tuned
    metrics = json.loads((Path(result.adapter_dir) / "metrics.json").read_text())
    best = next(job for job in result.job_results if job.job == result.best_job)
    assert metrics["job"] == result.best_job
    assert metrics["config"] == json.loads(json.dumps(dict(best.config)))
    assert metrics["validation_loss"] == result.best_validation_loss
    assert metrics["step"] == best.best_step
    assert metrics["num_jobs"] == len(task.jobs)
    assert metrics["samples_budgeted"] == 4 * 5 * 24
    assert metrics["samples_trained"] == sum(job.samples_trained for job in result.job_results)
    assert metrics["samples_saved"] == pytest.approx(result.samples_saved, abs=1e-6)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_peft_loads_the_best_adapter_with_the_bank_s_logits_and_loss(
    tuned: tuple[alto.Task, alto.TaskResult, list[Any]],
) -> None:
    task, result, _ = tuned
    folder = Path(result.adapter_dir)
    base_path = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    base = AutoModelForCausalLM.from_pretrained(base_path)
    peft_model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_path), folder).eval()
    data = read_task_rows(task).encode(load_tokenizer())

    batch = padded_batch(data.validation, range(len(data.validation)))
    with torch.no_grad():
        output = peft_model(**batch)
        untuned_loss = base(**batch).loss.item()
    assert output.loss.item() == pytest.approx(result.best_validation_loss, rel=1e-5)
    assert untuned_loss > result.best_validation_loss * 1.001

    backbone = Backbone(base, load_tokenizer(), base_path)
    job = next(job for job in TaskContext.of(task, backbone, data).jobs if job.id == result.best_job)
    bank = AdapterBank(BankLayout(modules=job.shape.targets, max_rank=job.shape.rank), 1)
    bank.occupy(0, job.shape)
    bank.write(0, read_adapter(folder))
    tokens = collate([JobRows(data.validation, 0, tuple(range(len(data.validation))))])
    schedule = TokenSchedule.build(tokens.slots, tokens.job_tokens, scales=[adapter_scale(job.config)], dropout=None)
    with torch.no_grad(), inject(base, bank).use(schedule):
        hidden_TH = backbone.hidden_states(tokens.input_ids_T, tokens.position_ids_T, tokens.sequence_lengths)
        found_TV = base.get_output_embeddings()(hidden_TH)
    mask = batch["attention_mask"].bool()
    assert torch.linalg.norm(found_TV - output.logits[mask]) <= 1e-5 * torch.linalg.norm(found_TV)


@pytest.mark.slow("queues")
def test_paper_listing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = alto.Engine(strategy="adapter_parallel", total_gpus=1, output_dir=tmp_path / "runs")
    tasks = [
        make_task(tmp_path, name=name, model=str(model), num_gpus=1, num_train_epochs=epochs, search_space=SPACE, r=4)
        for name, epochs in (("long", 3), ("short", 1))
    ]
    schedule = engine.schedule(tasks, method="MILP")
    seconds = {placement.task: placement.duration_s for placement in schedule.placements}
    assert seconds.keys() == {"long", "short"}
    assert seconds["short"] < seconds["long"]
    assert schedule.status == "optimal"
    # One after the other, or in one process if the measurements say that this is faster.
    is_shared = len({placement.executor for placement in schedule.placements} - {""}) == 1
    assert schedule.makespan_s == pytest.approx(max(seconds.values()) if is_shared else sum(seconds.values()))
    assert not (tmp_path / "runs").exists()
    with monkeypatch.context() as context:
        context.setattr(LocalCluster, "start", None)  # the measurements are cached
        assert engine.schedule(tasks, method="MILP").makespan_s == schedule.makespan_s

    early_exit = alto.EarlyExit(policy="paper", warmup_ratio=0.05, select_ratio=0.25)
    results = engine.batched_execution(tasks, schedule, early_exit)
    assert [result.task for result in results] == ["long", "short"]
    for result in results:
        assert sum(job.exit_reason is not alto.ExitReason.UNDERPERFORMING for job in result.job_results) == 1
        started = read_journal(result.run_dir)[0]
        assert started["early_exit"]["policy"] == "paper"
        assert started["early_exit"]["rungs"] == [[0.05, 0.25]]


@pytest.mark.slow("queues")
def test_without_schedule_and_settings_each_task_keeps_its_own(model: Path, tmp_path: Path) -> None:
    task = make_task(tmp_path, model=str(model), max_steps=2, early_exit=False, r=4, search_space={"lr": [1e-3]})
    (result,) = alto.Engine(output_dir=tmp_path / "runs").batched_execution([task])
    assert [job.exit_reason for job in result.job_results] == [None]
    assert read_journal(result.run_dir)[0]["early_exit"]["enabled"] is False


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"strategy": "magic"}, SpecError, r"strategy: expected one of adapter_parallel, single, found 'magic'"),
        ({"total_gpus": 0}, SpecError, r"total_gpus: expected at least 1, found 0"),
    ],
)
def test_engine_refuses(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        alto.Engine(**settings)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dataset": "absent.jsonl"}, DataFileNotFoundError, r"absent\.jsonl"),
        ({"validation_dataset": "absent.jsonl"}, DataFileNotFoundError, r"absent\.jsonl"),
        ({"target_modules": ["q_porj"]}, TargetModuleError, r"q_porj"),
        ({"model": "./no-such-model"}, ModelNotFoundError, r"'\./no-such-model'"),
    ],
)
def test_a_wrong_task_leaves_nothing_on_disk(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    task = make_task(tmp_path, **({"model": str(model)} | changes))
    with pytest.raises(error, match=message):
        alto.Engine(output_dir=tmp_path / "runs").tune(task)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("single", r"num_gpus: expected 1 under the strategy 'single', found 4 for 'tiny'"),
        ("adapter_parallel", r"num_gpus: expected at most 3, the GPUs of one machine, found 4 for 'tiny'"),
    ],
)
def test_more_gpus_than_a_task_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    engine = alto.Engine(strategy=strategy, output_dir=tmp_path / "runs")
    task = make_task(tmp_path, num_gpus=4)
    for ask in (engine.tune, engine.plan):
        with pytest.raises(UnsupportedError, match=message):
            ask(task)
    assert not (tmp_path / "runs").exists()


def test_the_single_strategy_is_one_process_on_cpu_slots(model: Path, tmp_path: Path) -> None:
    task = make_task(tmp_path, model=str(model), num_gpus=2, max_steps=2, search_space={"lr": [1e-3]}, r=4)
    result = alto.Engine(strategy="single", output_dir=tmp_path / "runs").tune(task)
    assert not (Path(result.run_dir) / "logs").exists()


def test_a_wrong_task_on_several_ranks_is_a_named_error_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    task = make_task(tmp_path, model=str(model), num_gpus=2, target_modules=["q_porj"])
    with pytest.raises(TargetModuleError, match="q_porj"):
        alto.Engine(output_dir=tmp_path / "runs").tune(task)
    assert not (tmp_path / "runs").exists()


def test_a_plan_of_a_task_on_several_ranks_is_measured_by_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))
    task = make_task(tmp_path, model=str(model), num_gpus=2, search_space=SPACE, r=4)
    plan = alto.Engine(output_dir=tmp_path / "runs").plan(task)
    assert (plan.num_jobs, plan.is_cached) == (4, False)
    assert plan.expected_duration_s > 0
    assert plan.max_slots % 2 == 0
    assert not (tmp_path / "runs").exists()


def test_an_optimizer_that_is_not_installed_is_found_out_before_anything_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alto.lora.row_optimizers.find_spec", lambda name: None)
    task = make_task(tmp_path, model=str(model), search_space={"optim": ["adamw_torch", "adamw_8bit"]})
    with pytest.raises(UnsupportedError, match="'adamw_8bit' needs the package bitsandbytes"):
        alto.Engine(output_dir=tmp_path / "runs").tune(task)
    assert not (tmp_path / "runs").exists()


def test_a_run_without_a_result_is_kept_with_its_report(model: Path, tmp_path: Path) -> None:
    task = make_task(tmp_path, model=str(model), search_space={"lr": [1e30, 1e31]}, max_grad_norm=0)
    with pytest.raises(NoResultError, match="lower the learning rates"):
        alto.Engine(output_dir=tmp_path / "runs").tune(task)
    (root,) = (tmp_path / "runs").iterdir()
    assert "diverging" in (root / "report.html").read_text(encoding="utf-8")
    assert not (root / "best").exists()


def test_a_failure_in_the_middle_keeps_its_error(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = Journal.append

    def fail(journal: Journal, event: Event) -> JournalEntry:
        if isinstance(event, JobEvaluated):
            raise OSError("disk full")
        return append(journal, event)

    monkeypatch.setattr(Journal, "append", fail)
    task = make_task(tmp_path, model=str(model), max_steps=2)
    with pytest.raises(OSError, match="disk full"):
        alto.Engine(output_dir=tmp_path / "runs").tune(task)
    (root,) = (tmp_path / "runs").iterdir()
    assert (root / "report.html").is_file()


def test_observers_that_raise_hang_or_are_slow_change_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One of each kind: the hanging one delays the end by at most the timeout, and a working one gets everything."""
    waits_s = pass_time_for("hangs", monkeypatch)
    gate, calls = threading.Event(), list[str]()
    seen: list[JournalEntry] = []

    def raises(entry: JournalEntry) -> None:
        calls.append("raises")
        raise RuntimeError("the observer's own fault")

    def hangs(entry: JournalEntry) -> None:
        calls.append("hangs")
        gate.wait()

    def is_slow(entry: JournalEntry) -> None:
        time.sleep(0.01)
        seen.append(entry)

    task = make_task(tmp_path, model=str(model), max_steps=2)
    try:
        result = alto.Engine(output_dir=tmp_path / "runs", observers=[raises, hangs, is_slow]).tune(task)
    finally:
        gate.set()
    assert Path(result.adapter_dir).is_dir()
    assert sorted(calls) == ["hangs", "raises"]
    assert [entry.to_dict() for entry in seen] == read_events(Path(result.run_dir) / "journal.jsonl")
    failed, late = sorted(caplog.messages, key=lambda message: "did not finish" in message)
    assert "failed and gets no more events" in failed
    assert "the observer's own fault" in failed
    assert "did not finish in time" in late
    *of_trackers, first, hanging, last = waits_s
    assert (first, hanging, last) == (FLUSH_TIMEOUT_S, FLUSH_TIMEOUT_S, 0.0), "all observers together"
    assert set(of_trackers) <= {FLUSH_TIMEOUT_S}


def test_a_failure_before_the_first_event_keeps_its_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for the bank")

    monkeypatch.setattr("alto.engine.runner.TaskSession", fail)
    with pytest.raises(MemoryError, match="no room for the bank"):
        alto.Engine(output_dir=tmp_path / "runs").tune(make_task(tmp_path, model=str(model)))


def test_losses_are_finite_numbers(tuned: tuple[alto.Task, alto.TaskResult, list[Any]]) -> None:
    _, result, _ = tuned
    assert all(math.isfinite(job.best_validation_loss) for job in result.job_results)
    assert result.duration_s > 0


ROWS = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(1, 13)]


def tune(folder: Path, *, progress: bool | None) -> alto.TaskResult:
    task = alto.Task(model="alto-tiny", dataset=ROWS, name="sums", max_steps=2, search_space={"r": [2, 4]})
    return alto.Engine(output_dir=folder, progress=progress).tune(task)


@pytest.mark.parametrize("progress", [False, None], ids=["never", "not-a-terminal"])
def test_nothing_is_printed_where_it_is_not_asked_for(
    progress: bool | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune(tmp_path, progress=progress)
    assert capsys.readouterr().out == ""


def test_progress_and_then_the_table_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tune(tmp_path, progress=True)
    shown = capsys.readouterr().out
    assert "task sums: 2 jobs (sft)" in shown
    progress, _, table = shown.partition("sums finished after")
    assert "admitted job-000" in progress
    assert f"★ {result.best_job}" in table
    assert "admitted" not in table


def test_a_finished_run_that_is_resumed_shows_its_table_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tune(tmp_path, progress=False)
    again = alto.Engine(output_dir=tmp_path, progress=True).resume(result.run_dir)
    assert again.best_job == result.best_job
    assert f"★ {result.best_job}" in capsys.readouterr().out
    assert alto.Engine(output_dir=tmp_path, progress=False).resume(result.run_dir).best_job == result.best_job
    assert capsys.readouterr().out == ""
