"""Tables, comparisons and properties of results whose numbers all differ, against values written by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import alto
from alto.errors import UntrustedCodeError
from alto.records import (
    AdapterCheck,
    ExitReason,
    FinalistScore,
    JobResult,
    Lead,
    Sample,
    TaskOutcome,
)
from alto.results import TaskResult
from alto.results.best_config import training_arguments
from alto.results.comparison import (
    RunComparison,
    compare,
    configuration_frame,
    curve_frame,
    job_frame,
    loss_frame,
    sample_frame,
)
from alto.runs import RunDir, RunHistory, task_outcome
from alto.runs.events import (
    BaseEvaluated,
    JobCompleted,
    JobDescription,
    JobEvaluated,
    JobExited,
    JournalEntry,
    SamplesGenerated,
    StartMeasurement,
    TaskCompleted,
    TaskStarted,
    TrainSteps,
)

pandas = pytest.importorskip("pandas", reason="tables need the extra 'data'")

CONFIGS: dict[str, dict[str, Any]] = {
    "a": {"learning_rate": 1e-3, "steps": "of the configuration", "seed": 1},
    "b": {"learning_rate": 2e-3, "seed": 2},
}
"""Settings by job; one has the name of a fact, and the fact is shown."""


def start(**facts: Any) -> TaskStarted:
    known: dict[str, Any] = {
        **{"task": "t", "model": "m", "base_model": "m", "dataset": "d", "method": "sft", "metric": "loss"},
        **{"num_train": 9, "num_validation": 4, "data": {"fingerprint": "1"}, "max_slots": 2, "early_exit": {}},
        **{"device": "cpu", "num_ranks": 1, "versions": {}},
        "jobs": tuple(
            JobDescription(job=job, config=config, total_steps=10, samples_budgeted=80)
            for job, config in CONFIGS.items()
        ),
    }
    return TaskStarted(**(known | facts))


def evaluation(job: str, step: int, loss: float, *, is_best: bool, **facts: Any) -> JobEvaluated:
    return JobEvaluated(
        job=job, step=step, total_steps=10, train_ema=loss / 2, validation_loss=loss, is_best=is_best, **facts
    )


END = TaskCompleted(best_job="b", best_validation_loss=1.25, samples_trained=104, samples_budgeted=160)
EVENTS: tuple[Any, ...] = (
    start(),
    BaseEvaluated(values=(StartMeasurement(jobs=("a", "b"), validation_loss=3.0, test_loss=3.5),)),
    TrainSteps(job="a", first_step=1, losses=(2.5, 2.4, 2.3)),
    TrainSteps(job="b", first_step=1, losses=(2.6, 2.2, 1.8, 1.6)),
    evaluation("a", 2, 2.0, is_best=True, test_loss=2.125, metrics={"accuracy": 0.25}),
    evaluation("a", 3, 2.25, is_best=False, metrics={"accuracy": 0.375}),
    evaluation("b", 2, 1.25, is_best=True, test_loss=1.375, metrics={"accuracy": 0.5}, test_metrics={"accuracy": 0.25}),
    evaluation("b", 4, 1.5, is_best=False, metrics={"accuracy": 0.75}),
    JobExited(
        job="a",
        reason=ExitReason.OVERFITTING,
        evidence={"gap": 0.5},
        slot=0,
        step=3,
        best_step=2,
        best_validation_loss=2.0,
        samples_trained=24,
    ),
    JobCompleted(job="b", slot=1, step=10, best_step=2, best_validation_loss=1.25, samples_trained=80),
    SamplesGenerated(samples=(Sample(prompt="p", reference="r", base="of the base", adapters={"b": "x", "a": "y"}),)),
    END,
)


def history_of(*events: Any) -> RunHistory:
    return RunHistory.of(
        [JournalEntry(seq=index, time=float(index), event=event) for index, event in enumerate(events or EVENTS)]
    )


def rows_of(frame: Any) -> list[dict[str, Any]]:
    """Return the rows with their index, without missing values."""
    rows = frame.reset_index().to_dict("records")
    return [{key: value for key, value in row.items() if not pandas.isna(value)} for row in rows]


def test_the_table_of_jobs() -> None:
    frame = job_frame(history_of())
    facts = {"best_step": 2, "total_steps": 10, "samples_budgeted": 80}
    assert rows_of(frame) == [
        facts
        | {
            "job": "b",
            "best_validation_loss": 1.25,
            "test_loss": 1.375,
            "test_accuracy": 0.25,
            "accuracy": 0.5,
            "steps": 10,
        }
        | {"samples_trained": 80, "learning_rate": 2e-3, "seed": 2},
        facts
        | {"job": "a", "best_validation_loss": 2.0, "test_loss": 2.125, "accuracy": 0.25, "steps": 3}
        | {"exit_reason": "overfitting", "samples_trained": 24, "learning_rate": 1e-3, "seed": 1},
    ]


def test_the_table_of_curves() -> None:
    def row(job: str, step: int, loss: float, **more: float) -> dict[str, Any]:
        known = {"job": job, "step": step, "progress": step / 10, "validation_loss": loss}
        return known | more | ({"train_loss": loss / 2} if step else {})

    frame = curve_frame(history_of())
    assert [{key: value for key, value in one.items() if key != "index"} for one in rows_of(frame)] == [
        row("a", 0, 3.0),
        row("a", 2, 2.0, test_loss=2.125, accuracy=0.25),
        row("a", 3, 2.25, accuracy=0.375),
        row("b", 0, 3.0),
        row("b", 2, 1.25, test_loss=1.375, test_accuracy=0.25, accuracy=0.5),
        row("b", 4, 1.5, accuracy=0.75),
    ]


def test_the_table_of_training_losses() -> None:
    frame = loss_frame(history_of())
    assert rows_of(frame) == [
        {"step": 1, "a": 2.5, "b": 2.6},
        {"step": 2, "a": 2.4, "b": 2.2},
        {"step": 3, "a": 2.3, "b": 1.8},
        {"step": 4, "b": 1.6},
    ]


def test_the_table_of_samples() -> None:
    (row,) = sample_frame(history_of()).to_dict("records")
    assert row == {"prompt": "p", "reference": "r", "base": "of the base", "b": "x", "a": "y"}
    assert list(row)[3:] == ["b", "a"], "the winner first"


def test_tables_without_rows_have_columns() -> None:
    empty = history_of(start())
    assert list(curve_frame(empty).columns) == ["job", "step", "progress", "train_loss", "validation_loss"]
    assert list(configuration_frame(empty).columns) == ["mean", "sd", "num_jobs"]
    assert list(sample_frame(empty).columns) == ["prompt", "reference", "base"]
    assert len(loss_frame(empty)) == 0


LOSSES = {"a1": 1.0, "a2": 3.0, "b1": 1.6, "b2": 1.5, "b3": 1.7}


def repeated(**facts: Any) -> RunHistory:
    """Return a run in which configuration ``a`` has the best job and ``b`` the best mean; job ``b2`` is chosen."""
    jobs = tuple(
        JobDescription(
            job=job,
            config={"r": 4 if job[0] == "a" else 8, "seed": int(job[1])},
            total_steps=10,
            samples_budgeted=80,
            configuration=f"{job[0]}1",
        )
        for job in LOSSES
    )
    evaluations = [
        evaluation(job, 5, loss, is_best=True, metrics={"accuracy": 1 / loss}) for job, loss in LOSSES.items()
    ]
    return history_of(start(jobs=jobs, **facts), *evaluations, replace(END, best_job="b2", best_validation_loss=1.5))


def test_the_table_of_repeated_configurations() -> None:
    by_loss, by_accuracy = (rows_of(configuration_frame(repeated(**of))) for of in ({}, {"metric": "accuracy"}))
    assert by_loss == [
        {"best_job": "b2", "mean": pytest.approx(1.6), "sd": pytest.approx(0.1), "num_jobs": 3, "r": 8},
        {"best_job": "a1", "mean": 2.0, "sd": pytest.approx(math.sqrt(2)), "num_jobs": 2, "r": 4},
    ]
    assert [row["mean"] for row in by_accuracy] == pytest.approx([(1 / 1.6 + 1 / 1.5 + 1 / 1.7) / 3, (1 + 1 / 3) / 2])


def job_result(job: str, **facts: Any) -> JobResult:
    known: dict[str, Any] = {
        "job": job,
        "config": {},
        "steps": 3,
        "total_steps": 10,
        "exit_reason": None,
        "exit_evidence": {},
        "best_step": 2,
        "best_validation_loss": 2.0,
        "samples_trained": 24,
        "samples_budgeted": 80,
    }
    return JobResult(**(known | facts))


OUTCOME = TaskOutcome(
    task="t",
    run_dir="runs/t",
    adapter_dir="runs/t/best",
    best_job="b",
    best_validation_loss=1.25,
    jobs=(
        job_result("a", config={"learning_rate": 1e-3, "beta": 0.1}),
        job_result("b", config={"learning_rate": 2e-3, "beta": 0.2}, samples_trained=80),
    ),
    duration_s=7.0,
    metric="accuracy",
    best_metrics={"reward_accuracy": 0.5},
    test_loss=1.375,
    test_metrics={"reward_accuracy": 0.25},
    num_known_test=2,
    finalists=(FinalistScore(job="b", num_questions=3, mean=0.5, rows=(1.0, 0.0, 0.5)),),
    scorer="exact_match",
    scorer_failure="it failed",
    lead=Lead(runner_up="a", metric="loss", difference=0.5, interval=(0.25, 0.75), num_rows=4),
    adapter_check=AdapterCheck(status="equal", why="", difference=0.0, peft="0.20"),
    refit_of="runs/first",
    notices=("a notice",),
)


def test_a_result_has_the_facts_of_its_outcome_under_their_names() -> None:
    result = TaskResult(OUTCOME)
    names = {"job_results" if one.name == "jobs" else one.name: one.name for one in fields(TaskOutcome)}
    assert {mine: getattr(result, mine) for mine in names} == {mine: getattr(OUTCOME, names[mine]) for mine in names}
    assert (result.samples_trained, result.samples_budgeted) == (104, 160)
    assert result.samples_saved == pytest.approx(56 / 160)


def compared(mine: Mapping[str, Any], others: Mapping[str, Any], *starts: TaskStarted) -> RunComparison:
    """Compare the outcome above, changed by ``mine``, with the same changed by ``others``."""
    first, second = starts or (start(), start())
    other = replace(OUTCOME, **({"run_dir": "runs/other"} | dict(others)))
    return compare(replace(OUTCOME, **mine), history_of(first), other, history_of(second))


def test_a_comparison_has_every_fact_of_both_runs() -> None:
    changes: dict[str, Any] = {
        "best_job": "a",
        "refit_of": "",
        "test_loss": None,
        "test_metrics": {},
        "best_metrics": {"accuracy": 0.75},
        "duration_s": 9.0,
        "jobs": (job_result("a", config={"r": 4, "learning_rate": 1e-3}),),
    }
    found = compared({}, changes, start(), start(model="n", method="dpo", dataset="e"))
    assert found.run_dirs == ("runs/t", "runs/other")
    assert found.facts == {
        "model": ("m", "n"),
        "dataset": ("d", "e"),
        "method": ("sft", "dpo"),
        "best job": ("b", "a"),
        "refit of": ("runs/first", None),
        "test loss": (1.375, None),
        "reward accuracy": (0.5, None),
        "test reward accuracy": (0.25, None),
        "jobs": (2, 1),
        "samples trained": (104, 24),
        "samples saved": (pytest.approx(0.35), pytest.approx(0.7)),
        "seconds": (7.0, 9.0),
        "validation loss": (None, 1.25),
        "accuracy": (None, 0.75),
    }
    assert found.settings == {"learning_rate": (2e-3, 1e-3), "beta": (0.2, None), "r": (None, 4)}
    frame = found.to_frame()
    assert list(frame.columns) == ["runs/t", "runs/other"]
    assert frame.loc["seconds"].tolist() == [7.0, 9.0]
    assert frame.loc["learning_rate"].tolist() == [2e-3, 1e-3]


def test_losses_compare_by_method_and_settings_and_data_by_its_fingerprint() -> None:
    def comparable(second: TaskStarted, **others: Any) -> tuple[bool | None, bool]:
        found = compared({}, others, start(), second)
        return found.same_data, found.same_loss

    assert comparable(start()) == (True, True)
    assert comparable(start(method="dpo")) == (True, False)
    assert comparable(start(data={"fingerprint": "2"})) == (False, True)
    assert comparable(start(data={})) == (None, True)
    assert comparable(start(), best_job="a") == (True, False), "another beta"


def test_a_job_without_an_evaluation_has_no_loss_in_the_outcome(tmp_path: Path) -> None:
    events = [event for event in EVENTS if not (isinstance(event, JobEvaluated) and event.job == "a")]
    exited = next(event for event in events if isinstance(event, JobExited))
    events[events.index(exited)] = replace(exited, best_step=0, best_validation_loss=None)
    outcome = task_outcome(history_of(*events), RunDir(tmp_path))
    first, second = outcome.jobs
    assert (first.job, first.steps, first.total_steps, first.best_step) == ("a", 3, 10, 0)
    assert first.best_validation_loss == math.inf
    assert (second.steps, second.best_step, second.best_validation_loss) == (10, 2, 1.25)
    assert (second.samples_trained, second.samples_budgeted) == (80, 80)


def arguments(config: Mapping[str, Any], data: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
    task = alto.Task(**({"model": "alto-tiny", "dataset": [{"prompt": "1", "completion": "2"}]} | keys))
    return training_arguments(task, config, data)


def test_the_length_of_the_task_comes_before_that_of_the_journal() -> None:
    assert arguments({}, {"max_length": 4096}, max_length=77)["max_length"] == 77
    assert arguments({}, {"max_length": 4096})["max_length"] == 4096


@pytest.mark.parametrize("form", ["messages", "sharegpt"])
def test_conversations_train_the_replies(form: str) -> None:
    assert arguments({}, {"form": form})["assistant_only_loss"] is True
    assert "assistant_only_loss" not in arguments({}, {"form": "prompt_completion"})


def test_a_share_of_warmup_and_a_number_of_steps_are_one_argument() -> None:
    assert arguments({"warmup_steps": 5}, {})["warmup_steps"] == 5
    assert arguments({"warmup_ratio": 0.25, "warmup_steps": 0}, {})["warmup_steps"] == 0.25


def test_the_reply_loss_of_dpo_is_a_loss_of_its_own_in_trl() -> None:
    pairs = [{"prompt": "1", "chosen": "2", "rejected": "3"}]
    task = alto.Task(model="alto-tiny", method="dpo", dataset=pairs, rpo_alpha=0.5, beta=0.1)
    found = training_arguments(task, task.jobs[0].config.to_dict(), {})
    assert (found["loss_type"], found["loss_weights"]) == (["sigmoid", "sft"], [1.0, 0.5])
    assert "rpo_alpha" not in found


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> TaskResult:
    """A run of two jobs, the second of which is the best."""
    rows = [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}"} for n in range(12)]
    space = {"learning_rate": [1e-6, 1e-2]}
    settings: dict[str, Any] = {"max_steps": 3, "search_space": space, "early_exit": False, "report_to": "none"}
    task = alto.Task(model="alto-tiny", dataset=rows, **settings)
    return alto.Engine(output_dir=tmp_path_factory.mktemp("tuned")).tune(task)


def test_the_best_configuration_is_that_of_the_best_job_and_trains_an_adapter_elsewhere(tuned: TaskResult) -> None:
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    lora, training, _ = tuned.best_config
    assert tuned.best_job == "job-001"
    assert training.learning_rate == 1e-2
    assert not lora.inference_mode, "PEFT would freeze it"
    assert training.output_dir == f"{tuned.run_dir}-trl", "not in the run"
    assert training.report_to in ([], ["none"], "none")


def test_the_base_model_is_loaded_to_the_device_that_is_named(
    tuned: TaskResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    from alto.results import task_result

    load_network, devices = task_result.load_network, []

    def noted(spec: Any, *, device: str) -> Any:
        devices.append(device)
        return load_network(spec, device="cpu")

    monkeypatch.setattr(task_result, "load_network", noted)
    assert not tuned.load_best(device="cuda:7").training
    assert devices == ["cuda:7"]


def test_code_of_the_base_model_needs_permission(tuned: TaskResult) -> None:
    file = Path(tuned.run_dir) / "task.yaml"
    text = file.read_text(encoding="utf-8")
    assert "trust_remote_code: false" in text
    file.write_text(text.replace("trust_remote_code: false", "trust_remote_code: true"), encoding="utf-8")
    try:
        with pytest.raises(UntrustedCodeError, match="trust_remote_code"):
            tuned.load_best()
    finally:
        file.write_text(text, encoding="utf-8")
