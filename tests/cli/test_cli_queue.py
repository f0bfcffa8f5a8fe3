"""``alto submit``, ``cancel`` and ``drain`` on a queue whose process runs, is about to end, or is absent."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import Result
from journals import event
from tiny import make_task
from typer.testing import CliRunner

from alto.cli import app
from alto.errors import DataFileNotFoundError, DataFormatError, QueueCommandError
from alto.runs import CommandAnswer, Journal, QueueCommand, QueueDir, QueueEntry, QueueMailbox, RunDir

SETTINGS = {"method": "lpt", "strategy": "single", "cluster": "local", "total_gpus": None, "quotas": {}}
PATIENCE_S = "20"


@pytest.fixture
def queue(tmp_path: Path) -> QueueDir:
    return QueueDir.create(tmp_path / "runs", [], [], SETTINGS)


@contextmanager
def worked_on(queue: QueueDir, answer: Callable[[QueueCommand], CommandAnswer | None]) -> Iterator[None]:
    """Work on the queue in a thread that answers commands until ``answer`` returns None, and then ends."""
    box, has_begun, is_over = QueueMailbox(queue.run), threading.Event(), threading.Event()

    def work() -> None:
        with queue.run.locked():
            has_begun.set()
            while not is_over.wait(0.01):
                for command in box.pending():
                    found = answer(command)
                    if found is None:
                        return
                    box.answer(command.id, found)

    worker = threading.Thread(target=work)
    worker.start()
    has_begun.wait(10)
    yield
    is_over.set()
    worker.join()


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words), "--wait", PATIENCE_S])


def test_if_one_task_is_refused_the_others_are_reported(queue: QueueDir, tmp_path: Path) -> None:
    files = []
    for name in ("bad", "good", "worse"):
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(make_task(tmp_path, name=name).to_yaml(), encoding="utf-8")

    def answer(command: QueueCommand) -> CommandAnswer:
        name = command.values["name"]
        return CommandAnswer(done=name == "good", message=f"{name} it is")

    with worked_on(queue, answer):
        result = invoke("submit", queue.root, *files)
    assert result.stdout == "good it is\n"
    assert isinstance(result.exception, QueueCommandError)
    assert str(result.exception) == "bad it is\nworse it is"


def submitted(queue: QueueDir, folder: Path, **changes: object) -> Result:
    file = folder / "t.yaml"
    file.write_text(make_task(folder, name="t", **changes).to_yaml(), encoding="utf-8")
    with worked_on(queue, lambda command: CommandAnswer(done=True, message="t was submitted.")):
        return invoke("submit", queue.root, file)


def test_rows_that_cannot_be_used_are_refused_at_once(queue: QueueDir, tmp_path: Path) -> None:
    rows = tmp_path / "other.jsonl"
    rows.write_text('{"words": "a"}\n' * 3, encoding="utf-8")
    for dataset, error in ((str(rows), DataFormatError), ("nowhere.jsonl", DataFileNotFoundError)):
        result = submitted(queue, tmp_path, dataset=dataset)
        assert isinstance(result.exception, error)
        assert not QueueMailbox(queue.run).num_pending
        assert not result.stdout


@pytest.mark.parametrize("dataset", ["/only/nodes/see/rows.jsonl", "somebody/rows"])
def test_rows_that_only_nodes_see_are_submitted_with_a_notice(queue: QueueDir, tmp_path: Path, dataset: str) -> None:
    result = submitted(queue, tmp_path, dataset=dataset)
    assert result.stdout == "t was submitted.\n"
    notice = f"t: its rows are checked when it starts, because {dataset} is not a file of this machine."
    assert result.stderr == f"{notice}\n"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["cancel", "t"], "No process works on this queue; the command takes effect with: alto resume"),
        (["drain"], "No process works on this queue.\n"),
        (["drain", "--when-done"], "No process works on this queue.\n"),
    ],
)
def test_a_queue_that_ends_meanwhile_is_not_waited_for(words: list[str], what: str, queue: QueueDir) -> None:
    command, *rest = words
    with worked_on(queue, lambda _: None):
        result = invoke(command, queue.root, *rest)
    assert result.exit_code == 0
    assert result.stdout.startswith(what)


def test_an_answer_that_came_just_before_the_end_is_heard(queue: QueueDir, monkeypatch: pytest.MonkeyPatch) -> None:
    box = QueueMailbox(queue.run)
    looks = iter([True, False])

    def is_locked(run: RunDir) -> bool:
        """Answer at the second look, and end."""
        found = next(looks)
        for command in [] if found else box.pending():
            box.answer(command.id, CommandAnswer(done=True, message="t is cancelled."))
        return found

    monkeypatch.setattr("alto.cli.control._LOOK_S", 0.0)
    monkeypatch.setattr(RunDir, "is_locked", is_locked)
    assert invoke("cancel", queue.root, "t").stdout == "t is cancelled.\n"


def test_pending_commands_are_listed(queue: QueueDir) -> None:
    queue.run.journal_file.write_text('{"seq": 0, "time": 0.0, "event": "queue_completed"}\n', encoding="utf-8")
    assert "commands" not in CliRunner().invoke(app, ["list", str(queue.root)]).stdout
    QueueMailbox(queue.run).submit({})
    listed = CliRunner().invoke(app, ["list", str(queue.root)]).stdout
    assert "commands that wait for the next process: 1; alto resume" in listed
    assert json.loads(CliRunner().invoke(app, ["list", str(queue.root), "--json"]).stdout)["commands"] == 1


def queue_of_two(folder: Path) -> QueueDir:
    entries = [QueueEntry(task=name, num_gpus=1, duration_s=5.0) for name in ("a", "b")]
    queue = QueueDir.create(folder / "runs", entries, [make_task(folder, name=name) for name in ("a", "b")], SETTINGS)
    tasks = [{"task": name, "num_gpus": 1, "duration_s": 5.0} for name in ("a", "b")]
    with Journal(queue.run.journal_file) as journal:
        nodes = [{"name": "n", "gpus": [0]}]
        journal.append(event("queue_started", method="lpt", devices="gpus", nodes=nodes, tasks=tasks))
    return queue


@pytest.mark.parametrize("command", ["list", "show"])
def test_a_task_whose_journal_is_damaged_is_listed_among_the_others(command: str, tmp_path: Path) -> None:
    queue = queue_of_two(tmp_path)
    queue.run_of("a").journal_file.write_text('{"seq": 0, "time": 0.0, "event": "task_started", "task": 7}\n{}\n')
    listed = CliRunner().invoke(app, [command, str(queue.root)])
    assert listed.exit_code == 0
    assert "task a: Expected a journal" in " ".join(listed.stdout.split())
    tasks = json.loads(CliRunner().invoke(app, [command, str(queue.root), "--json"]).stdout)["tasks"]
    assert [(task["task"], bool(task["unreadable"])) for task in tasks] == [("a", True), ("b", False)]


def test_tasks_of_a_finished_queue_are_not_cancelled(tmp_path: Path) -> None:
    queue = queue_of_two(tmp_path)
    with Journal(queue.run.journal_file) as journal:
        journal.append(event("task_given_up", task="a", reason="it failed"))
        journal.append(event("queue_completed"))
    accepted = invoke("cancel", queue.root, "a")
    assert "takes effect with: alto resume" in accepted.stdout, "a new process would retry it"
    with queue.run.locked():
        (command,) = QueueMailbox(queue.run).pending()
        QueueMailbox(queue.run).answer(command.id, CommandAnswer(done=True, message=""))
    with Journal(queue.run.journal_file) as journal:
        journal.append(event("queue_resumed", done=["a"]))
        journal.append(event("queue_completed"))
    refused = invoke("cancel", queue.root, "a")
    assert isinstance(refused.exception, QueueCommandError)
    assert str(refused.exception).startswith("expected a queue that is not finished, found that ")
    assert not QueueMailbox(queue.run).num_pending


def test_a_command_to_a_job_of_a_queue_names_what_to_resume(tmp_path: Path) -> None:
    queue = queue_of_two(tmp_path)
    jobs = [{"job": "job-000", "config": {}, "total_steps": 10, "samples_budgeted": 10}]
    with Journal(queue.run_of("a").journal_file) as journal:
        journal.append(event("task_started", task="a", jobs=jobs))
    result = CliRunner().invoke(app, ["job", "stop", str(queue.run_of("a").root), "job-000"])
    assert result.stdout.strip().endswith(
        f"No process works on this run; the command takes effect with: alto resume {queue.root}"
    )


def test_a_command_to_a_job_is_not_waited_for_where_its_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = queue_of_two(tmp_path).run_of("a")
    jobs = [{"job": "job-000", "config": {}, "total_steps": 10, "samples_budgeted": 10}]
    with Journal(run.journal_file) as journal:
        journal.append(event("task_started", task="a", jobs=jobs))
    looks = iter([True, True, False])
    monkeypatch.setattr("alto.cli.control._LOOK_S", 0.0)
    monkeypatch.setattr(RunDir, "is_locked", lambda _: next(looks))
    result = invoke("job", "stop", run.root, "job-000")
    assert "No process works on this run" in result.stdout
    assert list(looks) == []
