"""A task on preference pairs that selects by accuracy: from the first step to the result, across an interruption, and
while its user adds and stops jobs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from journals import entries
from tiny import load_tokenizer, random_llama, read_journal

from alto.backbone import Backbone
from alto.data import EncodedDataset, Span, TaskData
from alto.early_exit import audit, selection_of
from alto.errors import RunError, TaskInterruptedError
from alto.executor import Hooks, RunInputs, TaskContext, TaskSession, recover, run_alone
from alto.executor.recovery import check_jobs
from alto.records import ExitReason, TaskOutcome
from alto.runs import JobAction, Journal, JournalEntry, Mailbox, Observer, RunDir, read_history, task_outcome
from alto.runs.events import JobEvaluated, TaskStarted, decode
from alto.spec import EarlyExit, Task, load_task
from alto.spec.scoring import score_of
from alto.views import choice_notes

METRICS = {"reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward", "kl"}
SPACE = {"lr": [1e-3, 1e-2], "beta": [0.05, 0.5]}
SELECTING = EarlyExit(rungs=((0.2, 0.75), (0.6, 0.7)), overfitting_patience=1, tau_noise=0.5)


def make_pairs(num_pairs: int, seed: int) -> EncodedDataset:
    """Draw pairs of random tokens from so small an alphabet that what some pairs teach is wrong for others."""
    generator = torch.Generator().manual_seed(seed)
    input_ids, targets, spans = [], [], []
    for _ in range(num_pairs):
        first, length, size = (int(torch.randint(2, 9, (), generator=generator)) for _ in range(3))
        prompt = torch.arange(first, first + length)
        # The chosen reply tends to have lower tokens.
        chosen, rejected = (torch.randint(20 + side, 25 + side, (size,), generator=generator) for side in range(2))
        nothing = torch.tensor([-100])
        input_ids.append(torch.cat([prompt, chosen, prompt[-1:], rejected]))
        targets.append(torch.cat([torch.full((length - 1,), -100), chosen, nothing, rejected, nothing]))
        spans.append((Span(length + size), Span(1 + size, length - 1)))
    return EncodedDataset(input_ids=tuple(input_ids), targets=tuple(targets), spans=tuple(spans))


DATA = TaskData(train=make_pairs(12, seed=5), validation=make_pairs(8, seed=105))


def make_run(folder: Path, **changes: Any) -> RunDir:
    settings = {
        "name": "pairs",
        "model": "alto-tiny",
        "dataset": "pairs.jsonl",
        "method": "dpo",
        "metric": "reward_accuracy",
        "batch_size": 4,
        "num_train_epochs": 5,
        "eval_steps": 0.1,
        "max_slots": 3,
        "search_space": SPACE,
        "early_exit": SELECTING,
    }
    return RunDir.create(folder / "runs", Task(**(settings | changes)))


def train(
    run_dir: RunDir, observers: Sequence[Observer] = (), *, is_interrupted: Callable[[], bool] | None = None
) -> TaskOutcome:
    task, resume_state, tokenizer = load_task(run_dir.task_file), recover(run_dir), load_tokenizer()
    backbone = Backbone(random_llama(len(tokenizer)), tokenizer, "random-llama")
    with Journal(run_dir.journal_file, observers, past=resume_state.entries) as journal:
        context = TaskContext.of(task, backbone, DATA)
        hooks = Hooks(is_interrupted=is_interrupted or (lambda: False))
        run_alone(TaskSession(context, journal, RunInputs(run_dir=run_dir, resume_state=resume_state), hooks))
    return task_outcome(read_history(run_dir.root), run_dir)


def train_until(run_dir: RunDir, step: int) -> None:
    """Interrupt the run when one of its jobs is evaluated at ``step`` or later."""
    seen: list[int] = []
    with pytest.raises(TaskInterruptedError):
        train(
            run_dir,
            [lambda entry: seen.append(entry.event.step) if isinstance(entry.event, JobEvaluated) else None],
            is_interrupted=lambda: max(seen, default=0) >= step,
        )


def of(events: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [event for event in events if event["event"] == kind]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run_dir = make_run(tmp_path_factory.mktemp("undisturbed"))
    train(run_dir)
    return run_dir


def result_of(run_dir: RunDir) -> TaskOutcome:
    return task_outcome(read_history(run_dir.root), run_dir)


def test_every_evaluation_tells_what_the_method_measures(undisturbed: RunDir) -> None:
    events = read_journal(undisturbed.root)
    assert of(events, "task_started")[0]["metric"] == "reward_accuracy"
    assert all(set(event["metrics"]) == METRICS for event in of(events, "eval"))
    assert all(event["metrics"]["reward_accuracy"] * 8 % 1 == 0 for event in of(events, "eval"))


def test_the_base_is_evaluated_once_for_all_jobs_with_the_same_loss(undisturbed: RunDir) -> None:
    events = read_journal(undisturbed.root)
    (found,) = of(events, "base_evaluated")
    assert found["seq"] < of(events, "train")[0]["seq"]
    assert [value["jobs"] for value in found["values"]] == [["job-000", "job-002"], ["job-001", "job-003"]]
    for value in found["values"]:
        # An adapter that changes nothing prefers neither reply: a margin of 0 for every pair.
        assert value["validation_loss"] == pytest.approx(math.log(2), rel=1e-6)
        assert value["metrics"]["reward_accuracy"] == 0.5
        assert value["metrics"]["reward_margin"] == pytest.approx(0, abs=1e-6)


STUDENT_OF_7_DEGREES = 2.365


def cannot_be_told_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two evaluations of eight rows have the same accuracy within a two-sided interval of 95 %."""
    differences = [a - b for a, b in zip(one["metric_rows"], other["metric_rows"], strict=True)]
    lead = abs(statistics.fmean(differences))
    return lead == 0 or lead <= STUDENT_OF_7_DEGREES * statistics.stdev(differences) / math.sqrt(8)


def accuracy(event: Mapping[str, Any]) -> float:
    return float(event["metrics"]["reward_accuracy"])


def test_evaluations_keep_the_metric_of_every_row(undisturbed: RunDir) -> None:
    for event in of(read_journal(undisturbed.root), "eval"):
        assert len(event["metric_rows"]) == 8
        assert statistics.fmean(event["metric_rows"]) == accuracy(event)


def test_the_metric_chooses_and_within_its_noise_the_loss(undisturbed: RunDir) -> None:
    events, result = read_journal(undisturbed.root), result_of(undisturbed)
    bests: dict[str, Mapping[str, Any]] = {}
    peaks: dict[str, Mapping[str, Any]] = {}
    for event in of(events, "eval"):
        best, peak = bests.get(event["job"]), peaks.get(event["job"])
        if peak is None or accuracy(event) > accuracy(peak):
            peaks[event["job"]] = peak = event
        tied = best is not None and cannot_be_told_apart(event, best)
        is_better = (
            best is None
            or (tied and event["validation_loss"] < best["validation_loss"])
            or (not tied and accuracy(event) > accuracy(best))
        )
        if is_better and cannot_be_told_apart(event, peak):
            bests[event["job"]] = event
    for job in result.jobs:
        assert job.best_step == bests[job.job]["step"]
    leader = max(bests.values(), key=lambda event: (accuracy(event), -event["validation_loss"]))
    tied = [event for event in bests.values() if cannot_be_told_apart(event, leader)]
    # The base gives every pair log 2 for any beta, so shares of it are ordered as the losses are.
    winner = min(tied, key=lambda event: event["validation_loss"])
    assert result.best_job == winner["job"]
    assert result.metric == "reward_accuracy"
    assert result.best_metrics["reward_accuracy"] == accuracy(winner)
    others = {event["job"] for event in tied if accuracy(event) != accuracy(winner)}
    (completed,) = of(events, "task_completed")
    assert {other["job"] for other in completed.get("within_noise", ())} == others
    assert any("cannot separate" in note for note in choice_notes(read_history(result.run_dir))) == bool(others)


def test_rungs_rank_by_the_metric_and_the_journal_tells_why(undisturbed: RunDir) -> None:
    events = read_journal(undisturbed.root)
    assert len(of(events, "warmup_ended")) == 2
    (dropped,) = [event for event in of(events, "job_exited") if event["reason"] == ExitReason.UNDERPERFORMING]
    assert {"score", "cutoff_score", "validation_loss", "cutoff_loss"} <= dropped["evidence"].keys()
    assert audit(entries(events)) == ()
    winner = selection_of(entries(events)).winner()
    assert winner is not None
    assert winner.score == score_of("reward_accuracy", result_of(undisturbed).best_metrics)


@pytest.mark.parametrize("step", [2, 8])
def test_a_run_that_is_interrupted_picks_the_same_winner_by_the_same_numbers(
    undisturbed: RunDir, tmp_path: Path, step: int
) -> None:
    run_dir = make_run(tmp_path)
    train_until(run_dir, step)
    half = read_history(run_dir.root)
    assert half.result is None
    assert any(job.best_metrics for job in half.jobs.values())
    found, expected = train(run_dir), result_of(undisturbed)
    assert of(read_journal(run_dir.root), "task_resumed")
    assert (found.best_job, found.best_validation_loss) == (expected.best_job, expected.best_validation_loss)
    assert found.best_metrics == expected.best_metrics
    assert found.jobs == expected.jobs


def test_a_run_is_not_gone_on_with_by_another_metric(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    train_until(run_dir, 1)
    text = run_dir.task_file.read_text(encoding="utf-8")
    run_dir.task_file.write_text(text.replace("metric: reward_accuracy", "metric: reward_margin"), encoding="utf-8")
    with pytest.raises(RunError, match="different settings of metric"):
        train(run_dir)


def test_a_run_is_not_gone_on_with_by_another_method() -> None:
    task = Task(model="alto-tiny", dataset="rows.jsonl", method="dpo")
    settings = task.early_exit.resolved().model_dump(mode="json")
    line = {"event": "task_started", "time": 0.0, "jobs": [], "early_exit": settings, "method": "sft", "metric": "loss"}
    started = decode(line).event
    assert isinstance(started, TaskStarted)
    with pytest.raises(RunError, match="different settings of method;"):
        check_jobs(started, {}, task)
    check_jobs(replace(started, method="dpo"), {}, task)


def test_jobs_are_cloned_and_stopped_while_they_learn_preferences(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, early_exit=EarlyExit(enabled=False), search_space={"lr": [1e-3, 1e-2]})
    mailbox, sent = Mailbox(run_dir), []

    def ask(entry: JournalEntry) -> None:
        if isinstance(entry.event, JobEvaluated) and not sent:
            changes = {"beta": 0.3, "loss_type": "ipo"}
            sent.append(mailbox.send(JobAction.CLONE, "job-000", changes=changes, warm=True))
            sent.append(mailbox.send(JobAction.STOP, "job-001"))

    result = train(run_dir, [ask])
    assert [mailbox.wait_for_answer(command, 0).done for command in sent] == [True, True]
    events = read_journal(run_dir.root)
    (added,) = of(events, "job_added")
    assert (added["config"]["beta"], added["config"]["loss_type"], added["config"]["label_smoothing"]) == (
        0.3,
        "ipo",
        0,
    )
    stopped, clone = result.jobs[1], result.jobs[2]
    assert stopped.exit_reason is ExitReason.STOPPED
    assert (clone.steps, set(clone.best_metrics)) == (15, METRICS)
    assert audit(entries(events)) == ()


def test_a_clone_may_not_ask_for_what_its_method_has_not(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, early_exit=EarlyExit(enabled=False), search_space={"lr": [1e-3]}, method="orpo")
    mailbox, sent = Mailbox(run_dir), []

    def ask(entry: JournalEntry) -> None:
        if isinstance(entry.event, JobEvaluated) and not sent:
            sent.append(mailbox.send(JobAction.CLONE, "job-000", changes={"loss_type": "ipo"}))

    result = train(run_dir, [ask])
    answer = mailbox.wait_for_answer(sent[0], 0)
    assert not answer.done
    assert "'loss_type' is a setting of method dpo" in answer.message
    assert set(result.best_metrics) == METRICS - {"kl"} | {"chosen_loss"}
