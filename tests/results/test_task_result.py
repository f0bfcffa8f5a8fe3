"""Results for users: tables, curves, configurations, the best adapter with PEFT, comparisons, and their views."""

from __future__ import annotations

import html.parser
import io
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

import alto
from alto.errors import NoResultError, RunNotFoundError, UnsupportedError
from alto.runs import RunDir
from alto.spec import EarlyExit

pandas = pytest.importorskip("pandas", reason="tables need the extra 'data'")
peft = pytest.importorskip("peft", reason="the best adapter is loaded with PEFT")


def make_task(folder: Path, **changes: object) -> alto.Task:
    rows = [f'{{"prompt": "{a} + {b} =", "completion": " {a + b}"}}' for a in range(1, 6) for b in range(1, 5)]
    data = folder / "sums.jsonl"
    data.write_text("\n".join(rows), encoding="utf-8")
    settings: dict[str, object] = {
        "model": "alto-tiny",
        "dataset": data,
        "validation_split": 0.25,
        "test_split": 0.2,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "search_space": {"learning_rate": [1e-4, 5e-3], "r": [2, 4]},
        "report_to": "none",
    }
    return alto.Task(**(settings | changes))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> alto.TaskResult:
    folder = tmp_path_factory.mktemp("results")
    rungs = EarlyExit(rungs=((0.5, 0.5),))
    return alto.Engine(output_dir=folder / "runs").tune(make_task(folder, early_exit=rungs))


def test_a_run_is_read_back_as_the_engine_returned_it(result: alto.TaskResult) -> None:
    assert alto.load_run(result.run_dir) == result


def test_every_job_is_a_row_with_its_configuration_and_the_best_comes_first(result: alto.TaskResult) -> None:
    frame = result.jobs
    assert frame.index[0] == result.best_job
    assert sorted(frame.index) == [job.job for job in result.job_results]
    for job in result.job_results:
        row = frame.loc[job.job]
        assert row["best_validation_loss"] == job.best_validation_loss
        assert row["test_loss"] == job.test_loss
        assert row["steps"] == job.steps
        assert row["exit_reason"] == job.exit_reason if job.exit_reason else pandas.isna(row["exit_reason"])
        assert {key: row[key] for key in ("learning_rate", "r", "seed")} == {
            key: job.config[key] for key in ("learning_rate", "r", "seed")
        }
    assert frame["exit_reason"].dropna().tolist() == ["underperforming"] * 2


def test_curves_hold_every_evaluation_from_the_frozen_base_on(result: alto.TaskResult) -> None:
    frame = result.curves
    for job in result.job_results:
        curve = frame[frame["job"] == job.job]
        assert curve["step"].iloc[0] == 0
        assert curve["step"].is_monotonic_increasing
        assert curve["validation_loss"].min() == job.best_validation_loss
        assert curve["step"].iloc[-1] == job.steps
    assert frame[frame["step"] == 0]["validation_loss"].nunique() == 1


def test_training_losses_end_where_jobs_end(result: alto.TaskResult) -> None:
    frame = result.training_losses
    assert frame.index[0] == 1
    for job in result.job_results:
        assert frame[job.job].count() == job.steps
        assert frame[job.job].iloc[: job.steps].notna().all()


def test_the_best_configuration_is_what_peft_and_trl_take(result: alto.TaskResult) -> None:
    pytest.importorskip("trl", reason="the trainer's arguments are TRL's")
    lora, training, not_carried = result.best_config
    best = next(job for job in result.job_results if job.job == result.best_job)
    assert isinstance(lora, peft.LoraConfig)
    assert (lora.r, lora.lora_alpha) == (best.config["r"], best.config["lora_alpha"])
    for key in ("learning_rate", "per_device_train_batch_size", "num_train_epochs", "weight_decay", "seed"):
        assert getattr(training, key) == best.config[key]
    assert training.lr_scheduler_type == best.config["lr_scheduler_type"]
    assert not training.bf16
    assert not_carried == {}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_peft_trains_what_the_best_configuration_describes(result: alto.TaskResult) -> None:
    pytest.importorskip("trl", reason="the trainer's arguments are TRL's")
    from alto.backbone import load_network
    from alto.spec import BaseModelSpec

    model = peft.get_peft_model(load_network(BaseModelSpec(id="alto-tiny")), result.best_config.lora)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "lora_" in name}
    assert trained


def test_settings_without_a_place_in_trl_are_named(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="the trainer's arguments are TRL's")
    task = make_task(tmp_path, search_space={}, learning_rate=1e-3, loraplus_lr_ratio=4.0, warmup_ratio=0.25)
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task)
    _, training, not_carried = result.best_config
    assert not_carried == {"loraplus_lr_ratio": 4.0}
    assert training.warmup_steps == 0.25


def test_the_best_adapter_is_loaded_on_its_base_with_the_loss_that_was_told(result: alto.TaskResult) -> None:
    from alto.backbone import load_tokenizer
    from alto.spec import BaseModelSpec, read_run_task

    model = result.load_best()
    assert isinstance(model, peft.PeftModel)
    assert not model.training
    task = read_run_task(RunDir(Path(result.run_dir)).task_file)
    tokenizer = load_tokenizer(BaseModelSpec(id=task.model))
    ids = tokenizer("2 + 3 =", return_tensors="pt").input_ids
    with torch.no_grad():
        adapted = model(ids).logits
        with model.disable_adapter():
            base = model(ids).logits
    assert (adapted - base).norm() > 1e-3 * base.norm()


def test_two_runs_side_by_side(result: alto.TaskResult, tmp_path: Path) -> None:
    other = alto.Engine(output_dir=tmp_path / "runs").tune(
        make_task(tmp_path, search_space={}, learning_rate=2e-3, r=8)
    )
    compared = result.compare(other.run_dir)
    assert compared.same_data
    assert compared.facts["validation loss"] == (result.best_validation_loss, other.best_validation_loss)
    assert compared.settings["learning_rate"][1] == 2e-3
    assert "seed" not in compared.settings
    frame = compared.to_frame()
    assert list(frame.columns) == [result.run_dir, other.run_dir]
    assert frame.loc["jobs"].tolist() == [4, 1]
    shown = io.StringIO()
    Console(file=shown, width=140).print(compared)
    assert "validation loss" in shown.getvalue()
    assert "cannot be compared" not in shown.getvalue()
    assert "validation loss" in compared._repr_html_()


def test_runs_on_other_rows_are_said_not_to_compare(result: alto.TaskResult, tmp_path: Path) -> None:
    other = alto.Engine(output_dir=tmp_path / "runs").tune(
        make_task(tmp_path, search_space={}, learning_rate=2e-3, data_seed=1)
    )
    compared = result.compare(other)
    assert compared.same_data is False
    shown = io.StringIO()
    Console(file=shown, width=140).print(compared)
    assert "cannot be compared" in shown.getvalue()


class _Page(html.parser.HTMLParser):
    """Counts elements, and checks that each is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_notebook_shows_curves_and_jobs_without_a_script(result: alto.TaskResult) -> None:
    shown = result._repr_html_()
    page = _Page()
    page.feed(shown)
    assert page.open == []
    assert page.counts["polyline"] == len(result.job_results)
    assert page.counts["tr"] == 1 + len(result.job_results)
    assert "script" not in page.counts
    assert f"{result.best_validation_loss:.4f}" in shown


def test_a_terminal_shows_the_table(result: alto.TaskResult) -> None:
    shown = io.StringIO()
    Console(file=shown, width=140).print(result)
    assert result.best_job in shown.getvalue()
    assert "underperforming" in shown.getvalue()


def test_without_a_run_or_a_result_there_is_a_named_error(result: alto.TaskResult, tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError):
        alto.load_run(tmp_path)
    unfinished = RunDir(tmp_path / "run")
    unfinished.begin(make_task(tmp_path))
    with pytest.raises(NoResultError, match="alto resume"):
        alto.load_run(unfinished.root)


def test_without_pandas_tables_say_what_to_install(result: alto.TaskResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(UnsupportedError, match="job_results"):
        _ = result.jobs
    assert math.isfinite(result.best_validation_loss)


def test_repeated_configurations_have_a_mean_and_the_best_mean_wins(tmp_path: Path) -> None:
    space = {"learning_rate": [1e-4, 5e-3], "seed": [1, 2, 3]}
    task = make_task(tmp_path, search_space=space, early_exit=False)
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task)
    losses = result.jobs.groupby("learning_rate")["best_validation_loss"]
    frame = result.configurations.set_index("learning_rate")
    for rate, expected in losses.agg(["mean", "std", "size"]).iterrows():
        assert frame.loc[rate, ["mean", "sd", "num_jobs"]].tolist() == pytest.approx(expected.tolist())
    assert frame.index[0] == losses.mean().idxmin()
    of_best = result.jobs[result.jobs["learning_rate"] == frame.index[0]]
    assert result.best_job == of_best["best_validation_loss"].idxmin()
    assert result.lead is not None
    assert result.lead.runner_up == result.configurations.index[1]
    assert any("over 3 seeds" in note for note in result.notes)


def test_without_repetitions_there_are_no_configurations_to_rank(result: alto.TaskResult) -> None:
    assert result.configurations.empty
    assert not any("seeds" in note for note in result.notes)
