"""Whole runs whose winner a scorer chooses, and runs whose scorer fails."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import scoring_functions
from judging import by_loss, stopped_once_all_are_trained, sums_task, tune
from rich.console import Console
from tiny import read_journal
from typer.testing import CliRunner

import alto
from alto.cli import app
from alto.engine import runner
from alto.errors import SpecError, TaskInterruptedError, UntrustedCodeError
from alto.evaluation import finalists
from alto.evaluation.scorers import Answer, OnTurn, ScorerFailedError
from alto.records import Judgement
from alto.runs import read_history
from alto.runs.events import FinalistsJudged
from alto.views import final_summary

LENGTH = {"scorer": "python", "function": "scoring_functions:length", "max_new_tokens": 8}


@pytest.fixture
def task(tmp_path: Path, model: Path) -> alto.Task:
    return sums_task(tmp_path, model, 20, num_finalists=3)


def summary(run: str) -> str:
    console = Console(file=io.StringIO(), width=400)
    console.print(final_summary(read_history(run), run, max_rows=None, is_live=False))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def scored(monkeypatch: pytest.MonkeyPatch, rows: Callable[[int, int], float]) -> None:
    """Score row ``n`` of the finalist at ``place`` as ``rows(place, n)``, whatever it generated."""

    class Judge:
        def __init__(self, _: object, __: object, ___: object, scoring: str | alto.spec.Scoring) -> None:
            self.name = scoring if isinstance(scoring, str) else scoring.scorer

        def __call__(self, adapters: Mapping[str, Path], on_turn: Callable[[], None]) -> Judgement:
            found = {job: tuple(rows(place, n) for n in range(20)) for place, job in enumerate(adapters)}
            return Judgement(scorer=self.name, rows=found)

    monkeypatch.setattr(runner, "FinalistJudge", Judge)


def test_the_scores_of_a_function_choose_and_everything_shows_them(
    task: alto.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored(monkeypatch, lambda place, n: place + n / 10)
    result = tune(task.replace(select_by=LENGTH))
    jobs = by_loss(result)[:3]
    assert (result.best_job, result.scorer, result.scorer_failure) == (jobs[2], "python", "")
    assert [score.score for score in result.finalists] == pytest.approx([0.95, 1.95, 2.95])
    run = Path(result.run_dir)
    (judged,) = (event for event in read_journal(run) if event["event"] == "finalists_judged")
    assert (judged["scorer"], "failure" in judged) == ("python", False)
    first = judged["scores"][0]
    assert (first["job"], first["num_questions"], "num_correct" in first) == (jobs[0], 20, False)
    assert first["rows"] == pytest.approx([n / 10 for n in range(20)])
    assert first["interval"] == pytest.approx([0.6731, 1.2269], abs=0.001)
    shown = f"{jobs[0]} 0.95 (0.673–1.23) on 20 rows"
    assert shown in summary(result.run_dir)
    assert shown in (run / "report.html").read_text(encoding="utf-8")
    metrics = json.loads((run / "best" / "metrics.json").read_text())
    assert (metrics["scorer"], metrics["score"]) == ("python", pytest.approx(2.95))
    assert "eval_accuracy" not in metrics
    assert metrics["finalists"][0]["interval"] == first["interval"]
    printed = json.loads(CliRunner().invoke(app, ["show", str(run), "--json"]).stdout)
    assert (printed["scorer"], printed["scorer_failure"]) == ("python", None)
    assert printed["finalists"] == metrics["finalists"]


def test_within_noise_the_loss_decides_and_the_notes_say_so(task: alto.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has one right answer of 20 more than the first; the third has far fewer."""
    counts = (15, 16, 2)
    scored(monkeypatch, lambda place, n: float(n < counts[place]))
    result = tune(task.replace(select_by={"scorer": "exact_match"}))
    first, second, _ = by_loss(result)[:3]
    assert result.best_job == first
    message = (
        f"exact match: 20 validation rows cannot separate {first} from {second}; the lowest validation loss decided."
    )
    assert result.notes == (message,)
    assert message in summary(result.run_dir)
    assert tune(task.replace(select_by="eval_accuracy")).best_job == second
    completed = read_journal(result.run_dir)[-1]
    assert [tied["job"] for tied in completed["within_noise"]] == [second]


def test_two_runs_with_the_same_scores_have_the_same_winner(task: alto.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    scored(monkeypatch, lambda place, n: float((n * (place + 3)) % 7 > 2))
    first, second = (tune(task.replace(select_by={"scorer": "exact_match"})) for _ in range(2))
    assert (first.best_job, first.finalists) == (second.best_job, second.finalists)


@pytest.mark.parametrize(
    "scorer",
    [
        {"scorer": "exact"},
        {"scorer": "contains"},
        {"scorer": "regex", "pattern": "####"},
        {"scorer": "numeric", "tolerance": 0.5},
        {"scorer": "exact_match"},
        {"scorer": "multiple_choice"},
    ],
    ids=lambda scorer: scorer["scorer"],
)
def test_the_real_scorers_agree_with_alto_eval_and_leave_the_base_as_it_was(
    task: alto.Task, scorer: dict[str, Any]
) -> None:
    result = tune(task.replace(select_by={**scorer, "max_new_tokens": 16, "num_rows": 12}))
    assert [score.num_questions for score in result.finalists] == [12, 12, 12]
    assert all(len(score.rows) == 12 and set(score.rows) <= {0.0, 1.0} for score in result.finalists)
    assert result.scorer_failure == ""
    jobs = [score.job for score in result.finalists]
    done = alto.Engine().evaluate(result.run_dir, jobs=jobs, metric=scorer, max_new_tokens=16, limit=12)
    assert [one.evaluation.num_correct for one in done.adapters] == [score.num_correct for score in result.finalists]
    assert [one.evaluation.score for one in done.adapters] == [score.score for score in result.finalists]
    assert {one.evaluation.scorer for one in done.adapters} == {scorer["scorer"]}


def test_a_real_function_gets_what_the_jobs_wrote(task: alto.Task) -> None:
    scoring_functions.CALLS.clear()
    result = tune(task.replace(select_by={**LENGTH, "num_rows": 5}))
    assert len(scoring_functions.CALLS) == 15
    assert all(
        "plus 1?" in call["prompt"] and call["reference"].startswith("#### ") for call in scoring_functions.CALLS
    )
    lengths = [len(call["answer"]) / 100 for call in scoring_functions.CALLS]
    assert [row for score in result.finalists for row in score.rows] == pytest.approx(lengths)


# -- a scorer that fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("select_by", "reason"),
    [
        ({**LENGTH, "function": "scoring_functions:raising"}, "it raised LookupError: the judge is asleep"),
        ({**LENGTH, "function": "scoring_functions:infinite"}, "expected a finite number, found inf"),
        ({**LENGTH, "function": "scoring_functions:huge"}, "expected scores from -1e+100 to 1e+100, found 1e+308"),
        ({**LENGTH, "function": "scoring_functions:hanging", "timeout_s": 0.2}, "no result within 0.2 s"),
        ({"scorer": "http", "url": "http://127.0.0.1:9/score", "max_new_tokens": 8}, "no connection"),
    ],
)
def test_a_scorer_that_fails_leaves_the_winner_to_the_metric(
    task: alto.Task, select_by: dict[str, Any], reason: str
) -> None:
    wanted = tune(task).best_job
    result = tune(task.replace(select_by=select_by))
    assert (result.best_job, result.finalists) == (wanted, ())
    assert reason in result.scorer_failure
    (note,) = result.notes
    assert note.startswith(f"select_by: the scorer {select_by['scorer']} failed (")
    assert note.endswith(f"so the validation loss chose {wanted}.")
    run = Path(result.run_dir)
    *_, judged, _, completed = read_journal(run)
    assert (judged["event"], judged["scores"], judged["failure"]) == ("finalists_judged", [], result.scorer_failure)
    assert completed["best_job"] == wanted
    assert f"the scorer {select_by['scorer']} failed" in " ".join(summary(result.run_dir).split())
    assert reason in (run / "report.html").read_text(encoding="utf-8")
    metrics = json.loads((run / "best" / "metrics.json").read_text())
    assert (metrics["scorer_failure"], "finalists" in metrics) == (result.scorer_failure, False)
    printed = json.loads(CliRunner().invoke(app, ["show", str(run), "--json"]).stdout)
    assert (printed["scorer_failure"], printed["finalists"]) == (result.scorer_failure, [])


def test_a_failure_of_one_adapter_is_one_of_all(task: alto.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of some finalists would restrict the choice to these."""

    class Third:
        def __init__(self, _: alto.spec.Scoring) -> None:
            self.calls = 0

        def __call__(self, answers: Sequence[Answer], on_turn: OnTurn) -> list[float]:
            self.calls += 1
            if self.calls == 3:
                raise ScorerFailedError("the third fails")
            return [float(self.calls)] * len(answers)

    monkeypatch.setattr(finalists, "scorer_of", Third)
    result = tune(task.replace(select_by={"scorer": "exact_match", "max_new_tokens": 4}))
    assert (result.best_job, result.finalists, result.scorer_failure) == (by_loss(result)[0], (), "the third fails")


def test_a_run_that_is_stopped_while_a_function_works_is_judged_when_it_goes_on(task: alto.Task) -> None:
    run = stopped_once_all_are_trained(task.replace(select_by=LENGTH), 4)
    assert not any(event["event"] == "finalists_judged" for event in read_journal(run))
    result = alto.Engine().resume(run, trust_remote_code=True)
    assert (len(result.finalists), result.scorer_failure) == (3, "")


# -- refused -----------------------------------------------------------------------------------------------------------


def test_a_function_that_is_not_there_is_refused_before_anything_is_written(task: alto.Task, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"select_by.function: expected a function 'absent'"):
        tune(task.replace(select_by={**LENGTH, "function": "scoring_functions:absent"}))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("select_by", "message"),
    [
        (LENGTH, "to call the Python function scoring_functions:length"),
        ({"scorer": "http", "url": "http://127.0.0.1:9/s?key=secret"}, r"to send rows to http://127.0.0.1:9/s, found"),
    ],
)
def test_a_run_of_another_person_neither_runs_code_nor_sends_rows(
    task: alto.Task, select_by: dict[str, Any], message: str
) -> None:
    ended: list[str] = []
    folder = Path(task.dataset).parent / "runs"
    runs = runner.TaskRunner(observers=[lambda _: ended.append("")], is_interrupted=lambda: len(ended) > 3)
    with pytest.raises(TaskInterruptedError):
        runs.begin(task.replace(select_by=select_by), folder)
    (run,) = folder.iterdir()
    with pytest.raises(UntrustedCodeError, match=f"select_by: expected permission from you {message}"):
        alto.Engine().resume(run)
    ended.clear()
    assert alto.Engine().resume(run, trust_remote_code=True).best_job


def test_the_scores_of_a_journal_are_read_back(task: alto.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    scored(monkeypatch, lambda place, n: place + 1 / (n + 1))
    result = tune(task.replace(select_by=LENGTH))
    (judged,) = (
        entry.event
        for entry in alto.runs.read_entries(Path(result.run_dir) / "journal.jsonl")
        if isinstance(entry.event, FinalistsJudged)
    )
    assert judged.scores == result.finalists == read_history(result.run_dir).finalists
