"""Hosts of the executors in the tests of clusters; they do other things instead of training.

Only executors import this file.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alto import errors
from alto.base import replace_file
from alto.cluster import HostedRun, RunEnd
from alto.errors import TaskInterruptedError
from alto.runs import Journal, RunDir, cut_journal, read_entries, read_events
from alto.runs.events import decode

IsInterrupted = Callable[[], bool]

SLEEPER = (sys.executable, "-c", "import time\nwhile True: time.sleep(1)")


_is_locked = RunDir.is_locked


def _is_locked_aloud(run: RunDir) -> bool:
    """Return whether another process holds the run; if so, leave a file that shows that this executor has to wait. An
    executor calls this before it begins."""
    if is_locked := _is_locked(run):
        (run.root / "found-locked").touch()
    return is_locked


RunDir.is_locked = _is_locked_aloud  # type: ignore[method-assign]


class Alone:
    """A host that does all of its ``work`` when a run is attached to it, and is then used up."""

    is_usable = False
    work: Callable[[str, IsInterrupted], str | None]

    def __init__(self) -> None:
        self._ended: dict[int, RunEnd] = {}

    def attach(self, run: HostedRun) -> None:
        notice = self.work(run.ticket.run_dir, run.is_interrupted)
        self._ended[run.number] = RunEnd(notices=(notice,) if notice else ())

    def turn(self) -> dict[int, RunEnd]:
        ended, self._ended = self._ended, {}
        return ended


def alone(work: Callable[[str, IsInterrupted], str | None]) -> type[Alone]:
    return type(work.__name__, (Alone,), {"work": staticmethod(work)})


def tell(run_dir: str, event: str, **facts: Any) -> None:
    path = RunDir(Path(run_dir)).journal_file
    past = read_entries(path) if path.exists() else ()
    with Journal(path, past=past) as journal:
        journal.append(decode({"time": 0.0, "event": event, **facts}).event)


@alone
def works(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Write two lines and finish."""
    tell(run_dir, "began", pid=os.getpid())
    assert not is_interrupted()
    tell(run_dir, "done")


@alone
def waits(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Work until asked to stop, and then save."""
    is_interrupted()  # from now on it is asked to stop, instead of being stopped
    tell(run_dir, "began", pid=os.getpid())
    while not is_interrupted():
        time.sleep(0.01)
    tell(run_dir, "checkpoint", jobs={})
    raise TaskInterruptedError("stopped on request, with everything on disk")


@alone
def loads(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Read a model forever, and never ask whether to stop."""
    tell(run_dir, "loading", pid=os.getpid())
    while True:
        time.sleep(1)


@alone
def hangs(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Ask once and then never again, although the interpreter lives."""
    is_interrupted()
    loads.work(run_dir, is_interrupted)


@alone
def fails(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Raise the error that a file in the run's folder names."""
    name = (Path(run_dir) / "error").read_text(encoding="utf-8")
    raise getattr(errors, name, RuntimeError)("as the test wants it")


@alone
def exits(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """End the process without any message."""
    os._exit(7)


@alone
def has_children(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Start two processes, one of them in a process group of its own, and wait."""
    children = [subprocess.Popen(SLEEPER), subprocess.Popen(SLEEPER, process_group=0)]
    tell(run_dir, "children", pids=[child.pid for child in children])
    waits.work(run_dir, is_interrupted)


@alone
def leaves_children(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Start two processes and finish."""
    children = [subprocess.Popen(SLEEPER), subprocess.Popen(SLEEPER, process_group=0)]
    tell(run_dir, "children", pids=[child.pid for child in children])


@alone
def tells_variables(run_dir: str, is_interrupted: IsInterrupted) -> None:
    names = (
        "RANK",
        "WORLD_SIZE",
        "ALTO_RENDEZVOUS",
        "ALTO_MEMORY_SHARE",
        "CUDA_VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
    )
    tell(run_dir, "environment", **{name: os.environ.get(name) for name in names})


class TellsTicket:
    """A host whose ranks write files with parts of their tickets into the run's folder, and end once all are there."""

    is_usable = False

    def attach(self, run: HostedRun) -> None:
        self._ended = {run.number: RunEnd()}
        self._files = [Path(run.ticket.run_dir) / f"ticket-{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
        facts = (run.ticket.trust_remote_code, run.ticket.tenant, run.ticket.priority)
        replace_file(self._files[int(os.environ["RANK"])], json.dumps(facts))

    def turn(self) -> dict[int, RunEnd]:
        if all(file.exists() for file in self._files):  # the other ranks are killed when the first has ended
            return self._ended
        time.sleep(0.01)
        return {}


@alone
def tells_devices(run_dir: str, is_interrupted: IsInterrupted) -> None:
    import torch

    tell(run_dir, "devices", threads=torch.get_num_threads(), gpus=torch.cuda.device_count())


@alone
def ranks_take_turns(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Let each rank wait for the others before its next turn, however long; the first rank writes who they are."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = Path(run_dir) / "turns"
    folder.mkdir(exist_ok=True)

    def numbers_in(name: object) -> list[int]:
        path = folder / str(name)
        return [int(word) for word in path.read_text("utf-8").split()] if path.exists() else []

    for turn in itertools.count():
        if rank == 0 and is_interrupted() and not numbers_in("stop"):
            replace_file(folder / "stop", str(turn))
        replace_file(folder / str(rank), f"{turn} {os.getpid()}")
        while any(not numbers_in(other) or numbers_in(other)[0] < turn for other in range(size)):
            time.sleep(0.01)
        if turn == 0 and rank == 0:
            tell(run_dir, "began", pids=[numbers_in(other)[1] for other in range(size)])
        if numbers_in("stop") and numbers_in("stop")[0] <= turn:
            raise TaskInterruptedError("stopped on request, with everything on disk")


@alone
def last_rank_fails(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Let the last rank raise the error that a file in the run's folder names; the others fail because it is gone."""
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        fails.work(run_dir, is_interrupted)
    time.sleep(0.5)
    raise RuntimeError("Connection closed by peer")


@alone
def prints_and_dies(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Print on both streams and die without closing them."""
    print("to stdout")
    print("to stderr", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGKILL)


@alone
def tears_a_line(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Write half a line, wait for the test, and write the rest."""
    tell(run_dir, "began")
    line = json.dumps({"seq": 1, "time": 0.0, "event": "step"}) + "\n"
    with RunDir(Path(run_dir)).journal_file.open("a", encoding="utf-8", buffering=1) as file:
        file.write(line[:12])
        file.flush()
        (Path(run_dir) / "torn").touch()
        while not (Path(run_dir) / "go").exists():
            is_interrupted()
            time.sleep(0.01)
        file.write(line[12:])


@alone
def goes_back(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Cut the journal back to its first two lines, as a resumed run does, and write two others."""
    cut_journal(RunDir(Path(run_dir)).journal_file, 2)
    tell(run_dir, "task_resumed")
    tell(run_dir, "step", step=2)


@alone
def counts(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Take three steps per attempt. The first attempt then waits; once it is asked to stop, it saves until the test
    lets it continue."""
    run = RunDir(Path(run_dir))
    with run.locked():
        first = len([event for event in read_events(run.journal_file) if event["event"] == "step"])
        for step in range(first, first + 3):
            tell(run_dir, "step", step=step)
        if first == 0:
            tell(run_dir, "waits", pid=os.getpid())
            while not is_interrupted():
                time.sleep(0.01)
            while not (Path(run_dir) / "go").exists():
                time.sleep(0.01)
            tell(run_dir, "checkpoint", jobs={})
            raise TaskInterruptedError("stopped on request")


@alone
def fills_the_disk(run_dir: str, is_interrupted: IsInterrupted) -> str:
    """End as a file in the run's folder says, on a full disk, on which not even the end can be recorded."""
    tell(run_dir, "began", pid=os.getpid())
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    how = (Path(run_dir) / "how").read_text(encoding="utf-8")
    if how == "write":
        with (Path(run_dir) / "weights").open("wb") as file:
            file.write(b"1")
    elif how != "return":
        raise getattr(errors, how)("as the test wants it")
    return "There is no report."


class Together:
    """A host. Each of its runs writes when it begins and which others there are, and ends when its folder has a file
    ``end``; if this file names an error, with that error."""

    def __init__(self) -> None:
        self.is_usable = True
        self.runs: dict[int, HostedRun] = {}

    def attach(self, run: HostedRun) -> None:
        if (Path(run.ticket.run_dir) / "refused").exists():
            raise errors.SpecError("refused before it began")
        if (Path(run.ticket.run_dir) / "slow").exists():
            (Path(run.ticket.run_dir) / "attaching").touch()
            while not (Path(run.ticket.run_dir) / "go").exists():
                time.sleep(0.01)
        self.runs[run.number] = run
        print(f"{Path(run.ticket.run_dir).name} is attached")
        tell(run.ticket.run_dir, "began", pid=os.getpid(), tenant=run.ticket.tenant, num_runs=len(self.runs))

    def turn(self) -> dict[int, RunEnd]:
        time.sleep(0.01)
        ended: dict[int, RunEnd] = {}
        for number, run in list(self.runs.items()):
            end = Path(run.ticket.run_dir) / "end"
            if run.is_interrupted():
                ended[number] = RunEnd(error=TaskInterruptedError("stopped on request, with everything on disk"))
            elif end.exists():
                name = end.read_text(encoding="utf-8")
                error = getattr(errors, name, RuntimeError)("as the test wants it") if name else None
                ended[number] = RunEnd(error=error, notices=() if error else ("well", "done"))
            if number in ended:
                del self.runs[number]
                self.is_usable = self.is_usable and "RuntimeError" not in repr(ended[number])
        return ended
