"""The mailbox of a run, and foreign files in it: every command is answered, and the run is not disturbed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from alto.errors import JobCommandError, MailboxFullError
from alto.runs import CommandAnswer, JobAction, Mailbox, RunDir
from alto.runs.mailbox import MOST_KEPT

NAME = "00001-x"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def _link_to_folder(path: Path) -> None:
    (path.parents[1] / "elsewhere").mkdir()
    (path.parents[1] / "elsewhere" / "kept").touch()
    path.symlink_to(path.parents[1] / "elsewhere")


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "link to a folder": _link_to_folder,
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "huge": _huge,
    "deep": lambda path: path.write_text("[" * 100_000),
    "empty": Path.touch,
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
    "list": lambda path: path.write_text("[]"),
    "other keys": lambda path: path.write_text('{"a": 1}'),
    "other types": lambda path: path.write_text('{"done": 1, "message": [], "action": 7, "job": {}}'),
}


@pytest.mark.parametrize("make", NO_FILES.values(), ids=NO_FILES)
def test_an_invalid_command_is_answered_and_removed(run: RunDir, make: Callable[[Path], object]) -> None:
    run.control.mkdir()
    path = run.control / f"{NAME}.command.json"
    make(path)
    mailbox = Mailbox(run)
    assert mailbox.pending() == []
    assert not os.path.lexists(path)
    answer = mailbox.wait_for_answer(NAME, 0)
    assert answer is not None
    assert not answer.done
    assert "expected a command as `alto job` writes it" in answer.message
    if (run.root / "elsewhere").exists():
        assert (run.root / "elsewhere" / "kept").exists(), "a link was followed and its folder emptied"


@pytest.mark.parametrize("make", [make for name, make in NO_FILES.items() if name != "link to nothing"])
def test_an_invalid_answer_is_a_named_error(run: RunDir, make: Callable[[Path], object]) -> None:
    run.control.mkdir()
    make(run.control / f"{NAME}.answer.json")
    with pytest.raises(JobCommandError, match=rf"expected the answer of the task at .*{NAME}\.answer\.json"):
        Mailbox(run).wait_for_answer(NAME, 0)


@pytest.mark.parametrize("make", NO_FILES.values(), ids=NO_FILES)
def test_an_answer_takes_the_place_of_whatever_is_there(run: RunDir, make: Callable[[Path], object]) -> None:
    run.control.mkdir()
    make(run.control / f"{NAME}.answer.json")
    Mailbox(run).answer(NAME, CommandAnswer(done=True, message="done"))
    assert Mailbox(run).wait_for_answer(NAME, 0) == CommandAnswer(done=True, message="done")


def test_a_file_in_the_place_of_the_mailbox_is_ignored_by_the_run_and_named_to_senders(run: RunDir) -> None:
    run.control.write_text("x")
    mailbox = Mailbox(run)
    assert mailbox.pending() == []
    with pytest.raises(JobCommandError, match=r"expected a folder for commands at .*control, found a file"):
        mailbox.send(JobAction.STOP, "job-000")


def test_a_command_arrives_and_its_answer_comes_back(run: RunDir) -> None:
    mailbox = Mailbox(run)
    sent = mailbox.send(JobAction.CLONE, "job-000", changes={"r": 4}, warm=True)
    (command,) = mailbox.pending()
    assert (command.id, command.action, command.job) == (sent, JobAction.CLONE, "job-000")
    assert (command.changes, command.warm) == ({"r": 4}, True)
    assert mailbox.wait_for_answer(sent, 0) is None
    mailbox.answer(sent, CommandAnswer(done=True, message="yes"))
    assert mailbox.pending() == []
    assert json.loads((run.control / f"{sent}.answer.json").read_text()) == {"done": True, "message": "yes"}


def test_commands_keep_their_order_where_the_clock_is_set_back(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([2_000_000_000, 1_000_000_000, 1_000_000_000])
    monkeypatch.setattr("alto.runs.mailbox.time.time_ns", lambda: next(times))
    mailbox = Mailbox(run)
    sent = [mailbox.send(JobAction.STOP, f"job-{number}") for number in range(3)]
    assert [command.id for command in mailbox.pending()] == sent


def test_a_mailbox_does_not_grow_without_bound(run: RunDir) -> None:
    mailbox = Mailbox(run)
    with run.locked():
        for _ in range(2):
            commands = [mailbox.send(JobAction.STOP, "job-000") for _ in range(MOST_KEPT)]
            with pytest.raises(MailboxFullError, match=f"expected fewer than {MOST_KEPT} commands"):
                mailbox.send(JobAction.RESUME, "job-000")
            for command in commands:
                mailbox.answer(command, CommandAnswer(done=True, message=command))
    assert sorted(path.name for path in run.control.iterdir()) == [f"{command}.answer.json" for command in commands]
