"""Commands to a running task: their effects on jobs, refusals, and no effect on other jobs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from journals import entries
from tiny import curves_of, make_task, read_journal, run_task

from alto.early_exit import audit, selection_of
from alto.errors import NoResultError
from alto.lora import read_adapter
from alto.records import ExitReason, TaskOutcome
from alto.runs import CommandAnswer, JobAction, Mailbox, RunDir, read_history
from alto.spec import EarlyExit

SPACE = {"lr": [1e-3, 1e-2, 1e30], "batch_size": [8]}
OFF = EarlyExit(enabled=False)
JOBS = ("job-000", "job-001", "job-002")

Send = Callable[..., None]


class Commanded:
    """A task that receives commands at chosen events.

    Attributes:
        answers: The answers to the commands, in the order they were sent.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        folder.mkdir(exist_ok=True)
        settings = {
            "search_space": SPACE,
            "max_grad_norm": 0,
            "early_exit": OFF,
            "eval_steps": 0.2,
            "keep": "all",
        } | settings
        self.task = make_task(folder, **settings)
        self.run_dir = RunDir.create(folder / "runs", self.task)
        self.mailbox = Mailbox(self.run_dir)
        self._plan: list[tuple[Callable[[Mapping[str, Any]], bool], Callable[[], str]]] = []
        self._ids: list[str] = []
        self.answers: list[CommandAnswer | None] = []
        self.result: TaskOutcome | None = None

    def at(
        self, action: JobAction, job: str, *, event: str, of: str | None = None, step: int = 0, **options: Any
    ) -> None:
        """Send a command when ``event`` of job ``of`` (by default the job itself) is in the journal."""
        subject = of or job

        def is_due(line: Mapping[str, Any]) -> bool:
            return bool(line["event"] == event and line.get("job") == subject and line.get("step", 0) >= step)

        self._plan.append((is_due, lambda: self.mailbox.send(action, job, **options)))

    def run(self) -> list[dict[str, Any]]:
        self.result = run_task(self.task, self.run_dir, [lambda entry: self._observe(entry.to_dict())])
        self.answers = [self.mailbox.wait_for_answer(command, 0) for command in self._ids]
        assert not self._plan, "an event that a command waited for never came"
        return read_journal(self.run_dir.root)

    def _observe(self, line: Mapping[str, Any]) -> None:
        if self._plan and self._plan[0][0](line):
            self._ids.append(self._plan.pop(0)[1]())

    def outcome(self, job: str) -> tuple[ExitReason | None, int]:
        assert self.result is not None
        (result,) = [result for result in self.result.jobs if result.job == job]
        return result.exit_reason, result.steps


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def test_a_stopped_job_ends_and_the_others_do_not_notice(tmp_path: Path) -> None:
    commanded = Commanded(tmp_path / "a")
    commanded.at(JobAction.STOP, "job-000", event="eval", step=3)
    events = commanded.run()
    assert commanded.outcome("job-000") == (ExitReason.STOPPED, 3)
    assert commanded.answers == [
        CommandAnswer(done=True, message="job-000 is stopped after 3 of 15 steps; it can be resumed")
    ]
    alone = Commanded(tmp_path / "b")
    others = curves_of(alone.run())["job-001"]
    assert list(curves_of(events)["job-001"].train.values()) == pytest.approx(list(others.train.values()), rel=1e-5)
    assert audit(entries(events)) == ()
    assert (commanded.run_dir.job("job-000", "best") / "adapter_model.safetensors").is_file()


def test_jobs_that_are_all_stopped_before_an_evaluation_did_not_diverge(tmp_path: Path) -> None:
    commanded = Commanded(tmp_path, search_space={"lr": [1e-3, 1e-2]}, eval_steps=1.0)
    for job in ("job-000", "job-001"):
        commanded.mailbox.send(JobAction.STOP, job)
    with pytest.raises(NoResultError, match=r"2 of 2 jobs were stopped before their first evaluation; start"):
        commanded.run()


def test_a_stopped_job_that_is_resumed_ends_where_it_would_have(tmp_path: Path) -> None:
    commanded = Commanded(tmp_path / "a")
    commanded.at(JobAction.STOP, "job-000", event="eval", step=3)
    commanded.at(JobAction.RESUME, "job-000", event="eval", of="job-001", step=9)
    events = commanded.run()
    assert commanded.outcome("job-000") == (None, 15)
    assert [answer.done for answer in commanded.answers if answer] == [True, True]
    undisturbed = curves_of(Commanded(tmp_path / "b").run())["job-000"]
    assert list(curves_of(events)["job-000"].train.values()) == pytest.approx(
        list(undisturbed.train.values()), rel=1e-5
    )
    assert audit(entries(events)) == ()


def test_a_job_dropped_at_a_rung_can_be_resumed_and_win_its_place_back(tmp_path: Path) -> None:
    commanded = Commanded(
        tmp_path, search_space={"lr": [1e-3, 1e-2], "batch_size": [8]}, early_exit=EarlyExit(rungs=((0.2, 0.5),))
    )
    commanded.at(JobAction.RESUME, "job-000", event="job_exited")
    events = commanded.run()
    assert [(event["job"], event["reason"]) for event in of(events, "job_exited")] == [("job-000", "underperforming")]
    assert commanded.outcome("job-000") == (None, 15)
    assert audit(entries(events)) == ()


@pytest.mark.parametrize("keep", ["winner", "finalists"])
def test_a_job_that_lost_keeps_its_best_adapter_and_no_state_to_be_resumed_from(keep: str, tmp_path: Path) -> None:
    commanded = Commanded(
        tmp_path,
        search_space={"lr": [1e-3, 1e-2], "batch_size": [8]},
        early_exit=EarlyExit(rungs=((0.2, 0.5),)),
        keep=keep,
    )
    commanded.at(JobAction.RESUME, "job-000", event="job_exited")
    commanded.at(JobAction.CLONE, "job-000", event="command_refused", changes={"lr": 2e-3}, warm=True)
    events = commanded.run()
    refused, cloned = commanded.answers
    assert refused is not None
    assert cloned is not None
    assert not refused.done
    assert re.search(rf"its state removed, as the task has keep: {keep}; clone it, or set keep: all", refused.message)
    assert cloned.done, "its best adapter is there until the task ends"
    kinds = {job: sorted(path.name for path in (commanded.run_dir.root / "jobs" / job).iterdir()) for job in JOBS}
    assert kinds == {"job-000": ["best"], "job-001": ["best"], "job-002": ["best", "start"]}
    (saved,) = {event["jobs"]["job-000"]["step"] for event in of(events, "checkpoint")[-1:]}
    assert saved == 3
    assert audit(entries(events)) == ()


@pytest.mark.parametrize("keep", ["finalists", "all"])
def test_a_job_that_its_user_stopped_can_be_resumed_whatever_is_kept_at_the_end(keep: str, tmp_path: Path) -> None:
    commanded = Commanded(tmp_path, keep=keep)
    commanded.at(JobAction.STOP, "job-000", event="eval", step=3)
    commanded.at(JobAction.RESUME, "job-000", event="eval", of="job-001", step=9)
    commanded.run()
    assert commanded.outcome("job-000") == (None, 15)


def test_a_fresh_clone_trains_as_the_same_configuration_would_have(tmp_path: Path) -> None:
    commanded = Commanded(tmp_path / "a")
    commanded.at(JobAction.CLONE, "job-000", event="eval", step=3, changes={"lr": 5e-3, "r": 4})
    events = commanded.run()
    (added,) = of(events, "job_added")
    assert (added["job"], added["origin"], added["warm"]) == ("job-003", "job-000", False)
    assert (added["config"]["learning_rate"], added["config"]["r"], added["config"]["lora_alpha"]) == (5e-3, 4, 8.0)
    assert "learning_rate=0.005, r=4, lora_alpha=8.0" in str(commanded.answers[0])
    twin = Commanded(tmp_path / "b", search_space={"lr": [5e-3], "batch_size": [8]}, r=4)
    expected = curves_of(twin.run())["job-000"]
    found = curves_of(events)["job-003"]
    assert list(found.train.values()) == pytest.approx(list(expected.train.values()), rel=1e-5)
    assert list(found.validation.values()) == pytest.approx(list(expected.validation.values()), rel=1e-5)
    assert read_history(commanded.run_dir.root).jobs["job-003"].origin == "job-000"
    assert audit(entries(events)) == ()
    selection = selection_of(entries(events))
    assert selection.start_of("job-003") == selection.start_of("job-000") is not None


def test_a_clone_larger_than_the_bank_gets_a_larger_bank_without_effect_on_others(tmp_path: Path) -> None:
    commanded = Commanded(tmp_path / "a", r=4, target_modules=["q_proj"])
    changes = {"r": 12, "target_modules": ["up_proj", "q_proj"]}
    commanded.at(JobAction.CLONE, "job-000", event="eval", step=3, changes=changes)
    events = commanded.run()
    twin = Commanded(tmp_path / "b", search_space={"lr": [1e-3], "batch_size": [8]}, **changes)
    expected, found = curves_of(twin.run())["job-000"], curves_of(events)["job-003"]
    assert list(found.train.values()) == pytest.approx(list(expected.train.values()), rel=1e-5)
    alone = curves_of(Commanded(tmp_path / "c", r=4, target_modules=["q_proj"]).run())["job-001"]
    assert list(curves_of(events)["job-001"].train.values()) == pytest.approx(list(alone.train.values()), rel=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_dora": True, "optim": "rmsprop", "rank_pattern": {"q_proj": 6}},
        {"optim": "sgd", "optim_args": {"momentum": 0.9}, "neftune_noise_alpha": 5.0},
        {"use_dora": True, "optim": "adafactor", "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
def test_a_clone_that_trains_more_than_others_trains_as_the_same_configuration_would_have(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    commanded = Commanded(tmp_path / "a", r=4)
    commanded.at(JobAction.CLONE, "job-000", event="eval", step=3, changes=changes)
    events = commanded.run()
    twin = Commanded(tmp_path / "b", search_space={"lr": [1e-3], "batch_size": [8]}, r=4, **changes)
    expected, found = curves_of(twin.run())["job-000"], curves_of(events)["job-003"]
    assert list(found.train.values()) == pytest.approx(list(expected.train.values()), rel=1e-5)
    assert list(found.validation.values()) == pytest.approx(list(expected.validation.values()), rel=1e-5)


def test_a_warm_clone_starts_with_the_magnitudes_too(tmp_path: Path) -> None:
    commanded = Commanded(tmp_path, use_dora=True)
    commanded.at(JobAction.CLONE, "job-001", event="eval", step=6, changes={"lr": 1e-30, "optim": "sgd"}, warm=True)
    events = commanded.run()
    start = read_adapter(commanded.run_dir.job("job-003", "start"))
    curve = list(curves_of(events)["job-003"].validation.values())
    assert curve == pytest.approx([curve[0]] * len(curve), rel=1e-6), "it does not learn at that rate"
    assert curve[0] == pytest.approx(curves_of(events)["job-001"].validation[6], rel=1e-6)
    last = read_adapter(commanded.run_dir.job("job-003", "last"))
    assert len(start.extras) == len(start) > 0
    for name, magnitude in start.extras.items():
        torch.testing.assert_close(last.extras[name], magnitude, rtol=1e-6, atol=0.0)


def test_a_warm_clone_starts_from_the_best_weights(tmp_path: Path) -> None:
    commanded = Commanded(tmp_path)
    commanded.at(JobAction.CLONE, "job-001", event="eval", step=6, changes={"lr": 1e-4}, warm=True)
    events = commanded.run()
    first_losses = curves_of(events)
    assert next(iter(first_losses["job-003"].train.values())) < next(iter(first_losses["job-001"].train.values()))
    start = read_adapter(commanded.run_dir.job("job-003", "start"))
    assert any(bool(b.any()) for _, b in start.values())
    assert read_history(commanded.run_dir.root).jobs["job-003"].step == 15
    assert selection_of(entries(events)).start_of("job-003") is None, "it does not begin at the base"


@pytest.mark.parametrize(
    ("action", "job", "options", "message"),
    [
        (JobAction.STOP, "job-009", {}, "expected a job of this run, found 'job-009'"),
        (JobAction.STOP, "job-002", {}, "job-002 has ended; nothing to stop"),
        (JobAction.RESUME, "job-001", {}, "job-001 trains; nothing to do"),
        (JobAction.RESUME, "job-002", {}, "finite losses"),
        (JobAction.CLONE, "job-001", {}, "job-001 has it"),
        (JobAction.CLONE, "job-001", {"changes": {"lr": -1}}, "learning_rate .*-1"),
        (JobAction.CLONE, "job-001", {"changes": {"learning_rat": 1}}, "Did you mean 'learning_rate'"),
        (JobAction.CLONE, "job-001", {"changes": {"r": 2000}}, "r .*should be"),
        *(
            (
                JobAction.CLONE,
                "job-001",
                {"changes": changes, "warm": True},
                "change r, target_modules, use_dora and bias",
            )
            for changes in ({"r": 2}, {"use_dora": True})
        ),
        (
            JobAction.CLONE,
            "job-001",
            {"changes": {"optim_args": {"momentum": 0.9}}},
            "settings of optim .adamw_torch. .none., found .momentum.",
        ),
        (JobAction.CLONE, "job-002", {"warm": True}, "a finite validation loss to start from"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(
    action: JobAction, job: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    commanded = Commanded(tmp_path)
    commanded.at(action, job, event="eval", of="job-001", step=3, **options)
    events = commanded.run()
    (answer,) = commanded.answers
    assert answer is not None
    assert not answer.done
    assert re.search(message, answer.message), answer.message
    assert len(of(events, "command_refused")) == 1
    assert not of(events, "job_added")
    assert commanded.outcome("job-001") == (None, 15)


def test_a_job_that_is_done_can_only_be_cloned(tmp_path: Path) -> None:
    space = {"paired": [{"max_steps": [2, 15], "lr": [1e-3, 1e-2]}], "batch_size": [8]}
    commanded = Commanded(tmp_path, search_space=space)
    commanded.at(JobAction.RESUME, "job-000", event="job_completed")
    commanded.at(JobAction.CLONE, "job-000", event="eval", of="job-001", step=6, changes={"epochs": 2})
    events = commanded.run()
    assert [answer.done for answer in commanded.answers if answer] == [False, True]
    assert of(events, "job_added")[0]["total_steps"] == 6


def test_a_file_that_is_no_command_is_answered_and_changes_nothing(tmp_path: Path) -> None:
    commanded = Commanded(tmp_path)
    commanded.run_dir.control.mkdir()
    (commanded.run_dir.control / "5.command.json").mkdir()
    (commanded.run_dir.control / "4.command.json").write_bytes(b"\xff\xfe")
    for name, text in {"1": "not json", "2": "[]", "3": json.dumps({"action": "delete", "job": "job-000"})}.items():
        (commanded.run_dir.control / f"{name}.command.json").write_text(text)
    commanded.run()
    for name in "12345":
        answer = commanded.mailbox.wait_for_answer(name, 0)
        assert answer is not None
        assert not answer.done
    assert not commanded.mailbox.pending()


def test_a_command_that_comes_too_late_is_answered(tmp_path: Path) -> None:
    commanded = Commanded(tmp_path)
    commanded.at(JobAction.STOP, "job-001", event="task_completed", of=None)
    commanded._plan[0] = (lambda line: line["event"] == "task_completed", commanded._plan[0][1])
    commanded.run()
    assert commanded.answers == [CommandAnswer(done=False, message="the task has just ended; give the command again")]
