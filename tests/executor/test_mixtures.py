"""Isolation of jobs that draw from a mixture; and the records of such jobs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oracle import SoloJob
from resident_jobs import DATA, Bank, assert_same_step, make_dataset, make_model, make_task
from tiny import curves_of, read_journal, run_task, write_rows

from alto.data import MixtureOrder, TaskData
from alto.data.dataset import joined
from alto.engine import Engine
from alto.runs import RunDir
from alto.spec import Task

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

SOURCES = [{"path": "maths.jsonl"}, {"path": "chat.jsonl"}]
MIXED = TaskData(
    train=joined([make_dataset(20, seed=1), make_dataset(8, seed=3)], ["maths", "chat"]),
    validation=joined([make_dataset(4, seed=2), make_dataset(3, seed=4)], ["maths", "chat"]),
)
CONFIGS: list[dict[str, Any]] = [
    {"lr": 1e-3, "r": 8, "batch_size": 2, "seed": 1, "mixture_weights": {"maths": 0.75, "chat": 0.25}},
    {"lr": 5e-4, "r": 16, "batch_size": 4, "seed": 2, "mixture_weights": {"maths": 0.1, "chat": 0.9}},
    {"lr": 1e-3, "r": 4, "batch_size": 3, "seed": 3, "mixture_weights": {"maths": 1, "chat": 0}},
]


def test_a_job_with_a_mixture_equals_peft_alone_on_the_same_rows() -> None:
    base = make_model("llama")
    bank = Bank(make_model("llama"), make_task(CONFIGS, dataset=SOURCES), slots=[2, 0, 1], data=MIXED)
    checked = 0
    for step in range(24):
        states = {
            job.id: (bank.trainer.bank.read(job.slot), bank.trainer.optimizer.read(job.slot)) for job in bank.training
        }
        found = bank.step()
        for job in bank.jobs:
            if job.id not in found or step not in (0, 1, 9, 13, 23):
                continue
            config = job.config
            shares = [share for _, share in config.mixture_weights or ()]
            order = MixtureOrder([20, 8], shares, config.per_device_train_batch_size, config.seed)
            alone = SoloJob(base, MIXED.train, config, order=order)
            alone.load(*states[job.id])
            assert_same_step(found[job.id], alone.train_step())
            other = SoloJob(base, MIXED.train, config)  # the plain order must differ
            other.load(*states[job.id])
            assert other.train_step().loss != pytest.approx(found[job.id].loss, rel=1e-4)
            checked += 1
    assert checked >= 10
    assert DATA.train.sources == ()


def make_mixed(folder: Path, **keys: Any) -> Task:
    sources = [
        {"path": str(write_rows(folder / "maths.jsonl", 20))},
        {"path": str(write_rows(folder / "chat.jsonl", 12, first=50))},
    ]
    settings = {
        "name": "mixed",
        "model": "alto-tiny",
        "dataset": sources,
        "validation_split": 0.25,
        "num_train_epochs": 2,
        "early_exit": False,
        "report_to": "none",
        "batch_size": 4,
        "lr": 1e-3,
        "r": 4,
    }
    return Task(**(settings | keys))


def curves_of_run(task: Task, folder: Path) -> dict[str, Any]:
    run_dir = RunDir.create(folder, task)
    run_task(task, run_dir)
    return dict(curves_of(read_journal(run_dir.root)))


WEIGHTS = [{"maths": 0.5, "chat": 0.5}, {"maths": 0.9, "chat": 0.1}, {"maths": 0, "chat": 1}]


def test_mixtures_race_in_one_bank_as_each_alone(tmp_path: Path) -> None:
    together = make_mixed(tmp_path, max_slots=3, search_space={"mixture_weights": WEIGHTS})
    curves = curves_of_run(together, tmp_path / "together")
    for number, weights in enumerate(WEIGHTS):
        alone = make_mixed(tmp_path, max_slots=1, mixture_weights=weights)
        [expected] = curves_of_run(alone, tmp_path / f"alone-{number}").values()
        found = curves[f"job-{number:03d}"]
        assert dict(found.train) == pytest.approx(dict(expected.train), rel=1e-5)
        assert dict(found.validation) == pytest.approx(dict(expected.validation), rel=1e-5)
    assert len({str(dict(curve.train)) for curve in curves.values()}) == 3


def test_the_loss_of_every_source_is_recorded_and_shown(tmp_path: Path) -> None:
    task = make_mixed(tmp_path, max_slots=2, max_steps=4, search_space={"mixture_weights": WEIGHTS[:2]})
    result = Engine(output_dir=tmp_path / "runs").tune(task)
    events = read_journal(result.run_dir)
    evaluations = [event for event in events if event["event"] == "eval"]
    assert evaluations
    for event in evaluations:
        assert set(event["metrics"]) == {"loss_on_maths", "loss_on_chat"}
        low, high = sorted(event["metrics"].values())
        assert low < event["validation_loss"] < high
    started = next(event for event in events if event["event"] == "task_started")
    assert [job["config"]["mixture_weights"] for job in started["jobs"]] == WEIGHTS[:2]
    assert started["notes"][0].startswith(
        "A mixture of maths (15 rows, 5 for validation), chat (9 rows, 3 for validation)"
    )
    metrics = json.loads((Path(result.adapter_dir) / "metrics.json").read_text())
    assert set(metrics["metrics"]) == {"loss_on_maths", "loss_on_chat"}
    report = (Path(result.run_dir) / "report.html").read_text()
    assert "source maths of the mixture" in report
    assert "maths 0.9, chat 0.1" in report


def test_the_mean_over_sources_is_the_whole_loss() -> None:
    from alto.executor.evaluator import Tally

    tally = Tally((), ("loss",), [1.0, 2.0, 4.0], (("a", 2), ("b", 1)))
    found = tally.evaluated([7.0 * 3, 1.0, 3.0, 6.0, 12.0])
    assert found.metrics == {"loss_on_a": 3.0, "loss_on_b": 3.0}
    assert replace(found).loss == 3.0
