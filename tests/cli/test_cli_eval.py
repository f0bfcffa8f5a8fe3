"""``alto eval``: what it prints, what it writes, and its errors."""

from __future__ import annotations

import csv
import html
import importlib
import io
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny import make_task, read_journal, save_model, write_rows
from typer.testing import CliRunner, Result

import alto
from alto.cli import app, main
from alto.cli.evaluate import _progress
from alto.errors import DataError, RunError, SpecError, UntrustedCodeError

FAST = ("--max-new-tokens", "4")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two jobs; its rows end in ``#### N``."""
    folder = tmp_path_factory.mktemp("tuned")
    sums = folder / "sums.jsonl"
    rows = [{"question": f"{n} plus 1?", "answer": f"#### {n + 1}"} for n in range(5)]
    sums.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    model = save_model(folder / "model")
    task = make_task(
        folder,
        **{"model": str(model), "dataset": str(sums), "validation_dataset": str(sums), "max_steps": 2},
        search_space={"lr": [1e-3, 2e-3]},
        early_exit=False,
    )
    return Path(alto.Engine(output_dir=folder / "runs").tune(task).run_dir)


@pytest.fixture
def run(tuned: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tuned, tmp_path / "run"))


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["eval", *(str(argument) for argument in arguments)])


def evaluations(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "metrics.json").read_text())["evaluations"]
    return found


def test_a_run_is_measured_on_its_own_held_out_rows(run: Path) -> None:
    before = json.loads((run / "best" / "metrics.json").read_text())
    done = invoke(run, "--baseline", *FAST)
    assert done.exit_code == 0, done.output
    assert done.stderr == "loading the base model and the rows\n"
    assert "\x1b" not in done.stdout
    found = evaluations(run / "best")
    assert [(entry["settings"]["weights"], entry["num_rows"]) for entry in found] == [("base", 5), ("adapter", 5)]
    for entry in found:
        assert f"{entry['loss']:.4f}" in done.stdout
        assert f"({entry['num_correct']} of 5)" in done.stdout
    assert f"metrics: {run / 'best' / 'metrics.json'}\n" in done.stdout
    after = json.loads((run / "best" / "metrics.json").read_text())
    assert {key: value for key, value in after.items() if key != "evaluations"} == before
    assert found[1]["loss"] == pytest.approx(before["validation_loss"], rel=1e-4)


def change_a_row(rows: Path) -> None:
    first, *others = rows.read_text(encoding="utf-8").splitlines()
    rows.write_text("\n".join([first.replace("plus", "and"), *others, ""]), encoding="utf-8")


@pytest.mark.parametrize("split", ["validation", "test"])
def test_rows_that_have_changed_since_the_run_are_noticed(split: str, tmp_path: Path) -> None:
    held_out = {f"{split}_dataset": str(write_rows(tmp_path / "held_out.jsonl"))}
    task = make_task(tmp_path, **held_out, max_steps=2, early_exit=False)
    run = Path(alto.Engine(output_dir=tmp_path / "runs").tune(task).run_dir)
    before = invoke(run, "--metric", "loss", "--json")
    assert (before.exit_code, before.stderr) == (0, "")
    change_a_row(tmp_path / "held_out.jsonl")
    done = invoke(run, "--metric", "loss", "--json")
    assert done.exit_code == 0, done.output
    assert f"expected the {split} rows that the run {run} began with, found different rows or tokens" in done.stderr
    assert json.loads(done.stdout)["notes"] == [done.stderr.rstrip("\n")]
    (tmp_path / "held_out.jsonl").unlink()
    assert isinstance(invoke(run, "--metric", "loss").exception, DataError)


def test_the_report_of_the_run_shows_it(run: Path) -> None:
    (run / "report.html").unlink()
    done = invoke(run, "--metric", "loss")
    assert done.exit_code == 0, done.output
    assert f"{evaluations(run / 'best')[0]['loss']:.4f}" in (run / "report.html").read_text(encoding="utf-8")


def test_a_job_of_the_run_is_measured_by_name(run: Path) -> None:
    losses = {event["job"]: event["validation_loss"] for event in read_journal(run) if event.get("is_best")}
    assert len(set(losses.values())) == 2
    for job, loss in losses.items():
        done = invoke(run, "--job", job, "--metric", "loss", "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["adapters"][0]["evaluation"]["loss"] == pytest.approx(loss, rel=1e-4)
        assert len(evaluations(run / "jobs" / job / "best")) == 1


def test_all_jobs_are_measured_at_once_and_are_in_the_report(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    done = invoke(run, "--all-jobs", "--baseline", "--save-predictions", path, *FAST)
    assert done.exit_code == 0, done.output
    page = (run / "report.html").read_text(encoding="utf-8")
    for job in ("job-000", "job-001"):
        base, own = evaluations(run / "jobs" / job / "best")
        assert (base["settings"]["weights"], own["settings"]["weights"]) == ("base", "adapter")
        assert f"{own['loss']:.4f}" in done.stdout
        assert job in done.stdout
        assert f'<th scope="row">{job}</th>' in page
    assert page.count('<th scope="row">base</th>') == 1
    assert "metrics: in metrics.json beside each of the 2 adapters" in done.stdout
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [list(line["predictions"]) for line in lines] == [["job-000", "job-001", "base"]] * 5


def test_jobs_of_one_call_have_the_numbers_of_a_call_each(run: Path) -> None:
    together = invoke(run, "--job", "job-001", "--job", "job-000", "--json", *FAST)
    assert together.exit_code == 0, together.output
    found = {entry["name"]: entry["evaluation"] for entry in json.loads(together.stdout)["adapters"]}
    assert list(found) == ["job-001", "job-000"]
    for job, evaluation in found.items():
        alone = json.loads(invoke(run, "--job", job, "--json", *FAST).stdout)["adapters"][0]["evaluation"]
        assert evaluation["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert evaluation["num_correct"] == alone["num_correct"]


def test_adapters_of_several_folders_are_measured_on_pairs(run: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n} plus 1?", "chosen": f"#### {n + 1}", "rejected": "No idea."} for n in range(4)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    folders = [run / "jobs" / job / "best" for job in ("job-000", "job-001")]
    done = invoke(*folders, "--dataset", pairs)
    assert done.exit_code == 0, done.output
    for folder in folders:
        (entry,) = evaluations(folder)
        assert (entry["num_rows"], entry["loss"], entry["exact_match"]) == (4, None, None)
        assert f"{entry['reward_margin']:.4f}" in done.stdout
    assert "reward accuracy" in done.stdout
    assert "loss" not in done.stdout


def test_an_adapter_alone_is_measured_on_named_rows(run: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(run / "best" / name, adapter)
    rows = write_rows(tmp_path / "test.jsonl", 3)
    for _ in range(2):
        done = invoke(adapter, "--dataset", rows, "--json")
        assert done.exit_code == 0, done.output
    (entry,) = evaluations(adapter)  # measured twice, recorded once
    assert (entry["dataset"], entry["num_rows"], entry["exact_match"]) == (str(rows), 3, None)


def labelled_run(folder: Path, labels: list[Any], method: str) -> Path:
    """Train a run of one job on texts with ``labels``."""
    rows = [{"text": f"Film {n} was {label}.", "label": label} for n in range(8) for label in labels]
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = alto.Task(
        **{"model": "alto-tiny", "dataset": str(file), "validation_split": 0.25, "method": method},
        **{"max_steps": 6, "batch_size": 8, "learning_rate": 5e-3},
    )
    return Path(alto.Engine(output_dir=folder / "runs").tune(task).run_dir)


@pytest.mark.parametrize("num_labels", [3, 13])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_a_classifier_has_accuracy_f1_and_a_table_of_its_confusions(
    num_labels: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["[b]dull[/b]", "fair", "warm", *(f"kind {n}" for n in range(num_labels - 3))]
    run = labelled_run(tmp_path, names, "classification")
    path = tmp_path / "predictions.jsonl"
    done = invoke(run, "--dataset", tmp_path / "texts.jsonl", "--save-predictions", path)
    assert done.exit_code == 0, done.output
    (found,) = evaluations(run / "best")
    predicted = predictions_in(path)
    assert [line["text"] for line in predicted] == [f"Film {n} was {name}." for n in range(8) for name in names]
    assert [line["label"] for line in predicted] == names * 8
    pairs = Counter((line["label"], line["predictions"]["best"]["label"]) for line in predicted)
    assert {one: {other: pairs[one, other] for other in row} for one, row in found["confusion"].items()} == found[
        "confusion"
    ]
    assert all(1 / num_labels < line["predictions"]["best"]["probability"] <= 1 for line in predicted)
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert lines[0] == ["best", f"{found['loss']:.4f}", f"{found['accuracy']:.1%}", f"{found['macro_f1']:.4f}"]
    shown = sorted(names) if num_labels == 3 else []
    for (name, *counts, score), expected in zip(lines[1:], sorted(names), strict=True):
        assert name == expected
        assert counts == [str(found["confusion"][name].get(other, 0)) for other in shown]
        assert score == ("–" if found["label_f1"][name] is None else f"{found['label_f1'][name]:.4f}")
    assert sum(count for row in found["confusion"].values() for count in row.values()) == 8 * num_labels
    page = (run / "report.html").read_text(encoding="utf-8")
    assert '<th scope="col" class="number">Macro F1</th>' in page
    assert f'<td class="number">{found["macro_f1"]:.4g}</td>' in page
    assert "Spearman" not in page
    assert '<table id="labels">' in page
    exec(html.unescape(page.partition('<code id="snippet">')[2].partition("</code>")[0]), {})
    assert capsys.readouterr().out.strip() in names


def test_predicted_labels_of_texts_without_labels_are_saved_as_a_table(tmp_path: Path) -> None:
    run = labelled_run(tmp_path, ["dull", "warm"], "classification")
    texts, lines, table = tmp_path / "new.csv", tmp_path / "new.jsonl", tmp_path / "labels.csv"
    texts.write_text('text,id\n"Film 1, which was dull.",a\nFilm 2 was warm.,b\n', encoding="utf-8")
    done = invoke(run, "--dataset", texts, "--save-predictions", table)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [f"{texts}, 2 rows", f"predictions: {table}"]
    assert "the rows have no labels, so labels are predicted and nothing is measured" in done.stderr
    assert invoke(run, "--dataset", texts, "--save-predictions", lines).exit_code == 0
    predicted = predictions_in(lines)
    assert [set(line) for line in predicted] == [{"row", "text", "predictions"}] * 2
    with table.open(encoding="utf-8", newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"text": line["text"], **{name: str(value) for name, value in line["predictions"]["best"].items()}}
            for line in predicted
        ]
    done = invoke(run, "--dataset", texts, "--save-predictions", table, "--json")
    assert json.loads(done.stdout)["adapters"][0]["evaluation"]["loss"] is None


@pytest.mark.parametrize("is_constant", [False, True])
def test_a_regressor_has_its_squared_error_and_rank_correlation(is_constant: bool, tmp_path: Path) -> None:
    run = labelled_run(tmp_path, [0.5, 0.5] if is_constant else [0.0, 1.0, 2.5], "regression")
    path = tmp_path / "predictions.jsonl"
    done = invoke(run, "--save-predictions", path)
    assert done.exit_code == 0, done.output
    (found,) = evaluations(run / "best")
    errors = [line["predictions"]["best"]["label"] - line["label"] for line in predictions_in(path)]
    assert found["mse"] == pytest.approx(sum(error**2 for error in errors) / len(errors))
    assert (found["spearman"] is None) == is_constant
    rho = "–" if is_constant else f"{found['spearman']:.4f}"
    (cells,) = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert cells == ["best", f"{found['mse']:.6g}", rho]
    printed = json.loads(invoke(run, "--json").stdout, parse_constant=lambda found: pytest.fail(f"{found} is not JSON"))
    assert printed["adapters"][0]["evaluation"]["mse"] == found["mse"]
    assert f'<td class="number">{found["mse"]:.4g}</td>' in (run / "report.html").read_text(encoding="utf-8")


def test_json_is_strict_json_and_nothing_else(run: Path) -> None:
    done = invoke(run, "--json", "--limit", "2", "--baseline", *FAST)
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    (best,) = facts["adapters"]
    assert (best["name"], best["adapter_dir"]) == ("best", str(run / "best"))
    assert [facts["baseline"], best["evaluation"]] == evaluations(run / "best")
    assert best["evaluation"]["num_rows"] == 2
    assert "predictions" not in facts


def test_a_table_of_answers_has_a_line_for_every_row_and_model(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "answers.csv"
    done = invoke(run, "--save-predictions", path, "--metric", "exact_match", "--limit", "2", *FAST)
    assert done.exit_code == 0, done.output
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["weights"], line["reference"]) for line in lines] == [
        ("best", "#### 1"),
        ("best", "#### 2"),
        ("base", "#### 1"),
        ("base", "#### 2"),
    ]
    assert list(lines[0]) == ["weights", "prompt", "reference", "text", "extracted", "score"]


def predictions_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_predictions_are_saved_a_row_a_line_with_every_adapter_and_the_base(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    done = invoke(run, "--all-jobs", "--save-predictions", path, "--metric", "exact_match", *FAST)
    assert done.exit_code == 0, done.output
    lines = predictions_in(path)
    assert [line["row"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["reference"] for line in lines] == [f"#### {n}" for n in range(1, 6)]
    assert [line["prompt"] for line in lines] == [f"<|user|>{n} plus 1?<|end|><|assistant|>" for n in range(5)]
    assert [list(line["predictions"]) for line in lines] == [["job-000", "job-001", "base"]] * 5
    for job in ("job-000", "job-001"):
        (own,) = evaluations(run / "jobs" / job / "best")
        assert sum(line["predictions"][job]["score"] for line in lines) == own["num_correct"]
        assert own["settings"]["weights"] == "adapter", "the base generates, and is not evaluated"
    assert set(lines[0]["predictions"]["base"]) == {"text", "extracted", "score"}


@pytest.mark.parametrize("form", ["text after a prompt", "pairs"])
def test_rows_of_every_form_have_predictions(run: Path, tmp_path: Path, form: str) -> None:
    """The generated texts equal those for the same prompts with final answers, and have no score."""
    path, rows = tmp_path / "answers.jsonl", tmp_path / "rows.jsonl"
    if form == "pairs":
        made = [{"prompt": f"{n} plus 1?", "chosen": f"It is {n + 1}.", "rejected": "No idea."} for n in range(3)]
    else:
        made = [{"prompt": f"{n} plus 1?", "completion": f"It is {n + 1}."} for n in range(3)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    done = invoke(run, "--dataset", rows, "--save-predictions", path, *FAST)
    assert done.exit_code == 0, done.output
    (entry,) = evaluations(run / "best")
    assert (entry["exact_match"], entry["settings"]["max_new_tokens"]) == (None, None)
    assert (entry["loss"] is None) == (form == "pairs")
    assert (entry["reward_margin"] is None) == (form != "pairs")
    lines = predictions_in(path)
    assert [line["reference"] for line in lines] == [f"It is {n + 1}." for n in range(3)]
    assert invoke(run, "--save-predictions", path, "--metric", "exact_match", *FAST).exit_code == 0
    judged = predictions_in(path)
    for line, other in zip(lines, judged, strict=False):
        texts = {name: found["text"] for name, found in other["predictions"].items()}
        assert line["predictions"] == {name: {"text": text} for name, text in texts.items()}


def test_rows_without_a_prompt_have_no_predictions_and_say_so(run: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "plain"}\n' * 2, encoding="utf-8")
    done = invoke(run, "--dataset", texts, "--save-predictions", tmp_path / "answers.jsonl")
    assert isinstance(done.exception, DataError)
    assert str(done.exception).startswith("predictions: row 1: expected a text reply after a prompt, found none")
    assert not (tmp_path / "answers.jsonl").exists()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no/such/folder/answers.jsonl", "--save-predictions: folder no/such/folder does not exist; create it first"),
        ("run", "--save-predictions: run is a folder; give the path of a file"),
    ],
)
def test_predictions_that_could_not_be_saved_are_refused_before_they_are_made(
    run: Path, path: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    done = invoke(run, "--save-predictions", path)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "evaluations" not in (run / "best" / "metrics.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "RunNotFoundError: expected a run (task.yaml) or an adapter"),
        (["run", "--job", "job-9"], "RunNotFoundError: job: expected a job of"),
        (["run", "run/best", "--all-jobs"], "RunNotFoundError: job: expected one run directory"),
        (["run", "--metric", "preference"], "DataError: dataset: expected preference pairs"),
        (["run", "--backend", "vllm"], "UnsupportedError: backend: expected vLLM, found that it cannot be imported"),
        (["run", "--backend", "vllm", "--metric", "loss"], "SpecError: backend: expected alto for the metric 'loss'"),
        (["run/best"], "SpecError: dataset: expected rows on which to evaluate run/best"),
        (["run", "--dataset", "absent.jsonl"], "DataFileNotFoundError: "),
        (
            ["run", "--dataset", "plain.jsonl", "--metric", "exact_match"],
            "DataError: exact_match: expected rows whose replies end in a line '#### N', found no such reply in row 1 "
            "of",
        ),
        (["run", "--base", "absent"], "ModelNotFoundError: "),
        (["run", "--base", "alto-tiny"], "TargetModuleError: "),
        (["run", "--limit", "0"], "SpecError: limit: expected at least 1, found 0"),
    ],
)
def test_an_error_is_one_message_and_writes_nothing(
    run: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(run.parent)
    write_rows(run.parent / "plain.jsonl", 2)
    before = (run / "best" / "metrics.json").read_bytes()
    monkeypatch.setattr(sys, "argv", ["alto", "eval", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    out, err = capfd.readouterr()
    assert exit_.value.code == 1
    assert out == ""
    error = err.removeprefix("loading the base model and the rows\n")
    assert error.startswith(message)
    assert error.count("\n") == 1
    assert (run / "best" / "metrics.json").read_bytes() == before


@pytest.mark.parametrize("arguments", [["run", "--backend", "magic"], ["run", "--metric", "accuracy"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    done = invoke(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")


def test_progress_is_shown_on_a_terminal_only() -> None:
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100)
        with _progress(console, silent=False) as show:
            assert (show is not None) == is_terminal
            if show is not None:
                show("answers", 0, 8)
                show("answers", 3, 8)
        assert ("3/8" in console.file.getvalue()) == is_terminal  # type: ignore[attr-defined]
    with _progress(Console(file=io.StringIO(), force_terminal=True), silent=True) as show:
        assert show is None


def test_an_invalid_metrics_file_is_reported_before_a_model_is_loaded(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "best" / "metrics.json").write_text("[]", encoding="utf-8")
    monkeypatch.setattr(importlib.import_module("alto.evaluation.measure"), "load_backbone", None)
    done = invoke(run, *FAST)
    assert isinstance(done.exception, RunError)
    assert (run / "best" / "metrics.json").read_text(encoding="utf-8") == "[]"


REWARDS = """
def checksum(completion_ids, level, **_):
    return [level * (sum(ids) % 13) for ids, level in zip(completion_ids, level)]
"""


@pytest.fixture(scope="module")
def rewarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[alto.TaskResult]:
    """A finished run that has learned from the rewards of a function, which reads a column and end tokens."""
    folder = tmp_path_factory.mktemp("rewarded")
    (folder / "checksum_rewards.py").write_text(REWARDS, encoding="utf-8")
    for name, first in (("rows", 0), ("test", 50)):
        rows = [{"prompt": f"{first + n} + 1?", "completion": str(n + 1), "level": 1 + n % 3} for n in range(12)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        task = alto.Task(
            model="alto-tiny",
            dataset=str(folder / "rows.jsonl"),
            validation_split=0.25,
            test_dataset=str(folder / "test.jsonl"),
            method="grpo",
            reward_funcs=["checksum_rewards:checksum"],
            num_generations=4,
            per_device_train_batch_size=8,
            max_completion_length=7,
            max_steps=3,
            learning_rate=1e-2,
            report_to="none",
            max_slots=1,
            max_tokens_per_step=500,
            max_tokens_per_pass=500,
            early_exit=False,
        )
        yield alto.Engine(output_dir=folder / "runs").tune(task)


def test_a_run_that_learned_from_rewards_is_measured_by_them(rewarded: alto.TaskResult, tmp_path: Path) -> None:
    path, run = tmp_path / "answers.jsonl", Path(rewarded.run_dir)
    done = invoke(run, "--baseline", "--trust-remote-code", "--save-predictions", path)
    assert done.exit_code == 0, (done.output, done.exception)
    (base,) = [event["values"][0] for event in read_journal(run) if event["event"] == "base_evaluated"]
    expected = [base["test_metrics"]["reward"], rewarded.test_metrics["reward"]]
    assert expected[0] != expected[1]
    of_base, own = evaluations(run / "best")
    assert [of_base["reward"], own["reward"]] == pytest.approx(expected)
    assert own["settings"]["max_new_tokens"] == 7
    assert own["settings"]["rewards"] == [{"scorer": "python", "function": "checksum_rewards:checksum", "weight": 1.0}]
    assert (own["loss"], own["score"], own["num_rows"]) == (None, None, 12)
    assert f"{own['reward']:.4g}" in done.stdout
    assert f"{own['reward']:.4g}" in (run / "report.html").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    scores = [line["predictions"]["best"]["score"] for line in lines]
    assert sum(scores) / len(scores) == pytest.approx(own["reward"])


def test_rewards_of_a_run_that_run_code_need_permission(rewarded: alto.TaskResult) -> None:
    done = invoke(rewarded.run_dir)
    assert isinstance(done.exception, UntrustedCodeError)
    assert "reward_funcs: expected permission from you to call the Python function checksum_rewards" in str(
        done.exception
    )


def test_a_metric_may_be_named_for_such_a_run(rewarded: alto.TaskResult) -> None:
    done = invoke(rewarded.run_dir, "--metric", "exact", "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    found = json.loads(done.stdout)["adapters"][0]["evaluation"]
    assert (found["scorer"], found["reward"], found["settings"]["max_new_tokens"]) == ("exact", None, 512)
    refused = invoke(rewarded.run_dir, "--backend", "vllm")
    assert isinstance(refused.exception, SpecError)
    assert "backend: expected alto for the rewards of a run" in str(refused.exception)
