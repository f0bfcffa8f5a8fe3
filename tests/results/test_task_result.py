"""Results for users: tables, curves, configurations, the best adapter in PEFT, comparisons, and their views."""

from __future__ import annotations

import html.parser
import io
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import alto
from alto.cli import app
from alto.errors import NoResultError, RunNotFoundError, SpecError, UnsupportedError
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


def test_printed_it_is_its_table_of_jobs_and_its_representation_is_a_line(
    result: alto.TaskResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = str(result).splitlines()
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in str(result)
    assert not [line for line in lines if line.endswith(" ")]
    assert [line.split()[1] for line in lines if line.startswith("★")] == [result.best_job]
    assert sum(job.job in str(result) for job in result.job_results) == 4
    assert repr(result) == (
        f"TaskResult(task='sums', best_job='{result.best_job}', "
        f"best_validation_loss={result.best_validation_loss:.6g}, jobs=4, run_dir='{result.run_dir}')"
    )


def test_every_job_is_a_row_with_its_configuration_and_the_best_comes_first(result: alto.TaskResult) -> None:
    frame = result.jobs
    assert frame.index[0] == result.best_job
    assert sorted(frame.index) == [job.job for job in result.job_results]
    for job in result.job_results:
        row = frame.loc[job.job]
        assert row["best_validation_loss"] == job.best_validation_loss
        assert row["test_loss"] == job.test_loss if job.test_loss is not None else pandas.isna(row["test_loss"])
        assert row["steps"] == job.steps
        assert row["exit_reason"] == job.exit_reason if job.exit_reason else pandas.isna(row["exit_reason"])
        assert {key: row[key] for key in ("learning_rate", "r", "seed")} == {
            key: job.config[key] for key in ("learning_rate", "r", "seed")
        }
    assert frame["exit_reason"].dropna().tolist() == ["underperforming"] * 2
    assert not pandas.isna(frame.loc[result.best_job, "test_loss"])


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
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    lora, training, not_carried = result.best_config
    best = next(job for job in result.job_results if job.job == result.best_job)
    assert isinstance(lora, peft.LoraConfig)
    assert (lora.r, lora.lora_alpha) == (best.config["r"], best.config["lora_alpha"])
    for key in ("learning_rate", "per_device_train_batch_size", "num_train_epochs", "weight_decay", "seed"):
        assert getattr(training, key) == best.config[key]
    assert training.lr_scheduler_type == best.config["lr_scheduler_type"]
    assert not training.bf16
    assert not_carried == {"dataset_format": "prompt_completion"}, "TRL joins texts without the chat template"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_peft_trains_what_the_best_configuration_describes(result: alto.TaskResult) -> None:
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    from alto.backbone import load_network
    from alto.spec import BaseModelSpec

    model = peft.get_peft_model(load_network(BaseModelSpec(id="alto-tiny")), result.best_config.lora)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "lora_" in name}
    assert trained


def test_settings_without_a_place_in_trl_are_named(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    task = make_task(tmp_path, search_space={}, learning_rate=1e-3, loraplus_lr_ratio=4.0, warmup_ratio=0.25)
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task)
    _, training, not_carried = result.best_config
    assert not_carried == {"loraplus_lr_ratio": 4.0, "dataset_format": "prompt_completion"}
    assert training.warmup_steps == 0.25


def test_the_best_adapter_is_loaded_on_its_base_with_the_reported_loss(result: alto.TaskResult) -> None:
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
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["compare", result.run_dir, other.run_dir, "--html", str(page)])
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith(f"page: {page}\n")
    assert f"{other.best_validation_loss:.4f}" in page.read_text(encoding="utf-8")
    facts = json.loads(CliRunner().invoke(app, ["compare", result.run_dir, other.run_dir, "--json"]).stdout)
    assert facts["facts"]["jobs"] == [4, 1]


def test_runs_on_other_rows_are_reported_as_not_comparable(result: alto.TaskResult, tmp_path: Path) -> None:
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


def test_samples_are_empty_where_none_were_asked_for(result: alto.TaskResult) -> None:
    assert result.samples.empty
    assert list(result.samples.columns) == ["prompt", "reference", "base"]


def test_losses_of_other_methods_or_settings_are_reported_as_not_comparable(tmp_path: Path) -> None:
    """Both runs have the same pairs; their losses are on different scales."""
    pairs = [{"prompt": f"{a} + 1 =", "chosen": f" {a + 1}", "rejected": " 0"} for a in range(1, 21)]
    one, other, alike = (
        alto.Engine(output_dir=tmp_path / "runs").tune(
            alto.Task(model="alto-tiny", method="dpo", dataset=pairs, max_steps=2, beta=beta, seed=seed, name=name)
        )
        for name, beta, seed in (("one", 0.1, 1), ("other", 0.5, 1), ("alike", 0.1, 2))
    )
    compared = one.compare(other)
    assert compared.same_data
    assert not compared.same_loss
    assert "different losses" in printed(compared)
    compared = one.compare(alike)
    assert compared.same_loss
    assert "other losses" not in printed(compared)


def printed(shown: object) -> str:
    text = io.StringIO()
    Console(file=text, width=140).print(shown)
    return text.getvalue()


def tuned(folder: Path, rows: list[dict[str, object]], **changes: object) -> alto.TaskResult:
    task = make_task(folder, dataset=rows, search_space={}, max_steps=2, test_split=None, **changes)
    return alto.Engine(output_dir=folder / "runs").tune(task)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CHATS = [{"messages": [turn("user", f"{a} + 1 ="), turn("assistant", f" {a + 1}")]} for a in range(1, 13)]


@pytest.mark.parametrize(
    ("changes", "expected", "left"),
    [
        ({}, (True, None), {}),
        ({"train_on": "all"}, (False, False), {}),
        ({"train_on": "last"}, (False, None), {"train_on": "last"}),
    ],
    ids=["completion", "all", "last"],
)
def test_the_trainer_trains_the_tokens_of_messages_that_the_job_trained(
    changes: dict[str, object], expected: tuple[bool, bool | None], left: dict[str, object], tmp_path: Path
) -> None:
    """TRL trains every token of ``messages`` unless told otherwise."""
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    _, training, not_carried = tuned(tmp_path, CHATS, max_length=77, **changes).best_config
    assert (training.assistant_only_loss, training.completion_only_loss) == expected
    assert training.max_length == 77
    assert not_carried == left


TEXTS = [{"prompt": f"{a} + 1 =", "completion": f" {a + 1}"} for a in range(1, 13)]
TURNS = [{"prompt": chat["messages"][:1], "completion": chat["messages"][1:]} for chat in CHATS]
TEMPLATE = "{% for m in messages %}{{ m.role + ':' + m.content + '<|end|>' }}{% endfor %}"


@pytest.mark.parametrize(
    ("rows", "keys", "left"),
    [
        (TEXTS, {}, {"dataset_format": "prompt_completion"}),
        (TEXTS, {"dataset_format": "raw_prompt_completion"}, {}),
        (TURNS, {}, {}),
        ([{"text": row["prompt"] + row["completion"]} for row in TEXTS], {}, {}),
        (
            [{"instruction": row["prompt"], "output": row["completion"]} for row in TEXTS],
            {},
            {"dataset_format": "alpaca"},
        ),
    ],
    ids=["texts", "raw", "turns", "text", "alpaca"],
)
def test_a_form_of_rows_that_trl_reads_otherwise_is_named(
    rows: list[dict[str, object]], keys: dict[str, object], left: dict[str, object], tmp_path: Path
) -> None:
    """TRL joins a prompt and a completion that are texts; ALTO writes them with the chat template."""
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    assert tuned(tmp_path, rows, **keys).best_config.not_carried == left


def test_the_trainer_writes_rows_with_the_chat_template_of_the_task(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    _, training, not_carried = tuned(tmp_path, CHATS, chat_template=TEMPLATE, train_on="all").best_config
    assert Path(training.chat_template_path).read_text(encoding="utf-8") == TEMPLATE
    assert not_carried == {}


@pytest.mark.usefixtures("computes_in_half")
def test_the_precision_of_the_base_is_named_where_it_is_not_the_one_that_trl_loads(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    assert tuned(tmp_path, CHATS, dtype="bfloat16").best_config.not_carried == {"dtype": "bfloat16"}


def test_preferences_are_trained_with_the_dropout_and_the_smoothing_of_the_job_or_these_are_named(
    tmp_path: Path,
) -> None:
    """TRL switches dropout off unless told otherwise, and smooths no labels with ``loss_type: sigmoid``."""
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    pairs = [
        {"prompt": chat["messages"][:1], "chosen": chat["messages"][1:], "rejected": [turn("assistant", " 0")]}
        for chat in CHATS
    ]
    keys = {"method": "dpo", "lora_dropout": 0.1, "label_smoothing": 0.2}
    lora, training, not_carried = tuned(tmp_path, pairs, **keys).best_config
    assert (lora.lora_dropout, training.disable_dropout) == (0.1, False)
    assert not_carried == {"label_smoothing": 0.2}
    _, training, not_carried = tuned(tmp_path, pairs, **keys, loss_type="robust").best_config
    assert (training.label_smoothing, not_carried) == (0.2, {})


def test_rows_are_cut_where_those_of_the_run_were_cut(result: alto.TaskResult) -> None:
    """A preset has its own length, which is in the journal."""
    from alto.results.best_config import training_arguments
    from alto.spec import read_run_task

    assert result.history.started is not None
    data = result.history.started.data
    assert (data["form"], data["max_length"]) == ("prompt_completion", 1024)
    task = read_run_task(RunDir(Path(result.run_dir)).task_file)
    best = next(job for job in result.job_results if job.job == result.best_job)
    assert training_arguments(task, best.config, {**data, "max_length": 4096})["max_length"] == 4096
    assert training_arguments(task, best.config, {})["max_length"] == 1024


def test_a_run_whose_best_adapter_is_missing_is_refused(result: alto.TaskResult, tmp_path: Path) -> None:
    """This is the state after a kill between the last event and the export."""
    copied = tmp_path / "run"
    shutil.copytree(result.run_dir, copied)
    assert alto.load_run(copied).best_job == result.best_job
    shutil.rmtree(copied / "best")
    with pytest.raises(NoResultError, match=r"run/best.*alto resume"):
        alto.load_run(copied)


def test_a_model_and_a_device_for_it_are_refused(result: alto.TaskResult) -> None:
    from transformers import AutoModelForCausalLM

    from alto.backbone import resolve_model

    model = AutoModelForCausalLM.from_pretrained(resolve_model("alto-tiny"))
    with pytest.raises(SpecError, match=r"model\.to"):
        result.load_best(model, device="cpu")
    assert isinstance(result.load_best(model), peft.PeftModel)


def test_tables_hold_what_the_journal_holds(result: alto.TaskResult) -> None:
    lines = [json.loads(line) for line in (Path(result.run_dir) / "journal.jsonl").read_text("utf-8").splitlines()]
    evaluations = [line for line in lines if line["event"] == "eval"]
    frame = result.curves[result.curves["step"] > 0]
    assert {(row.job, row.step): (row.train_loss, row.validation_loss, row.progress) for row in frame.itertuples()} == {
        (line["job"], line["step"]): (line["train_ema"], line["validation_loss"], line["step"] / line["total_steps"])
        for line in evaluations
    }
    measured = [line for line in lines if line["event"] == "best_measured"]
    tested = {(line["job"], line["step"]): line["test_loss"] for line in measured if line.get("test_loss") is not None}
    assert len(tested) == 1, "the winner"
    assert {(row.job, row.step): row.test_loss for row in frame.itertuples() if not math.isnan(row.test_loss)} == tested
    ended = {line["job"]: line for line in lines if line["event"] in ("job_exited", "job_completed")}
    assert dict(result.jobs["samples_trained"]) == {job: line["samples_trained"] for job, line in ended.items()}
    losses = result.training_losses
    for line in lines:
        if line["event"] == "train":
            steps = range(line["first_step"], line["first_step"] + len(line["losses"]))
            assert losses.loc[steps, line["job"]].tolist() == line["losses"]
    order = [job.best_validation_loss for job in result.job_results]
    assert result.jobs["best_validation_loss"].tolist() == sorted(order)


def test_the_configuration_of_preferences_is_what_dpo_of_trl_takes(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    pairs = [{"prompt": f"{a} + 1 =", "chosen": f" {a + 1}", "rejected": " 0"} for a in range(1, 21)]
    keys = {"model": "alto-tiny", "method": "dpo", "dataset": pairs, "max_steps": 2, "metric": "reward_accuracy"}
    engine = alto.Engine(output_dir=tmp_path / "runs")
    result = engine.tune(alto.Task(**keys, name="plain", max_grad_norm=0, beta=0.3))
    training = result.best_config.training
    assert (training.loss_type, training.loss_weights) == (["sigmoid"], None)
    assert (training.beta, training.max_grad_norm) == (0.3, 0.0)
    assert not training.gradient_checkpointing
    assert {"reward_accuracy", "reward_margin"} <= set(result.jobs.columns)
    assert result.jobs.loc[result.best_job, "reward_accuracy"] == result.best_metrics["reward_accuracy"]
    several = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.25]}
    optimizer = {"optim": "sgd", "optim_args": {"momentum": 0.5, "nesterov": True}}
    training = engine.tune(alto.Task(**keys, **several, **optimizer, name="several")).best_config.training
    assert (training.loss_type, training.loss_weights) == (["sigmoid", "sft"], [1.0, 0.25])
    assert training.optim == "sgd"
    assert dict(pair.split("=") for pair in training.optim_args.split(",")) == {"momentum": "0.5", "nesterov": "True"}


def test_a_classifier_is_loaded_with_its_head_and_its_configuration_is_the_trainers(tmp_path: Path) -> None:
    rows = [{"text": f"{a} apples", "label": "many" if a > 9 else "few"} for a in range(1, 21)]
    task = alto.Task(model="alto-tiny", method="classification", dataset=rows, max_steps=2, name="apples")
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task)
    model = result.load_best()
    assert not model.training
    assert model.config.id2label == {0: "few", 1: "many"}
    ids = torch.tensor([[5, 6, 7]])
    assert model(ids).logits.shape == (1, 2)
    _, training, _ = result.best_config
    assert training.learning_rate == result.job_results[0].config["learning_rate"]


def test_a_comparison_with_a_result_is_that_with_its_folder(result: alto.TaskResult) -> None:
    compared = result.compare(result)
    assert compared == result.compare(Path(result.run_dir))
    assert compared.settings == {}
    assert compared.facts["samples saved"] == (result.samples_saved, result.samples_saved)
    assert compared.facts["test loss"] == (result.test_loss, result.test_loss)
    assert "same configuration" in printed(compared)
