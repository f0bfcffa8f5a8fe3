"""Sections of the report: samples, learning rates, hours and cost, commands to copy; and the comparison of two runs."""

from __future__ import annotations

import html
import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from html_pages import HOSTILE, Page
from journals import config, entries
from rich.console import Console
from typer.testing import CliRunner

import alto
from alto.artifacts import ModelUse
from alto.cli import app
from alto.errors import RunWriteError, SpecError
from alto.report import write_comparison
from alto.report.report import write_report
from alto.report.run_drawings import rate_figure
from alto.runs import RunHistory
from alto.runs.progress import PRICE_VARIABLE, device_hours, price_of_hour, time_saved_s, training_all_s
from alto.spec.strict_yaml import read_yaml
from alto.views import final_summary
from alto.views.plain import describe_samples
from alto.views.tables import job_table

SAMPLE = {
    "prompt": "<|user|>What is 3 plus 3?", "reference": "#### 6", "base": "Let me\nsee.",
    "adapters": {"d": "#### 6", "c": ""},
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRICE_VARIABLE, raising=False)


def page_of(run_dir: Path, **settings: Any) -> Page:
    return Page(write_report(run_dir, **settings).read_text(encoding="utf-8"))


def with_samples(events: list[dict[str, Any]], *samples: dict[str, Any], failure: str = "") -> list[dict[str, Any]]:
    *earlier, completed = events
    sampled = {"event": "samples_generated", "time": completed["time"], "samples": list(samples), "failure": failure}
    return [*earlier, sampled, completed]


# -- samples ---------------------------------------------------------------------------------------------------------


def test_samples_are_side_by_side(small_run, write_run):
    page = page_of(write_run(with_samples(small_run, SAMPLE, {**SAMPLE, "prompt": HOSTILE, "base": HOSTILE})))
    assert page.tags.count("article") == 2
    assert "img" not in page.tags
    for expected in ("<|user|>What is 3 plus 3?", "Let me\nsee.", "#### 6", HOSTILE, "first 2 validation rows"):
        assert expected in page.text
    assert page.text.count("nothing") >= 2, "empty texts are marked"


def test_without_samples_there_is_no_section(small_run, write_run):
    page = page_of(write_run(small_run))
    assert page.tags.count("article") == 0
    assert "continued greedily" not in page.text


def test_samples_of_a_refit_are_of_rows_that_it_trained(small_run, write_run):
    small_run[0]["refit"] = {"run": "/runs/first", "job": "d", "steps": 10}
    events = with_samples(small_run, {**SAMPLE, "adapters": {"d": "#### 6"}})
    text = page_of(write_run(events)).text
    assert "first 1 validation rows of the first run, which this run also trains on, continued" in text
    assert "next best" not in text
    shown = "1 prompt of rows that are also trained on, continued by the base and d"
    assert describe_samples(RunHistory.of(entries(events))) == shown


def test_samples_that_could_not_be_generated_have_a_reason(small_run, write_run):
    assert f"No samples were generated: {HOSTILE}" in page_of(write_run(with_samples(small_run, failure=HOSTILE))).text


# -- learning rates --------------------------------------------------------------------------------------------------


def rates_of(events) -> dict[str, Any] | None:
    history = RunHistory.of(entries(events))
    return rate_figure(history, job_table(history).rows)


def values(figure, mode: int) -> dict[float, float | None]:
    return {
        (trace["meta"]["role"], rate): value
        for trace in figure["traces"]
        for rate, value in zip(trace["x"], trace["y"][mode], strict=True)
    }


def test_learning_rates_at_an_equal_share_and_at_the_best(small_run):
    figure = rates_of(small_run)
    assert [mode["name"] for mode in figure["modes"]] == ["after 10 % of the steps", "at its best"]
    first = {("diverging", 1e-2): None, ("underperforming", 1e-5): 3.0, ("overfitting", 2e-4): 2.2, ("best", 2e-4): 2.1}
    assert values(figure, 0) == first
    assert values(figure, 1) == {**first, ("best", 2e-4): 1.9}
    assert figure["traces"][-1]["meta"]["role"] == "best", "over all others"
    assert figure["xTicks"] == [[1e-5, "1e-5"], [2e-4, "2e-4"], [1e-2, "0.01"]]
    assert figure["modes"][0]["note"] == "1 of 4 jobs have no finite value after 10 % of the steps."


def test_a_metric_is_drawn_where_the_task_chooses_by_it(preference_run):
    figure = rates_of(preference_run)
    assert (figure["yTitle"], figure["yTickFormat"]) == ("reward accuracy", ".0%")
    assert values(figure, 0)[("best", 3e-4)] is None, "its last accuracy is not a number"
    assert values(figure, 1)[("best", 3e-4)] == 0.75
    assert figure["modes"][0]["view"] == pytest.approx([0.6046, 0.7054])


def test_one_rate_alone_is_no_figure(small_run, write_run):
    for job in small_run[0]["jobs"]:
        job["config"]["learning_rate"] = 1e-4
    assert rates_of(small_run) is None
    assert "Learning rate and loss" not in page_of(write_run(small_run)).text


def test_the_report_holds_the_figure(small_run, write_run):
    page = page_of(write_run(small_run))
    assert "Learning rate and loss" in page.text
    assert page.figures["rates"]["modes"][1]["name"] == "at its best"


# -- importance ------------------------------------------------------------------------------------------------------


def test_a_first_comparison_that_the_winner_contradicts_is_explained(sweep, write_run):
    """The first ten jobs lead at 10 %; the last job wins."""
    for event in sweep:
        if event["event"] == "eval" and event["step"] == 10:
            event["validation_loss"] = float(event["job"][-2:])
    text = page_of(write_run(sweep)).text
    assert "lr: 1e-4 to 2e-3 ranked best after 10 % of the steps, but the winner has 6e-3." in text
    assert "The value that learns fastest at first may not be the best later." in text


def test_a_setting_that_explains_nothing_is_no_more_than_chance(sweep, write_run):
    for index, job in enumerate(sweep[0]["jobs"]):
        job["config"]["weight_decay"] = 0.1 if index % 2 else 0.2
    text = page_of(write_run(sweep)).text
    assert text.count("no more than chance") == 3, "in both comparisons, and where it is explained"


# -- hours and cost ----------------------------------------------------------------------------------------------------


def test_hours_are_the_duration_on_all_devices(small_run):
    small_run[0] |= {"device": "cuda:0", "num_ranks": 2}
    history = RunHistory.of(entries(small_run))
    found = device_hours(history, price=10.0)
    # 24 seconds on two GPUs; 2,300 samples were saved of 4,000.
    assert found.spent_h == pytest.approx(48 / 3600)
    assert found.saved_h == pytest.approx(48 / 3600 * 2300 / 1700)
    assert found.whole_h == pytest.approx(48 / 3600 * 4000 / 1700)
    assert found.cost(found.saved_h) == pytest.approx(10 * found.saved_h)
    assert (found.device, device_hours(history).cost(1.0)) == ("GPU", None)


def test_what_a_run_took_and_saved_is_what_training_all_jobs_takes(small_run, write_run):
    small_run[-1]["time_s"] = {"training": 17.0, "evaluation": 5.0}
    history = RunHistory.of(entries(small_run))
    hours = device_hours(history)
    # 2,300 samples were saved, at 17 s for 1,700; the evaluations of the run itself are part of its 24 seconds.
    assert time_saved_s(history) == pytest.approx(23.0)
    assert training_all_s(history) == pytest.approx(24.0 + 23.0)
    assert hours.whole_h == pytest.approx(hours.spent_h + hours.saved_h) == pytest.approx(47 / 3600)
    text = page_of(write_run(small_run)).text
    assert "Training all jobs: about 47 s, without further evaluations" in text
    assert "0.0131" in text.split("Every job to its end, at this run's pace and without further evaluations")[1][:20]


def test_what_a_budget_cut_off_is_part_of_training_all_jobs_and_not_saved(small_run):
    small_run[-1]["time_s"] = {"training": 17.0}
    for event in small_run:
        if event["event"] == "job_exited" and event["job"] == "a":
            event["reason"] = "budget"
    history = RunHistory.of(entries(small_run))
    assert history.samples_cut_off == 900
    assert time_saved_s(history) == pytest.approx(14.0)
    assert training_all_s(history) == pytest.approx(24.0 + 14.0 + 9.0)


def test_money_is_shown_with_a_price_alone(small_run, write_run, monkeypatch):
    run_dir = write_run(small_run)
    plain = page_of(run_dir)
    assert "CPU slot hours" in plain.text
    assert "Cost" not in plain.text
    assert "Every job to its end, at this run's pace" in plain.text
    # 24 seconds at 3,600 an hour.
    assert "24.00" in page_of(run_dir, price=3600.0).text
    monkeypatch.setenv(PRICE_VARIABLE, "7200")
    assert "48.00" in page_of(run_dir).text
    assert "24.00" in page_of(run_dir, price=3600.0).text, "the given price takes precedence"


def test_the_price_of_the_task_s_budget_is_used(small_run, write_run):
    small_run[0]["gpu_hour_price"] = 3600.0
    assert "24.00" in page_of(write_run(small_run)).text


@pytest.mark.parametrize("text", ["cheap", "-1", "nan", "inf"])
def test_an_invalid_price_is_refused(text, monkeypatch):
    monkeypatch.setenv(PRICE_VARIABLE, text)
    with pytest.raises(SpecError, match=f"{PRICE_VARIABLE}: expected the price of an hour of one GPU"):
        price_of_hour(None)
    assert price_of_hour(2.0) == 2.0


def test_the_command_takes_a_price(small_run, write_run):
    run_dir = write_run(small_run)
    (run_dir / "task.yaml").write_text("model: alto-tiny\n")
    done = CliRunner().invoke(app, ["report", str(run_dir), "--gpu-hour-price", "3600"])
    assert done.exit_code == 0, done.output
    assert "24.00" in (run_dir / "report.html").read_text(encoding="utf-8")
    assert CliRunner().invoke(app, ["report", str(run_dir), "--gpu-hour-price", "-1"]).exit_code == 2


# -- commands to copy --------------------------------------------------------------------------------------------------


def copied(page: str, name: str) -> str:

    return html.unescape(page.partition(f'<code id="{name}">')[2].partition("</code>")[0])


def test_the_winner_s_configuration_makes_the_same_job(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "completion": " 2"}\n' * 8, encoding="utf-8")
    space = {"lr": [1e-4, 5e-3], "r": [2, 4], "target_modules": [["q_proj"], "all-linear"], "warmup_ratio": [0.1]}
    task = alto.Task(
        model="alto-tiny", dataset=str(rows), validation_dataset=str(rows), max_steps=2, search_space=space,
        max_grad_norm=None, early_exit=False, report_to="none",
    )  # fmt: skip
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task)
    page = Path(result.run_dir, "report.html").read_text(encoding="utf-8")
    keys = read_yaml(copied(page, "configuration"))
    again = alto.Task(**keys, dataset=str(rows), validation_dataset=str(rows))
    (job,) = again.jobs
    wanted = next(job for job in task.jobs if job.id == result.best_job)
    assert job.config == wanted.config
    assert (again.model, again.method) == ("alto-tiny", "sft")


def test_commands_name_the_run_and_python_the_adapter(small_run, write_run):
    run_dir = write_run(small_run)
    (run_dir / "best").mkdir()
    code = ModelUse(model_class="AutoModelForCausalLM", has_template=True).adapter_code("alto-tiny", "folder")
    (run_dir / "best" / "README.md").write_text(code)
    page = write_report(run_dir).read_text(encoding="utf-8")
    commands = [copied(page, f"command-{index}") for index in (1, 2, 3, 4)]
    assert commands == [
        f"alto eval {run_dir} --baseline",
        f"alto eval {run_dir} --save-predictions answers.jsonl",
        f"vllm serve alto-tiny --enable-lora --max-lora-rank 8 --lora-modules maths={run_dir}/best",
        "alto tune winner.yaml",
    ]
    assert copied(page, "snippet").startswith("from peft import PeftModel\n")
    assert f'folder = "{run_dir}/best"\n' in copied(page, "snippet")


@pytest.mark.parametrize(("rank", "allowed"), [(1, 8), (8, 8), (9, 16), (64, 64), (65, 128)])
def test_vllm_is_asked_for_a_rank_it_has(small_run, write_run, rank, allowed):
    small_run[0]["jobs"][3]["config"] = config(2e-4, rank)
    page = write_report(write_run(small_run)).read_text(encoding="utf-8")
    assert f"--max-lora-rank {allowed} " in page


# -- two runs --------------------------------------------------------------------------------------------------------

RATES = {"learning_rate": (1e-4, 2e-4)}
FACTS = {
    "validation loss": (1.9, 2.2),
    "samples saved": (0.5, 0.25),
    "seconds": (24.0, 3700.0),
    "dataset": (HOSTILE, "b"),
}


@pytest.fixture
def two_runs(small_run, judged_run, write_run, tmp_path) -> tuple[str, str]:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, events in ((first, small_run), (second, judged_run)):
        folder.mkdir()
        shutil.move(write_run(with_samples(events, SAMPLE)) / "journal.jsonl", folder / "journal.jsonl")
    return str(first), str(second)


def test_two_runs_are_one_page(two_runs, tmp_path):
    path = write_comparison(
        tmp_path / "page.html",
        two_runs,
        FACTS,
        {"learning_rate": (1e-4, 2e-4)},
        same_data=False,
        same_validation=False,
        same_loss=True,
    )
    page = Page(path.read_text(encoding="utf-8"))
    facts = ("1.9000", "50 %", "duration", "1 h 01 min", "learning_rate", "2e-4")
    for expected in ("first and second", *facts, "cannot be compared", HOSTILE):
        assert expected in page.text
    assert "img" not in page.tags
    assert page.fetched == []
    curves = page.figures["validation"]["traces"]
    assert [(curve["name"], curve["y"]) for curve in curves] == [("first: d", [2.1, 1.9]), ("second: c", [2.2, 2.5])]
    assert page.tags.count("article") == 1


def test_samples_of_other_prompts_are_not_compared(two_runs, small_run, tmp_path):
    other = with_samples(small_run, {**SAMPLE, "prompt": "another"})
    Path(two_runs[0], "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in other))
    path = write_comparison(
        tmp_path / "page.html", two_runs, FACTS, {}, same_data=None, same_validation=None, same_loss=True
    )
    page = Page(path.read_text(encoding="utf-8"))
    assert page.tags.count("article") == 0
    assert "The best jobs have the same configuration." in page.text


def test_a_page_that_cannot_be_written_is_a_named_error(two_runs, tmp_path):
    with pytest.raises(RunWriteError, match=r"html: expected a writable file"):
        write_comparison(
            tmp_path / "absent" / "page.html",
            two_runs,
            FACTS,
            {},
            same_data=True,
            same_validation=True,
            same_loss=True,
        )


def test_no_run_is_drawn_as_the_better_one(two_runs, tmp_path):
    path = write_comparison(
        tmp_path / "page.html", two_runs, FACTS, RATES, same_data=True, same_validation=True, same_loss=True
    )
    roles = [curve["meta"]["role"] for curve in Page(path.read_text(encoding="utf-8")).figures["validation"]["traces"]]
    assert roles == ["first", "second"]


# -- settings --------------------------------------------------------------------------------------------------------


def test_hashes_long_lists_and_what_is_not_set_are_no_settings(small_run, write_run):
    data = {"train_rows": 500, "train_skipped_rows": 0, "fingerprint": "f00d", "validation_fingerprint": "beef"}
    small_run[0]["jobs"] = [
        {**job, "config": {**job["config"], "rank_pattern": {}, "max_steps": None, "seed": 0}}
        for job in small_run[0]["jobs"]
    ]
    small_run[0] |= {"validation_weights": [31.0] * 500, "data": data}
    text = page_of(write_run(small_run)).text
    assert "31, 31" not in text
    shown = text.partition("Settings and versions")[2]
    assert "data.train_rows" in shown
    assert "seed" in shown
    for name in ("fingerprint", "validation_", "skipped", "rank_pattern", "max_steps"):
        assert name not in shown


def test_samples_in_the_terminal_show_where_their_lines_end(small_run):
    sample = {**SAMPLE, "base": "29 * 6 = 174\n\n174 + 30 = 204\n"}
    console = Console(file=StringIO(), width=100)
    console.print(final_summary(RunHistory.of(entries(with_samples(small_run, sample)))))
    assert "29 * 6 = 174 ⏎ 174 + 30 = 204" in console.file.getvalue()
