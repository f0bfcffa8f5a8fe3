"""Rungs that rank by scores of answers: the adapters at the rung are scored, and a replay of the journal gives the same
exits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import resident_jobs
from judging import sums_task
from shared_executor import built

import alto
from alto.backbone import Backbone
from alto.early_exit import audit, selection_of
from alto.engine import runner
from alto.errors import TaskInterruptedError
from alto.executor import Executor, Hooks
from alto.lora import AdapterWeights, read_adapter
from alto.records import ExitDecision, ExitReason, Judgement
from alto.runs import read_entries, read_history
from alto.runs.events import JobCompleted, JobExited, JournalEntry, RungScored, TrainSteps, WarmupEnded
from alto.views import choice_notes

NUM_ROWS = 12
SPACE_JOBS = ("job-000", "job-001", "job-002", "job-003")
EARLY_EXIT = {"rungs": [[0.5, 0.5]], "detect_overfitting": False, "detect_divergence": False, "min_kept": 2}


@pytest.fixture
def task(tmp_path: Path, model: Path) -> alto.Task:
    return sums_task(
        tmp_path,
        model,
        NUM_ROWS,
        max_steps=8,
        early_exit=EARLY_EXIT,
        lr_scheduler_type="constant",
        keep="all",
        select_by={"scorer": "exact_match", "max_new_tokens": 4, "at": [0.5]},
    )


class Judge:
    """Scores adapters by ``score`` of the job and the norm of its weights; the last call is for the finalists."""

    def __init__(self, score: Callable[[str, float], float], failure: str = "") -> None:
        self.score = score
        self.failure = failure
        self.calls: list[dict[str, float]] = []
        self.on_call: Callable[[], None] = lambda: None

    def __call__(self, adapters: Mapping[str, Path], on_turn: Callable[[], None]) -> Judgement:
        self.on_call()
        on_turn()
        sizes = {job: size_of(read_adapter(folder)) for job, folder in adapters.items()}
        self.calls.append(sizes)
        if self.failure:
            return Judgement(scorer="exact_match", failure=self.failure)
        rows = {job: tuple(self.score(job, size) + n / 100 for n in range(NUM_ROWS)) for job, size in sizes.items()}
        return Judgement(scorer="exact_match", rows=rows)


def size_of(weights: AdapterWeights) -> float:
    return sum(float(a_KR.abs().sum() + b_RN.abs().sum()) for a_KR, b_RN in weights.values())


def tune(task: alto.Task, judge: Judge, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runner, "FinalistJudge", lambda *_: judge)
    return Path(alto.Engine(output_dir=Path(task.dataset).parent / "runs").tune(task).run_dir)


def entries_of(run: Path) -> list[JournalEntry]:
    return read_entries(run / "journal.jsonl")


def outcome(run: Path) -> WarmupEnded:
    (rung,) = (entry.event for entry in entries_of(run) if isinstance(entry.event, WarmupEnded))
    return rung


def by_number(job: str, size: float) -> float:
    return float(job[-1])


def test_the_rung_keeps_the_best_scores(task: alto.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """These are not the jobs of the lowest loss; with reversed scores the other jobs are kept."""
    up = tune(task, Judge(by_number), monkeypatch)
    down = tune(task, Judge(lambda job, size: -by_number(job, size)), monkeypatch)
    assert outcome(up).kept == ("job-003", "job-002")
    assert outcome(down).kept == ("job-000", "job-001")
    dropped = {entry.event.job: entry.event for entry in entries_of(up) if isinstance(entry.event, JobExited)}
    assert dropped.keys() == {"job-000", "job-001"}
    assert dropped["job-001"].evidence["score"] == pytest.approx(1.055)
    assert dropped["job-001"].evidence["cutoff_score"] == pytest.approx(2.055)


def test_the_journal_alone_gives_the_same_exits(task: alto.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tune(task, Judge(by_number), monkeypatch)
    entries = entries_of(run)
    kinds = [type(entry.event) for entry in entries]
    assert kinds.count(RungScored) == 1
    assert kinds.index(RungScored) < kinds.index(WarmupEnded)
    assert audit(entries) == ()
    assert {job for job in SPACE_JOBS if selection_of(entries).decision_on(job) is None} == {"job-002", "job-003"}
    turned = [with_turned_scores(entry) for entry in entries]
    kept = {job for job in SPACE_JOBS if selection_of(before_continuing(turned)).decision_on(job) is None}
    assert kept == {"job-000", "job-001"}, "the exits follow from the scores in the journal"


def with_turned_scores(entry: JournalEntry) -> JournalEntry:
    if not isinstance(entry.event, RungScored):
        return entry
    scores = tuple(
        replace(score, mean=-score.score, rows=tuple(-row for row in score.rows)) for score in entry.event.scores
    )
    return replace(entry, event=replace(entry.event, scores=scores))


def before_continuing(entries: list[JournalEntry]) -> list[JournalEntry]:
    position = next(at for at, entry in enumerate(entries) if isinstance(entry.event, WarmupEnded))
    return entries[: position + 1]


@pytest.mark.parametrize("max_slots", [1, 3, 4])
def test_parked_and_resident_jobs_are_scored_as_they_are_at_the_rung(
    task: alto.Task, monkeypatch: pytest.MonkeyPatch, max_slots: int
) -> None:
    judge = Judge(by_number)
    run = tune(task.replace(max_slots=max_slots), judge, monkeypatch)
    at_rung, at_end = judge.calls
    assert list(at_rung) == [f"job-{n:03d}" for n in range(4)]
    halfway = sizes_after(task, 4, monkeypatch)
    assert at_rung == pytest.approx(halfway, rel=1e-4)
    assert set(at_end) <= set(at_rung)
    steps = [entry.event for entry in entries_of(run) if isinstance(entry.event, TrainSteps | RungScored)]
    position = next(at for at, event in enumerate(steps) if isinstance(event, RungScored))
    before = [event for event in steps[:position] if isinstance(event, TrainSteps)]
    assert max(event.first_step + len(event.losses) - 1 for event in before) == 4, "no job runs ahead of the rung"


def test_a_job_that_has_ended_is_scored_as_it_was_best(tmp_path: Path) -> None:
    calls: list[dict[str, str]] = []

    def judge(adapters: Mapping[str, Path], on_turn: Callable[[], None]) -> Judgement:
        calls.append({job: folder.name.partition(".")[0] for job, folder in adapters.items()})
        return Judgement(scorer="exact_match", failure="not today")

    jobs = [{"lr": 1e-3, "r": 4, "batch_size": 4, "seed": seed} for seed in (1, 2, 3)]
    select_by = {"scorer": "exact_match", "at": [0.5]}
    task = resident_jobs.make_task(jobs, eval_steps=0.25, early_exit=EARLY_EXIT, select_by=select_by)
    backbone = Backbone(resident_jobs.make_model("llama"), None, "unused")
    with built(tmp_path / "run", task, resident_jobs.DATA, backbone, hooks=Hooks(judge=judge)) as session:
        executor = Executor(session.bank)
        executor.attach("run", session)
        ended = session.state.jobs["job-001"]
        while not session.state.selection.history(ended.id):
            executor.turn()
        decision = ExitDecision(job=ended.id, step=ended.step, reason=ExitReason.OVERFITTING)
        session.state.selection.end(decision)
        session._lifecycle.end(ended, decision)
        while executor.sessions:
            executor.turn()
    assert calls[0] == {"job-000": "last", "job-001": "best", "job-002": "last"}


def sizes_after(task: alto.Task, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return the norms of all jobs' weights in a task that ends after so many steps."""
    run = tune(task.replace(max_steps=num_steps, early_exit=False, select_by="metric"), Judge(by_number), monkeypatch)
    weights = {job: read_adapter(run / "jobs" / job / "last") for job in SPACE_JOBS}
    return {job: size_of(of_job) for job, of_job in weights.items()}


def test_a_scorer_that_fails_leaves_the_rung_to_the_metric(task: alto.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    by_loss = outcome(tune(task.replace(select_by="metric"), Judge(by_number), monkeypatch))
    run = tune(task, Judge(by_number, failure="the judge is asleep"), monkeypatch)
    assert outcome(run).kept == by_loss.kept
    (scored,) = (entry.event for entry in entries_of(run) if isinstance(entry.event, RungScored))
    assert (scored.scores, scored.failure) == ((), "the judge is asleep")
    notes = choice_notes(read_history(run))
    assert notes[0] == (
        "select_by: at the rung at 50 % the scorer exact_match failed (the judge is asleep), so the validation loss "
        "ranked the jobs there."
    )
    assert audit(entries_of(run)) == ()


def test_with_the_real_scorer_the_jobs_train_on_as_without_it(task: alto.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base is unchanged: the losses after the rung equal those of a run without scoring."""
    kept_all = {**EARLY_EXIT, "rungs": [[0.5, 1.0]], "finish_from": 1.0}
    folder = Path(task.dataset).parent
    plain = alto.Engine(output_dir=folder / "plain").tune(task.replace(early_exit=kept_all, select_by="metric"))
    scored = alto.Engine(output_dir=folder / "scored").tune(task.replace(early_exit=kept_all))
    assert [job.best_validation_loss for job in scored.job_results] == pytest.approx(
        [job.best_validation_loss for job in plain.job_results], rel=1e-5
    )
    history = read_history(scored.run_dir)
    assert [len(found.scores) for found in history.rung_scores] == [4]
    assert history.rung_scores[0].failure == ""
    assert audit(entries_of(Path(scored.run_dir))) == ()


def test_a_run_that_is_stopped_while_a_rung_is_scored_scores_it_again(
    task: alto.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, wanted = Judge(by_number), tune(task, Judge(by_number), monkeypatch)
    is_asked: list[bool] = []
    judge.on_call = lambda: is_asked.append(True)
    monkeypatch.setattr(runner, "FinalistJudge", lambda *_: judge)
    folder = Path(task.dataset).parent / "stopped"
    runs = runner.TaskRunner(is_interrupted=lambda: len(is_asked) == 1)
    with pytest.raises(TaskInterruptedError):
        runs.begin(task, folder)
    (run,) = folder.iterdir()
    assert not any(isinstance(entry.event, RungScored) for entry in entries_of(run))
    alto.Engine().resume(run)
    assert outcome(run).kept == outcome(wanted).kept
    assert audit(entries_of(run)) == ()
    completed = {entry.event.job for entry in entries_of(run) if isinstance(entry.event, JobCompleted)}
    assert completed == set(outcome(run).kept)


def test_the_point_from_which_only_the_best_continues_may_be_scored(
    task: alto.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"early_exit": {**EARLY_EXIT, "rungs": [[0.25, 1.0]], "finish_from": 0.5}}
    run = tune(task.replace(**changes), Judge(by_number), monkeypatch)
    events = [entry.event for entry in entries_of(run)]
    assert [event.progress for event in events if isinstance(event, WarmupEnded)] == [0.25, 0.5]
    assert [event.progress for event in events if isinstance(event, RungScored)] == [0.5], "no other rung is scored"
    last = [event for event in events if isinstance(event, WarmupEnded)][-1]
    assert last.kept == ("job-003",)
