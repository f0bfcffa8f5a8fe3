"""Test rows: the loss of best adapters is measured on them, and nothing depends on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import SoloJob, padded_batch
from preference_pairs import make_pairs
from resident_jobs import DATA, PAIRS, make_dataset, make_model, make_task
from shared_executor import built

from alto.backbone import Backbone
from alto.data import EncodedDataset, TaskData
from alto.early_exit import Recording
from alto.executor import run_alone
from alto.executor.micro_batches import RowTooLargeError
from alto.executor.trainer import Trainer
from alto.lora import read_adapter
from alto.runs import RunDir, read_entries, read_events, read_history
from alto.spec import Task

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

TEST = make_dataset(9, seed=5)
JOBS = [{"lr": 1e-3, "r": 4, "batch_size": 4, "seed": 1}, {"lr": 3e-3, "r": 8, "batch_size": 2, "seed": 2}]
EXIT = {"rungs": [[0.3, 1.0], [0.6, 0.5]], "detect_divergence": False, "detect_overfitting": False}


def run(folder: Path, data: TaskData, jobs: Any = JOBS, **settings: Any) -> tuple[Path, list[dict[str, Any]]]:
    task = make_task(jobs, **{"eval_steps": 0.2, "early_exit": EXIT, "test_jobs": "all", **settings})
    with built(folder, task, data, Backbone(make_model("llama"), None, "unused")) as session:
        run_alone(session)
    (root,) = folder.iterdir()
    return root, list(read_events(root / "journal.jsonl"))


def facts(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return everything that was trained and decided, without the time, the data's digest and the test results."""
    left = ("seq", "time", "time_s", "duration_s", "test_loss", "test_rows", "test_metrics", "data", "values")
    return [{key: value for key, value in event.items() if key not in left} for event in events]


def test_test_rows_change_nothing_else(tmp_path: Path) -> None:
    _, without = run(tmp_path / "without", DATA)
    _, tested = run(tmp_path / "tested", replace(DATA, test=TEST))
    assert facts(tested) == facts(without)
    assert any("test_loss" in event for event in tested)
    assert not any("test_loss" in event for event in without)


def test_the_test_loss_of_a_best_adapter_is_that_of_peft(tmp_path: Path) -> None:
    root, events = run(tmp_path / "run", replace(DATA, test=TEST))
    history = read_history(root)
    for job in make_task(JOBS).jobs:
        solo = SoloJob(make_model("llama"), TEST, job.config)
        solo.load(read_adapter(RunDir(root).job(job.id, "best")))
        solo.model.eval()
        with torch.no_grad():
            expected = float(solo.model(**padded_batch(TEST, range(len(TEST)))).loss)
            rows = [float(solo.model(**padded_batch(TEST, [row])).loss) for row in range(len(TEST))]
        assert history.jobs[job.id].best_test_loss == pytest.approx(expected, rel=1e-5)
        (best,) = (
            event
            for event in events
            if event["event"] == "eval" and event["job"] == job.id and event["step"] == history.jobs[job.id].best_step
        )
        assert best["test_rows"] == pytest.approx(rows, rel=1e-3)


def test_only_the_best_adapters_are_tested(tmp_path: Path) -> None:
    wild = [{"lr": 0.3, "r": 4, "batch_size": 4, "seed": 1, "max_grad_norm": 0.0}]
    _, events = run(tmp_path / "run", replace(DATA, test=TEST), wild, early_exit={"enabled": False})
    evaluations = [event for event in events if event["event"] == "eval"]
    assert {event["is_best"] for event in evaluations} == {False, True}
    assert all(("test_loss" in event) == event["is_best"] for event in evaluations)


def is_tested(events: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(event["job"], event["step"]) for event in events if event["event"] == "eval" and "test_loss" in event]


def test_by_default_only_a_job_that_leads_is_tested(tmp_path: Path) -> None:
    jobs = [*JOBS, {"lr": 1e-4, "r": 4, "batch_size": 4, "seed": 3}]
    root, events = run(tmp_path / "run", replace(DATA, test=TEST), jobs, test_jobs="auto")
    led, lowest = [], math.inf
    best_steps = {}
    for event in events:
        if event["event"] == "eval" and event["validation_loss"] < lowest:
            lowest = event["validation_loss"]
            led.append((event["job"], event["step"]))
        if event["event"] == "eval" and event["is_best"]:
            best_steps[event["job"], event["step"]] = True
    tested = is_tested(events)
    # Among jobs that are evaluated together, only the new leader.
    assert set(tested) <= set(led)
    assert len(tested) < len(best_steps)
    history = read_history(root)
    assert history.best is not None
    assert (history.best.job, history.best.best_step) == tested[-1]
    _, every = run(tmp_path / "every", replace(DATA, test=TEST), jobs)
    loss = {
        (event["job"], event["step"]): event["test_loss"] for event in every if "test_loss" in event and "job" in event
    }
    assert history.best.best_test_loss == pytest.approx(loss[tested[-1]], rel=1e-5)


def test_where_more_than_the_loss_chooses_every_job_is_tested(tmp_path: Path) -> None:
    def best_and_tested(events: Sequence[dict[str, Any]]) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        best = [(event["job"], event["step"]) for event in events if event["event"] == "eval" and event["is_best"]]
        return best, is_tested(events)

    pairs = replace(PAIRS, test=make_pairs(7, seed=9))
    settings = {"method": "dpo", "metric": "reward_accuracy", "beta": 0.3, "test_jobs": "auto"}
    best, tested = best_and_tested(run(tmp_path / "metric", pairs, **settings)[1])
    assert best == tested
    repeated = [JOBS[0], {**JOBS[0], "seed": 2}]
    best, tested = best_and_tested(run(tmp_path / "seeds", replace(DATA, test=TEST), repeated, test_jobs="auto")[1])
    assert best == tested
    assert {job for job, _ in tested} == {"job-000", "job-001"}


def test_losses_of_rows_are_kept_at_rungs_at_the_end_and_of_the_best(tmp_path: Path) -> None:
    too_fast = {"lr": 0.5, "r": 8, "batch_size": 2, "seed": 2}
    _, events = run(tmp_path / "run", DATA, [*JOBS, too_fast])
    evaluations = [event for event in events if event["event"] == "eval"]
    weights = DATA.validation.weights
    ranked = [event for event in evaluations if "loss_rows" in event]
    for event in evaluations:
        steps = {math.ceil(share * event["total_steps"] - 1e-9) for share in (0.3, 0.6, 1.0)}
        assert ("loss_rows" in event) == (event["step"] in steps or event["is_best"])
    assert len(ranked) < len(evaluations)
    for event in ranked:
        mean = sum(w * row for w, row in zip(weights, event["loss_rows"], strict=True)) / sum(weights)
        assert mean == pytest.approx(event["validation_loss"], rel=1e-3)
    (base,) = next(event for event in events if event["event"] == "base_evaluated")["values"]
    assert len(base["loss_rows"]) == len(DATA.validation)


def test_pairs_have_losses_of_rows_too(tmp_path: Path) -> None:
    pairs = replace(PAIRS, test=make_pairs(7, seed=9))
    _, events = run(tmp_path / "run", pairs, method="dpo", beta=0.3)
    last = next(event for event in reversed(events) if event["event"] == "eval")
    assert math.fsum(last["loss_rows"]) / len(last["loss_rows"]) == pytest.approx(last["validation_loss"], rel=1e-3)
    (base,) = next(event for event in events if event["event"] == "base_evaluated")["values"]
    assert base["test_loss"] == pytest.approx(math.log(2))
    assert len(base["test_rows"]) == 7


def test_the_base_is_tested_with_the_loss_of_each_job(tmp_path: Path) -> None:
    jobs = [{**job, "loss_type": loss_type} for job, loss_type in zip(JOBS, ("sigmoid", "ipo"), strict=True)]
    _, events = run(tmp_path / "run", replace(PAIRS, test=PAIRS.validation), jobs, method="dpo", beta=0.5)
    values = next(event for event in events if event["event"] == "base_evaluated")["values"]
    assert {value["jobs"][0]: value["test_loss"] for value in values} == pytest.approx(
        {"job-000": math.log(2), "job-001": 1.0}
    ), "IPO's is (0 - 1 / (2 * beta)) ** 2"


def test_a_test_row_that_does_not_fit_ends_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = Trainer.evaluate

    def no_memory(trainer: Trainer, jobs: Sequence[Any], split: str = "validation", **options: Any) -> Any:
        if split == "test" and any(job.config.r == 8 for job in jobs):
            raise RowTooLargeError(next(job.slot for job in jobs if job.config.r == 8), 40, 0)
        return evaluate(trainer, jobs, split, **options)

    monkeypatch.setattr(Trainer, "evaluate", no_memory)
    together = [{**job, "batch_size": 4} for job in JOBS]
    _, events = run(tmp_path / "run", replace(DATA, test=TEST), together, early_exit={"enabled": False})
    assert [event["event"] for event in events].count("job_completed") == 2
    best = [event for event in events if event["event"] == "eval" and event["is_best"]]
    assert {event["job"] for event in best} == {"job-000", "job-001"}
    assert [event["job"] for event in best if "test_loss" in event] == [
        event["job"] for event in best if event["job"] == "job-000"
    ], "the other job is tested anyway"


def test_a_recording_holds_them(tmp_path: Path) -> None:
    observe = {**EXIT, "rungs": [[0.3, 1.0]]}
    root, _ = run(tmp_path / "run", replace(DATA, test=TEST), early_exit=observe)
    recording = Recording.from_journal(read_entries(root / "journal.jsonl"))
    recording.write(tmp_path / "recording.json.gz")
    read = Recording.read(tmp_path / "recording.json.gz")
    for job, same in zip(recording.jobs, read.jobs, strict=True):
        ranked = {step for step, _ in job.evaluations if step in (0.3 * job.total_steps, job.total_steps)}
        assert set(same.loss_rows) >= {0, job.total_steps, *ranked}
        assert set(same.tests) > {0}
        assert same.tests[0].loss == pytest.approx(job.tests[0].loss, rel=1e-5)
        for step, test in job.tests.items():
            assert same.tests[step].rows == pytest.approx(test.rows, abs=6e-4)


def test_rows_that_are_set_aside_to_test_on(tmp_path: Path) -> None:
    from alto.data import read_task_rows

    rows = [f'{{"prompt": "{n}", "completion": " {n}"}}\n' for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(rows), encoding="utf-8")
    (tmp_path / "test.jsonl").write_text("".join(rows[:3]), encoding="utf-8")

    def read(**keys: Any) -> tuple[int, int, int]:
        found = read_task_rows(Task(model="alto-tiny", dataset=str(tmp_path / "rows.jsonl"), **keys))
        splits: list[EncodedDataset | Any] = [found.train, found.validation, found.test or []]
        return tuple(map(len, splits))  # type: ignore[return-value]

    assert read() == (36, 4, 0)
    assert read(test_split=0.25) == (26, 4, 10)
    assert read(test_split=0.25, validation_split=0.5) == (10, 20, 10)
    assert read(test_dataset=str(tmp_path / "test.jsonl")) == (36, 4, 3)
