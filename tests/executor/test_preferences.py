"""A task that learns from pairs and chooses by how often it is right: from first step to result, over an interruption,
and while its user adds and stops jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import load_tokenizer, random_llama, read_journal

from alto.backbone import Backbone
from alto.data import EncodedDataset, Span, TaskData
from alto.early_exit import audit, race_of
from alto.errors import RunError, TaskInterruptedError
from alto.executor import Executor, plan_jobs, recover
from alto.executor.recovery import check_jobs
from alto.records import ExitReason, TaskResult
from alto.runs import Action, Journal, Mailbox, Observer, RunDir, read_history, task_result
from alto.spec import EarlyExit, Task, load_task
from alto.spec.metric import gain_of

METRICS = {"reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward", "kl"}
SPACE = {"lr": [1e-3, 1e-2], "beta": [0.05, 0.5]}
SELECTING = EarlyExit(rungs=((0.2, 0.75), (0.6, 0.7)), overfitting_patience=1, tau_noise=0.5)


def make_pairs(num_pairs: int, seed: int) -> EncodedDataset:
    """Replies of random tokens, from an alphabet so small that what is learned of some pairs is wrong of others."""
    generator = torch.Generator().manual_seed(seed)
    input_ids, targets, spans = [], [], []
    for _ in range(num_pairs):
        first, length, size = (int(torch.randint(2, 9, (), generator=generator)) for _ in range(3))
        prompt = torch.arange(first, first + length)
        # The chosen reply is more often of the lower tokens.
        chosen, rejected = (torch.randint(20 + side, 25 + side, (size,), generator=generator) for side in range(2))
        nothing = torch.tensor([-100])
        input_ids.append(torch.cat([prompt, chosen, prompt[-1:], rejected]))
        targets.append(torch.cat([torch.full((length - 1,), -100), chosen, nothing, rejected, nothing]))
        spans.append((Span(length + size), Span(1 + size, length - 1)))
    return EncodedDataset(
        input_ids=tuple(input_ids), targets=tuple(targets), num_truncated=0, num_skipped=0, spans=tuple(spans)
    )


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
) -> TaskResult:
    """Begin the run, or go on with it."""
    task, past, tokenizer = load_task(run_dir.task_file), recover(run_dir), load_tokenizer()
    backbone = Backbone(random_llama(len(tokenizer)), tokenizer, "random-llama")
    with Journal(run_dir.journal_file, observers, past=past.events) as journal:
        Executor(
            task,
            plan_jobs(task, backbone, DATA),
            backbone,
            DATA,
            run_dir=run_dir,
            journal=journal,
            past=past,
            is_interrupted=is_interrupted,
        ).run()
    return task_result(read_history(run_dir.root), run_dir)


def train_until(run_dir: RunDir, step: int) -> None:
    """Interrupt the run when one of its jobs has been evaluated at ``step`` or after it."""
    seen: list[int] = []
    with pytest.raises(TaskInterruptedError):
        train(
            run_dir,
            [lambda event: seen.append(event["step"]) if event["event"] == "eval" else None],
            is_interrupted=lambda: max(seen, default=0) >= step,
        )


def of(events: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [event for event in events if event["event"] == kind]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run_dir = make_run(tmp_path_factory.mktemp("undisturbed"))
    train(run_dir)
    return run_dir


def result_of(run_dir: RunDir) -> TaskResult:
    return task_result(read_history(run_dir.root), run_dir)


def test_every_evaluation_tells_what_the_method_measures(undisturbed: RunDir) -> None:
    events = read_journal(undisturbed.root)
    assert of(events, "task_started")[0]["metric"] == "reward_accuracy"
    assert all(set(event["metrics"]) == METRICS for event in of(events, "eval"))
    assert all(event["metrics"]["reward_accuracy"] * 8 % 1 == 0 for event in of(events, "eval"))


def test_the_metric_chooses_and_where_it_is_equal_the_loss(undisturbed: RunDir) -> None:
    events, result = read_journal(undisturbed.root), result_of(undisturbed)
    scores = {
        (event["job"], event["step"]): (-event["metrics"]["reward_accuracy"], event["validation_loss"])
        for event in of(events, "eval")
    }
    best = min(scores, key=scores.__getitem__)
    lowest = min(scores, key=lambda evaluation: scores[evaluation][1])
    accuracies = [-accuracy for accuracy, _ in scores.values()]
    assert accuracies.count(max(accuracies)) > 1, "a tie is part of what is tested"
    assert best != lowest, "so is a lower loss that is right less often"
    winner = next(job for job in result.jobs if job.job == result.best_job)
    assert (winner.job, winner.best_step) == best
    assert result.metric == "reward_accuracy"
    assert result.best_metrics == winner.best_metrics
    assert -result.best_metrics["reward_accuracy"] == scores[best][0]
    for job in result.jobs:
        own = {step: score for (name, step), score in scores.items() if name == job.job}
        assert job.best_step == min(own, key=own.__getitem__)
        assert [event["step"] for event in of(events, "eval") if event["job"] == job.job and event["is_best"]][-1] == (
            job.best_step
        )


def test_rungs_rank_by_the_metric_and_the_journal_tells_why(undisturbed: RunDir) -> None:
    events = read_journal(undisturbed.root)
    assert len(of(events, "warmup_ended")) == 2
    (dropped,) = [event for event in of(events, "job_exited") if event["reason"] == ExitReason.UNDERPERFORMING]
    assert dropped["evidence"]["gain"] <= dropped["evidence"]["cutoff_gain"]
    assert audit(events) == ()
    winner = race_of(events).winner()
    assert winner is not None
    assert winner.gain == gain_of("reward_accuracy", result_of(undisturbed).best_metrics)


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
    with pytest.raises(RunError, match="other settings of metric"):
        train(run_dir)


def test_a_run_is_not_gone_on_with_by_another_method() -> None:
    task = Task(model="alto-tiny", dataset="rows.jsonl", method="dpo")
    settings = task.early_exit.resolved().model_dump(mode="json")
    started = {"event": "task_started", "jobs": [], "early_exit": settings, "method": "sft", "metric": "loss"}
    with pytest.raises(RunError, match="other settings of method;"):
        check_jobs(started, {}, task)
    check_jobs({**started, "method": "dpo"}, {}, task)


def test_jobs_are_cloned_and_stopped_while_they_learn_preferences(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, early_exit=EarlyExit(enabled=False), search_space={"lr": [1e-3, 1e-2]})
    mailbox, sent = Mailbox(run_dir), []

    def ask(event: Mapping[str, Any]) -> None:
        if event["event"] == "eval" and not sent:
            changes = {"beta": 0.3, "loss_type": "ipo"}
            sent.append(mailbox.send(Action.CLONE, "job-000", changes=changes, warm=True))
            sent.append(mailbox.send(Action.STOP, "job-001"))

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
    assert audit(events) == ()


def test_a_clone_may_not_ask_for_what_its_method_has_not(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, early_exit=EarlyExit(enabled=False), search_space={"lr": [1e-3]}, method="orpo")
    mailbox, sent = Mailbox(run_dir), []

    def ask(event: Mapping[str, Any]) -> None:
        if event["event"] == "eval" and not sent:
            sent.append(mailbox.send(Action.CLONE, "job-000", changes={"loss_type": "ipo"}))

    result = train(run_dir, [ask])
    answer = mailbox.wait_for_answer(sent[0], 0)
    assert not answer.done
    assert "'loss_type' is a setting of method dpo" in answer.message
    assert set(result.best_metrics) == METRICS - {"kl"} | {"chosen_loss"}
