"""What executors do in the tests of clusters, instead of training: functions as ``alto.engine.work:train``.

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
from alto.cluster import HostedRun
from alto.errors import TaskInterruptedError
from alto.runs import Journal, RunDir, cut_journal, read_entries, read_events
from alto.runs.events import decode

IsInterrupted = Callable[[], bool]

SLEEPER = (sys.executable, "-c", "import time\nwhile True: time.sleep(1)")


_is_locked = RunDir.is_locked


def _is_locked_aloud(run: RunDir) -> bool:
    """Asked by an executor before it begins: leaves a file where another process holds the run, and it has to wait."""
    if is_locked := _is_locked(run):
        (run.root / "found-locked").touch()
    return is_locked


RunDir.is_locked = _is_locked_aloud  # type: ignore[method-assign]


def tell(run_dir: str, event: str, **facts: Any) -> None:
    path = RunDir(Path(run_dir)).journal_file
    past = read_entries(path) if path.exists() else ()
    with Journal(path, past=past) as journal:
        journal.append(decode({"time": 0.0, "event": event, **facts}).event)


def works(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Tells two lines and ends well."""
    tell(run_dir, "began", pid=os.getpid())
    assert not is_interrupted()
    tell(run_dir, "done")


def waits(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Works until it is asked to stop, and saves then."""
    is_interrupted()  # from now on it is asked, and not stopped where it is
    tell(run_dir, "began", pid=os.getpid())
    while not is_interrupted():
        time.sleep(0.01)
    tell(run_dir, "checkpoint", jobs={})
    raise TaskInterruptedError("stopped on request, with everything on disk")


def loads(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Reads a model for ever; never asks whether to stop."""
    tell(run_dir, "loading", pid=os.getpid())
    while True:
        time.sleep(1)


def hangs(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Asks once, then never again, though its interpreter lives."""
    is_interrupted()
    loads(run_dir, is_interrupted)


def fails(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """With the error named in the run's folder."""
    name = (Path(run_dir) / "error").read_text(encoding="utf-8")
    raise getattr(errors, name, RuntimeError)("as the test wants it")


def exits(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Without a word."""
    os._exit(7)


def has_children(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Starts two processes, one in a process group of its own, and waits."""
    children = [subprocess.Popen(SLEEPER), subprocess.Popen(SLEEPER, process_group=0)]
    tell(run_dir, "children", pids=[child.pid for child in children])
    waits(run_dir, is_interrupted)


def leaves_children(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Starts them and ends well."""
    children = [subprocess.Popen(SLEEPER), subprocess.Popen(SLEEPER, process_group=0)]
    tell(run_dir, "children", pids=[child.pid for child in children])


def tells_variables(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Tells what its environment says."""
    names = (
        "RANK",
        "WORLD_SIZE",
        "ALTO_RENDEZVOUS",
        "ALTO_TRUST_REMOTE_CODE",
        "ALTO_MEMORY_SHARE",
        "CUDA_VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
    )
    tell(run_dir, "environment", **{name: os.environ.get(name) for name in names})


def tells_devices(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Tells what PyTorch makes of it."""
    import torch

    tell(run_dir, "devices", threads=torch.get_num_threads(), gpus=torch.cuda.device_count())


def ranks_take_turns(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Each rank waits for the others before its next turn, however long; the first tells who they are."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = Path(run_dir) / "turns"
    folder.mkdir(exist_ok=True)

    def said(name: object) -> list[int]:
        path = folder / str(name)
        return [int(word) for word in path.read_text("utf-8").split()] if path.exists() else []

    for turn in itertools.count():
        if rank == 0 and is_interrupted() and not said("stop"):
            replace_file(folder / "stop", str(turn))
        replace_file(folder / str(rank), f"{turn} {os.getpid()}")
        while any(not said(other) or said(other)[0] < turn for other in range(size)):
            time.sleep(0.01)
        if turn == 0 and rank == 0:
            tell(run_dir, "began", pids=[said(other)[1] for other in range(size)])
        if said("stop") and said("stop")[0] <= turn:
            raise TaskInterruptedError("stopped on request, with everything on disk")


def last_rank_fails(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """With the error named in the run's folder; the others by its being gone."""
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        fails(run_dir, is_interrupted)
    time.sleep(0.5)
    raise RuntimeError("Connection closed by peer")


def prints_and_dies(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """On both streams; without closing them."""
    print("to stdout")
    print("to stderr", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGKILL)


def tears_a_line(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Writes half a line, waits until it is told to go on, and writes the rest."""
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


def goes_back(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Cuts the journal back to its first two lines, as a run that is resumed does, and tells two others."""
    cut_journal(RunDir(Path(run_dir)).journal_file, 2)
    tell(run_dir, "task_resumed")
    tell(run_dir, "step", step=2)


def counts(run_dir: str, is_interrupted: IsInterrupted) -> None:
    """Three steps an attempt; then the first waits, and once it is asked to stop saves until the test lets it go on."""
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


def fills_the_disk(run_dir: str, is_interrupted: IsInterrupted) -> str:
    """Ends as the run's folder says, on a disk that takes nothing more: not even how it ended."""
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
    """A host. Each of its runs tells when it begins, which others there are, and ends when its folder has a file
    ``end``, by an error where that names one."""

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

    def turn(self) -> dict[int, str | BaseException]:
        time.sleep(0.01)
        ended: dict[int, str | BaseException] = {}
        for number, run in list(self.runs.items()):
            end = Path(run.ticket.run_dir) / "end"
            if run.is_interrupted():
                ended[number] = TaskInterruptedError("stopped on request, with everything on disk")
            elif end.exists():
                error = end.read_text(encoding="utf-8")
                ended[number] = getattr(errors, error, RuntimeError)("as the test wants it") if error else "well done"
            if number in ended:
                del self.runs[number]
                self.is_usable = self.is_usable and "RuntimeError" not in repr(ended[number])
        return ended
