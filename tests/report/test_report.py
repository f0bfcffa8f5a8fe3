from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path

import pytest
from html_pages import HOSTILE, Page

from alto.artifacts import ModelUse
from alto.errors import RunError, RunNotFoundError
from alto.records import LabelSet
from alto.report.report import report_page, write_report
from alto.runs import read_history


@pytest.fixture
def page_of(write_run):
    def page(events) -> Page:
        return Page(write_report(write_run(events)).read_text(encoding="utf-8"))

    return page


def test_report_tells_the_result(small_run, page_of):
    text = page_of(small_run).text
    for expected in (
        "maths", "lr 2e-4 · r 8", "1.9000", "57.5 %", "1,700 trained of 4,000", "24 s",
        "rank 3 of 3 at 10 %: 2 kept", "smoothed training loss became infinite", "2.13.0", "in PEFT format",
        "at 10 % keep 2 of 4 jobs",
    ):  # fmt: skip
        assert expected in text
    assert "not finished" not in text


def test_the_time_saved_is_first_and_what_failed_has_saved_none(small_run, failed_run, page_of):
    text = page_of(small_run).text
    assert text.index("Time saved") < text.index("Best job")
    assert "57.5 % of the samples: 1,700 trained of 4,000" in text
    text = page_of(failed_run).text
    assert "Time saved" not in text
    assert "200 trained of 2,000" in text


def test_report_needs_nothing_from_outside(small_run, page_of):
    page = page_of(small_run)
    assert page.fetched == []
    assert not {"link", "iframe", "object", "embed", "base"} & set(page.tags)
    assert page.policy.startswith("default-src 'none'")
    assert "http" not in page.policy
    assert sum(len(script) > 1_000_000 for script in page.scripts) == 1
    # plotly.js offers to upload the figure unless told not to.
    assert "showSendToCloud: false" in page.scripts[2]


def test_figures_hold_the_curves(small_run, page_of):
    figures = page_of(small_run).figures
    best = figures["validation"]["traces"][-1]
    assert (best["meta"]["role"], best["y"]) == ("best", [2.1, 1.9])
    assert best["text"] == "<b>d</b><br>lr 2e-4 · r 8"
    assert figures["slots"]["lanes"] == ["slot 0", "slot 1"]
    assert sum(len(bar["x"]) for bar in figures["slots"]["traces"]) == 4


def test_a_preference_task_has_curves_of_accuracy_and_margin(preference_run, page_of):
    page = page_of(preference_run)
    accuracy, margin = page.figures["metric-0"], page.figures["metric-1"]
    assert (accuracy["yTitle"], accuracy["yTickFormat"]) == ("reward accuracy", ".0%")
    assert (accuracy["traces"][-1]["meta"]["role"], accuracy["traces"][-1]["y"]) == ("best", [0.75, None])
    assert "reward accuracy %{y:.1%} after" in accuracy["traces"][-1]["hovertemplate"]
    assert margin["traces"][-1]["y"] == [0.4, 0.55]
    assert page.figures["validation"]["yTitle"] == "validation loss, mean over pairs"
    for expected in (
        "Reward accuracy", "Share of the validation pairs", "Reward margin", "Best job by reward accuracy",
        "mean over pairs, at step 10 of 100; reward accuracy 75 % (95 % interval 62–85 %), reward margin 0.4000",
        "1 job reached a value that is not finite",
    ):  # fmt: skip
        assert expected in page.text


def test_a_task_of_talk_has_none(small_run, page_of):
    page = page_of(small_run)
    assert "metric-0" not in page.figures
    assert page.figures["validation"]["yTitle"] == "validation loss, nats per token"
    assert "by " not in page.text.split("Best job")[1][:3]


def test_a_metric_s_name_cannot_leave_its_place(preference_run, page_of):
    preference_run[0]["metric"] = HOSTILE
    for event in preference_run:
        if "metrics" in event:
            event["metrics"] = {HOSTILE: 0.5}
    page = page_of(preference_run)
    assert page.tags.count("script") == 3
    assert "<" not in page.figures["metric-0"]["yTitle"] + page.figures["metric-0"]["traces"][-1]["name"]


def test_user_text_cannot_leave_its_place(small_run, page_of):
    plain = page_of(small_run)
    start = small_run[0]
    for key in ("task", "model", "dataset", "device"):
        start[key] = HOSTILE
    start["versions"] = {HOSTILE: HOSTILE}
    for index, job in enumerate(start["jobs"]):
        job["config"][HOSTILE] = f"{HOSTILE}{index}"
    for event in small_run[1:]:
        for key in ("job", "best_job"):
            if key in event:
                event[key] += HOSTILE
    for job in start["jobs"]:
        job["job"] += HOSTILE
    page = page_of(small_run)
    assert "img" not in page.tags
    assert page.tags.count("script") == plain.tags.count("script")
    assert HOSTILE in page.text
    assert "49" not in page.scripts[2]
    # plotly interprets some HTML in its texts; there the name is escaped.
    traces = page.figures["validation"]["traces"][1:] + page.figures["parallel"]["traces"]
    texts = [trace["text"] for trace in traces]
    assert texts
    assert not any("<script" in text or "<img" in text for text in texts)
    assert all("&lt;/script&gt;" in text for text in texts)


def test_unfinished_run(small_run, page_of):
    page = page_of(small_run[:11])
    assert "This run is not finished." in page.text
    assert "Best job so far" in page.text
    assert "in PEFT format" not in page.text


@pytest.mark.parametrize("num_events", [0, 1, 2, 6])
def test_a_run_that_has_hardly_begun(small_run, page_of, num_events):
    page = page_of(small_run[:num_events])
    assert "No job has a finite validation loss" in page.text
    assert page.figures["validation"]["view"] is None


def test_all_jobs_ended_without_a_result(small_run, page_of):
    assert "every job has ended, but the journal holds no result" in page_of(small_run[:-1]).text


def test_diverged_values_do_not_break_the_numbers(small_run, page_of):
    for event in small_run:
        if event["event"] == "eval" and event["job"] == "b":
            event["validation_loss"], event["train_ema"] = 1e6, -math.inf
    page = page_of(small_run)
    low, high = page.figures["validation"]["view"]
    assert low < 1.9
    assert high < 4.0
    assert "1 job leaves this view at the top (highest loss 1e6)" in page.text


def test_table_sorts_by_values_and_says_so(small_run, write_run):
    html = write_report(write_run(small_run)).read_text(encoding="utf-8")
    assert html.count('aria-sort="ascending"><button') == 1
    assert 'data-sort="0.0002">2e-4<' in html
    # Job a has no finite loss: its cell is empty for sorting, so that it stays last.
    assert '<td class="number" data-sort="">–</td>' in html


def test_notes_on_the_data_are_shown(small_run, page_of):
    assert "Worth knowing" not in page_of(small_run).text
    small_run[0]["notes"] = ["17 rows were cut", HOSTILE]
    page = page_of(small_run)
    assert "17 rows were cut" in page.text
    assert HOSTILE in page.text
    assert "img" not in page.tags


def test_time_saved_is_called_an_estimate(small_run, page_of):
    # 1,700 samples in 24 seconds; 2,300 were saved.
    text = page_of(small_run).text
    assert "About 32 s of training saved: an estimate from the 70.8 samples per second" in text
    assert "of training saved" not in page_of(small_run[:4]).text


def test_evaluations_of_the_best_adapter(small_run, write_run):
    best = write_run(small_run) / "best"
    best.mkdir()
    found = {"dataset": "test.jsonl", "num_rows": 1319, "loss": 1.25, "exact_match": 0.0212, "num_correct": 28,
             "date": "2026-11-21", "settings": {"batch_size": 16}}  # fmt: skip
    empty = {**dict.fromkeys(found), "dataset": HOSTILE}
    (best / "metrics.json").write_text(json.dumps({"evaluations": [found, empty]}))
    page = Page(write_report(best.parent).read_text(encoding="utf-8"))
    for expected in ("test.jsonl", "1,319", "1.2500", "2.1 % (28 of 1,319)", "batch_size 16", "2026-11-21", HOSTILE):
        assert expected in page.text
    assert "img" not in page.tags


@pytest.mark.parametrize("has_card", [True, False])
def test_the_code_is_that_of_the_model_card_whatever_name_the_page_shows(small_run, write_run, has_card):
    best = write_run(small_run) / "best"
    best.mkdir()
    labels = LabelSet(problem_type="single_label_classification", names=("bad", "good"))
    (best / "labels.json").write_text(json.dumps(labels.to_config()))
    code = ModelUse(model_class="AutoModelForCausalLM", has_template=True, labels=labels).adapter_code(
        "alto-tiny", "folder"
    )
    if has_card:
        (best / "README.md").write_text(f"# A card\n\n{code}\n")
    page = report_page(best.parent, read_history(best.parent), shown_as=Path("ftjob-1"))
    shown = html.unescape(page.partition('<code id="snippet">')[2].partition("</code>")[0])
    expected = code.removeprefix("```python\n").removesuffix("\n```\n").replace("path/to/this/folder", "ftjob-1/best")
    assert shown == (expected if has_card else "")
    assert "alto eval ftjob-1 --save-predictions predictions.jsonl" in page
    assert "vllm serve" not in page
    assert str(best) not in page


def test_the_f1_of_each_label_is_a_table(small_run, write_run):
    best = write_run(small_run) / "best"
    best.mkdir()
    found = {"dataset": "test.csv", "num_rows": 9, "loss": 0.5, "accuracy": 0.8, "settings": {}, "date": None}
    scores = {"billing": 0.91, HOSTILE: 0.25, "rare": None}
    other = {"dataset": "new.csv", "label_f1": {**scores, "rare": 0.125}}
    evaluations = [{**found, "label_f1": scores}, {**found, **other}, {**found, "dataset": "c", "label_f1": None}]
    (best / "metrics.json").write_text(json.dumps({"evaluations": evaluations}))
    page = write_report(best.parent).read_text(encoding="utf-8")
    table = page.partition('<table id="labels">')[2].partition("</table>")[0]
    cells = [html.unescape(cell) for cell in re.findall(r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>", table)]
    assert cells[:3] == ["Label", "best, test.csv", "best, new.csv"]
    assert cells[3:] == ["billing", "0.91", "0.91", HOSTILE, "0.25", "0.25", "rare", "–", "0.125"]
    assert "img" not in Page(page).tags


def test_the_newest_of_equal_evaluations_of_the_base_is_shown_and_nothing_unmeasured(small_run, write_run):
    run_dir = write_run(small_run)
    for job, date, loss in (("a", "2026-11-20", 3.5), ("b", "2026-11-21", 3.25)):
        folder = run_dir / "jobs" / job / "best"
        folder.mkdir(parents=True, exist_ok=True)
        settings = {"weights": "base", "base_model": "alto-tiny", "limit": None, "dtype": "float32"}
        found = {"dataset": "test.jsonl", "num_rows": 7, "loss": loss, "date": date, "settings": settings}
        (folder / "metrics.json").write_text(json.dumps({"evaluations": [found]}))
    text = Page(write_report(run_dir).read_text(encoding="utf-8")).text
    assert "3.2500" in text
    assert "3.5000" not in text
    assert "dtype float32" in text
    assert not any(word in text for word in ("Exact match", "Margin", "limit –", "weights base"))


@pytest.mark.parametrize("metrics", ["{}", '{"evaluations": []}', None])
def test_no_evaluation_no_table(small_run, write_run, metrics):
    run_dir = write_run(small_run)
    if metrics is not None:
        (run_dir / "best").mkdir()
        (run_dir / "best" / "metrics.json").write_text(metrics)
    assert "Exact match" not in write_report(run_dir).read_text(encoding="utf-8")


@pytest.mark.parametrize("metrics", ["{", "[]", ""])
def test_damaged_metrics_are_an_error_that_names_the_file(small_run, write_run, metrics):
    run_dir = write_run(small_run)
    (run_dir / "best").mkdir()
    (run_dir / "best" / "metrics.json").write_text(metrics)
    with pytest.raises(RunError, match=r"metrics\.json: expected a JSON object"):
        write_report(run_dir)


def test_importance_needs_enough_jobs(small_run, sweep, page_of):
    assert "at least 8 jobs with a finite loss" in page_of(small_run).text
    text = page_of(sweep).text
    assert "after 10 % of the steps, 60 jobs" in text
    assert "at the end, 60 jobs" in text
    assert "1e-4 to 2e-3" in text


def test_clones_are_marked(interrupted_run, page_of):
    page = page_of(interrupted_run)
    assert "clone of b" in page.text
    assert "interruptions cut out" in page.figures["slots"]["xTitle"]


def test_no_run_no_report(tmp_path):
    with pytest.raises(RunNotFoundError):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_writing_again_replaces_the_page(small_run, write_run):
    run_dir = write_run(small_run)
    assert write_report(run_dir) == write_report(run_dir) == run_dir / "report.html"
    assert sorted(path.name for path in run_dir.iterdir()) == ["journal.jsonl", "report.html"]


def test_the_report_says_which_rank_had_which_job(ranked_run, page_of):
    page = page_of(ranked_run)
    assert page.figures["slots"]["lanes"][-1] == "rank 1, slot 1"
    assert "which of the 4 slots on 2 ranks, and when" in page.text
    assert "2 ranks" in page.text.split("which of the 4")[0]


def test_a_single_slot_is_not_counted(sweep, page_of):
    assert "Which job used the slot, and when." in page_of(sweep).text


def test_a_job_that_did_more_than_its_rung_is_explained(small_run, page_of):
    note = "So a job may have done more than the rung at which it ended."
    assert note in page_of(small_run).text
    assert note not in page_of([event for event in small_run if event["event"] != "warmup_ended"]).text


def test_a_lead_over_a_job_that_trained_for_less_time_says_so(small_run, page_of):
    for event in small_run:
        if event["event"] == "eval":
            event["loss_rows"] = [event["validation_loss"], event["validation_loss"] + 0.1]
    page = page_of(small_run)
    assert "c (ended at 50 % of its steps):" in page.text
