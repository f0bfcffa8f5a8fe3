"""Ctrl-C: its messages, their times, and the resumption of the run."""

from __future__ import annotations

import hashlib
import os
import pty
import re
import select
import shlex
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import run_code
from journals import event
from tiny import make_task, read_journal, save_model

from alto.cli.output import Interrupt, catching_signals
from alto.runs import JournalEntry

FIRST = "Stopping after this step; the run can be resumed. Press Ctrl-C again to stop at once."
SECOND = "Stopping at once; what the run trained since its last checkpoint will be trained again."


@pytest.fixture(autouse=True)
def sigint_enabled() -> Iterator[None]:
    """Make SIGINT work, which is ignored where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_oneself() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def wait_for(announced: list[str], count: int) -> list[str]:
    deadline = time.monotonic() + 10
    while len(announced) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return announced


def entry(name: str, **facts: object) -> JournalEntry:
    return JournalEntry(seq=0, time=0.0, event=event(name, **facts))


def test_the_first_stops_cleanly_and_the_second_at_once_and_both_are_explained() -> None:
    announced: list[str] = []
    with catching_signals() as interrupt:
        interrupt.announce = announced.append
        assert not interrupt.requested()
        interrupt_oneself()
        assert interrupt.requested()
        assert wait_for(announced, 1) == [FIRST]
        with pytest.raises(KeyboardInterrupt):
            interrupt_oneself()
        assert wait_for(announced, 2) == [FIRST, SECOND]
    assert interrupt.exit_code == 130


@pytest.mark.parametrize("has_ended", [True, False])
def test_where_nothing_can_stop_cleanly_the_first_stops_at_once(has_ended: bool) -> None:
    announced: list[str] = []
    with catching_signals() as interrupt:
        interrupt.announce = announced.append
        if has_ended:
            interrupt.requested()
            interrupt.observe(entry("task_interrupted"))
        with pytest.raises(KeyboardInterrupt):
            interrupt_oneself()
        assert wait_for(announced, 1) == ["Stopping at once."]


def test_a_queue_that_is_being_measured_is_not_promised_to_be_resumed() -> None:
    announced: list[str] = []
    with catching_signals("queue") as interrupt:
        interrupt.announce = announced.append
        interrupt.requested()
        interrupt_oneself()
        assert "nothing was trained yet" in wait_for(announced, 1)[0]
    with catching_signals("queue") as interrupt:
        interrupt.announce = announced.append
        interrupt.requested()
        interrupt.observe(entry("queue_started", nodes=[], tasks=[]))
        interrupt_oneself()
        assert "the queue can be resumed" in wait_for(announced, 2)[1]


def test_a_signal_is_answered_while_the_main_thread_is_inside_one_long_call() -> None:
    """Like a long call of torch, this one runs no Python code, so Python's signal handler waits for its end."""
    announced_at: list[float] = []
    with catching_signals() as interrupt:
        interrupt.announce = lambda text: announced_at.append(time.monotonic())
        interrupt.requested()
        begun_at = time.monotonic()
        threading.Timer(0.1, interrupt_oneself).start()
        hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 4_000_000)
        returned_at = time.monotonic()
        wait_for(announced_at, 1)  # type: ignore[arg-type]
    assert announced_at[0] - begun_at < (returned_at - begun_at) / 2


def test_handlers_are_those_of_before_afterwards() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    num_threads = threading.active_count()
    with catching_signals():
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    assert before == {number: signal.getsignal(number) for number in before}
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == num_threads


def test_what_was_not_begun_cannot_be_resumed() -> None:
    stop = KeyboardInterrupt()
    assert Interrupt().how_to_continue(stop, None) == "the run had not begun, so there is nothing to resume"
    assert Interrupt().how_to_continue(stop, Path("my runs/a")) == "continue with: alto resume 'my runs/a'"
    stop.add_note("continue with: alto resume /runs/b")
    assert Interrupt("queue").how_to_continue(stop, None) == "continue with: alto resume /runs/b"


@pytest.fixture(scope="module")
def task_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task that trains for minutes, in a folder whose name has a space."""
    folder = tmp_path_factory.mktemp("my folder") / "my runs"
    folder.mkdir()
    model = save_model(folder / "tiny")
    search_space = {"lr": [1e-3, 3e-3], "r": [2, 4]}
    task = make_task(folder, model=str(model), max_steps=100_000, search_space=search_space, early_exit=False)
    path = folder / "task.yaml"
    path.write_text(task.to_yaml(), encoding="utf-8")
    return path


def test_ctrl_c_in_a_terminal_is_answered_in_the_table_and_says_how_to_resume(task_file: Path) -> None:
    runs = task_file.parent / "runs"
    pid, terminal = pty.fork()
    if pid == 0:
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        command = [sys.executable, "-m", "alto", "tune", str(task_file), "-o", str(runs)]
        os.execve(sys.executable, command, environment)
    output = ""

    def read_until(pattern: str, timeout_s: float) -> None:
        nonlocal output
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, output) and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    output += os.read(terminal, 65536).decode(errors="replace")
                except OSError:  # the other side has closed
                    return

    try:
        read_until("training", 120)
        os.write(terminal, b"\x03")
        output = ""
        read_until("TaskInterruptedError.*alto resume [^\r\n]*[\r\n]", 60)
    finally:
        if not output:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130
    assert FIRST[:79] in output  # wrapped at the width of the terminal
    drawn_with_it = output[output.index(FIRST[:20]) :]
    assert "job-003" in drawn_with_it, "the table is still there"
    assert "\x1b[?25h" in drawn_with_it, "the cursor is shown again"
    (root,) = runs.iterdir()
    (command,) = set(re.findall(r"continue with: (alto resume [^\r\n]*)", output))
    assert shlex.split(command) == ["alto", "resume", str(root)]
    assert read_journal(root)[-1]["event"] == "task_interrupted"


def test_a_second_signal_stops_at_once_and_names_the_run_to_resume(task_file: Path, tmp_path: Path) -> None:
    code = f"""
        import os, signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from alto.runs import journal
        from alto.runs.events import JobEvaluated
        append = journal.Journal.append
        def watched(self, event):
            entry = append(self, event)
            if isinstance(event, JobEvaluated):
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
            return entry
        journal.Journal.append = watched
        sys.argv = ["alto", "tune", {str(task_file)!r}, "-o", {str(tmp_path / "my runs")!r}, "--set", "max_steps=40"]
        from alto.cli import main
        main()
    """
    done = run_code(textwrap.dedent(code))
    assert done.returncode == 130, done.stderr
    (root,) = (tmp_path / "my runs").iterdir()
    assert f"\nStopped at once; continue with: alto resume '{root}'\n" in f"\n{done.stderr}"
    assert "Traceback" not in done.stderr
    assert read_journal(root)[-1]["event"] != "task_interrupted"
