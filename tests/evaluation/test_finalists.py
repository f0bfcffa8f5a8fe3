"""``select_by: eval_accuracy``: the best jobs answer the validation rows, and the best answers win."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import by_loss, stopped_once_all_are_trained, sums_task, tune
from tiny import load_tokenizer, make_task, random_llama, read_journal, write_rows

import alto
from alto.backbone import Backbone
from alto.data import Conversation, Message
from alto.engine import runner
from alto.errors import DataError, SpecError, UnsupportedError
from alto.evaluation import FinalistJudge
from alto.records import Judgement
from alto.spec import Scoring


@pytest.fixture
def task(tmp_path: Path, model: Path) -> alto.Task:
    return sums_task(tmp_path, model, 5, answer=lambda n: n + 1, select_by="eval_accuracy", num_finalists=3)


class Judge:
    """Gives each finalist the number of correct answers for its rank."""

    takes_s = 0.0

    def __init__(self, num_correct: Sequence[int], scorer: str = "eval_accuracy") -> None:
        self.num_correct = num_correct
        self.scorer = scorer
        self.calls: list[dict[str, Path]] = []

    def __call__(self, finalists: Mapping[str, Path], on_turn: Callable[[], None]) -> Judgement:
        assert all((folder / "adapter_model.safetensors").is_file() for folder in finalists.values())
        on_turn()
        time.sleep(self.takes_s)
        self.calls.append(dict(finalists))
        rows = {
            job: tuple([1.0] * right + [0.0] * (5 - right))
            for job, right in zip(finalists, self.num_correct, strict=True)
        }
        return Judgement(scorer=self.scorer, rows=rows)


def tune_judged(task: alto.Task, judge: Judge, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> alto.TaskResult:
    monkeypatch.setattr(runner, "FinalistJudge", lambda *_: judge)
    return tune(task, **settings)


def test_the_time_of_the_answers_counts_as_evaluation(task: alto.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge([1, 0, 4])
    judge.takes_s = 0.5
    events = read_journal(Path(tune_judged(task, judge, monkeypatch).run_dir))
    saved, completed = [event["time_s"] for event in events if event["event"] in ("checkpoint", "task_completed")][-2:]
    assert completed["evaluation"] >= saved["evaluation"] + 0.5


def test_the_best_answers_win_and_everything_says_so(task: alto.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge([1, 0, 4])
    result = tune_judged(task, judge, monkeypatch)
    finalists = by_loss(result)[:3]
    run = Path(result.run_dir)
    assert [list(calls) for calls in judge.calls] == [finalists]
    assert result.best_job == finalists[2]
    assert [score.num_correct for score in result.finalists] == [1, 0, 4]
    *_, judged, checked, completed = read_journal(run)
    scores = [{"job": job, "num_correct": n, "num_questions": 5} for job, n in zip(finalists, (1, 0, 4), strict=True)]
    assert (judged["event"], judged["scorer"]) == ("finalists_judged", "eval_accuracy")
    assert [{key: score[key] for key in scores[0]} for score in judged["scores"]] == scores
    assert judged["scores"][0]["rows"] == [1, 0, 0, 0, 0]
    assert [score["mean"] for score in judged["scores"]] == [0.2, 0, 0.8]
    assert (checked["event"], checked["job"]) == ("adapter_checked", finalists[2])
    assert (completed["event"], completed["best_job"]) == ("task_completed", finalists[2])
    metrics = json.loads((run / "best" / "metrics.json").read_text())
    assert (metrics["job"], metrics["eval_accuracy"]) == (finalists[2], 0.8)
    assert [{key: score[key] for key in scores[0]} for score in metrics["finalists"]] == scores
    assert metrics["finalists"][2]["interval"] == pytest.approx([0.3755, 0.9638], abs=1e-4)  # Wilson's
    own = run / "jobs" / finalists[2] / "best" / "adapter_model.safetensors"
    assert (run / "best" / own.name).read_bytes() == own.read_bytes()
    sentence = (
        f"Chosen by answers: {finalists[0]} 1 of 5 right (4–62 %), {finalists[1]} 0 of 5 right (0–43 %), "
        f"{finalists[2]} 4 of 5 right (38–96 %); 95 % intervals."
    )
    assert sentence in (run / "report.html").read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")
    again = alto.Engine().resume(run)
    assert (again.best_job, again.finalists, len(judge.calls)) == (result.best_job, result.finalists, 1)


def test_equal_answers_are_decided_by_the_validation_loss(task: alto.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tune_judged(task, Judge([2, 3, 3]), monkeypatch)
    assert result.best_job == by_loss(result)[1]


def test_without_it_no_finalist_answers(task: alto.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge([])
    result = tune_judged(task.replace(select_by="metric"), judge, monkeypatch)
    assert (result.best_job, judge.calls, result.finalists) == (by_loss(result)[0], [], ())
    metrics = json.loads((Path(result.adapter_dir) / "metrics.json").read_text())
    assert not {"eval_accuracy", "finalists"} & set(metrics)


def test_a_run_that_is_killed_before_the_judging_is_judged_when_it_goes_on(
    task: alto.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying(Judge):
        def __call__(self, finalists: Mapping[str, Path], on_turn: Callable[[], None]) -> Judgement:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        tune_judged(task, Dying([]), monkeypatch)
    (run,) = (Path(task.dataset).parent / "runs").iterdir()
    assert "finalists_judged" not in {event["event"] for event in read_journal(run)}
    judge = Judge([0, 5, 0])
    monkeypatch.setattr(runner, "FinalistJudge", lambda *_: judge)
    result = alto.Engine().resume(run)
    assert result.best_job == by_loss(result)[1]
    events = [event["event"] for event in read_journal(run)]
    assert events[-3:] == ["finalists_judged", "adapter_checked", "task_completed"]


def test_a_run_that_is_stopped_while_they_write_is_judged_when_it_goes_on(task: alto.Task) -> None:
    """The real judge checks for a stop between two tokens."""
    run = stopped_once_all_are_trained(task, 4)
    assert read_journal(run)[-1]["event"] == "task_interrupted"
    result = alto.Engine().resume(run)
    assert [score.job for score in result.finalists] == by_loss(result)[:3]
    assert [score.num_questions for score in result.finalists] == [5, 5, 5]
    done = alto.Engine().evaluate(run, jobs=by_loss(result)[:3], metric="exact_match", max_new_tokens=512)
    assert [found.evaluation.num_correct for found in done.adapters] == [
        score.num_correct for score in result.finalists
    ]


def test_rows_that_end_in_an_answer_are_asked_and_no_others() -> None:
    backbone = Backbone(random_llama(len(load_tokenizer())), load_tokenizer(), "tiny")
    rows = [
        Conversation([Message("user", "1 plus 1?"), Message("assistant", "#### 2")]),
        Conversation([Message("user", "Who?"), Message("assistant", "Nobody.")]),
        Conversation([Message("text", "#### 3")]),
    ]
    assert len(FinalistJudge(rows, backbone, "tiny")._answers.prompts) == 1
    turned = [rows[1], rows[0], rows[0]]
    first = FinalistJudge(turned, backbone, "tiny", Scoring(scorer="exact_match", num_rows=1))
    assert len(first._answers.prompts) == 1, "the first that can be scored"
    long = Conversation([Message("user", "1 plus 1? " * 3000), Message("assistant", "#### 2")])
    message = r"select_by eval_accuracy: among the validation rows .* expected prompts shorter .* in row 2; .*select_by"
    with pytest.raises(DataError, match=message):
        FinalistJudge([*rows, long], backbone, "tiny")
    with pytest.raises(DataError, match=r"select_by eval_accuracy: expected validation rows .* found none of 2"):
        FinalistJudge(rows[1:], backbone, "tiny")


def test_an_error_of_the_device_is_no_failure_of_the_scorer(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = Backbone(random_llama(len(load_tokenizer())), load_tokenizer(), "tiny")
    row = Conversation([Message("user", "1 plus 1?"), Message("assistant", "#### 2")])
    judge = FinalistJudge([row], backbone, "tiny")

    def fails(error: Exception) -> None:
        def rows(*_: object) -> None:
            raise error

        monkeypatch.setattr(judge, "_rows", rows)

    fails(ValueError("no score"))
    assert judge({}, lambda: None) == Judgement(scorer="eval_accuracy", failure="ValueError: no score")
    fails(torch.AcceleratorError("the device is lost"))
    with pytest.raises(torch.AcceleratorError):
        judge({}, lambda: None)


# -- refused ---------------------------------------------------------------------------------------------------------


def test_rows_without_answers_are_refused_before_anything_is_written(task: alto.Task, tmp_path: Path) -> None:
    plain = str(write_rows(tmp_path / "plain.jsonl", 6))
    with pytest.raises(DataError, match="found none of 6; add such rows, or remove select_by"):
        alto.Engine(output_dir=tmp_path / "runs").tune(task.replace(validation_dataset=plain, dataset_format="auto"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("method", ["dpo", "orpo"])
def test_methods_that_learn_from_pairs_are_refused(tmp_path: Path, method: str) -> None:
    with pytest.raises(SpecError, match=f"select_by should be 'metric' with method '{method}'"):
        make_task(tmp_path, method=method, select_by="eval_accuracy")


def test_several_ranks_are_refused(task: alto.Task) -> None:
    with pytest.raises(UnsupportedError, match="select_by: expected 'metric' with num_gpus 2, found 'eval_accuracy'"):
        alto.Engine().tune(task.replace(num_gpus=2))


@pytest.mark.parametrize("changes", [{"select_by": "accuracy"}, {"num_finalists": 0}])
def test_values_out_of_their_domain_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(changes))):
        make_task(tmp_path, **changes)
