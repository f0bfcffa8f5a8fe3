"""Runs experiments: each in a process of its own, and none twice with the same source, machine and packages."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from alto.errors import RunBusyError
from benchmarks.common import ROOT, Result, publish, write_file
from benchmarks.paper.experiments import EXPERIMENTS, Experiment, load
from benchmarks.parts import origin

__all__ = ["is_done", "nothing_else_in", "run_one", "run_several"]


PATIENCE_S = 10.0
"""Seconds to wait for a measurement that is ending; a killed one needs a moment to free its memory."""


@contextmanager
def nothing_else_in(folder: Path) -> Iterator[None]:
    """Lock ``folder``, because another command, or one that a kill has left running, would share the machine and the
    files.

    Raises:
        RunBusyError: Another process measures into ``folder``.
    """
    file = folder / ".paper" / "lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+", encoding="utf-8") as lock:
        until = time.monotonic() + PATIENCE_S
        while not _is_ours(lock):
            if time.monotonic() > until:
                lock.seek(0)
                raise RunBusyError(
                    f"expected nothing else that measures into {folder}, found process {lock.read()}; wait for it, or "
                    "end it"
                )
            time.sleep(0.1)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def run_one(name: str, scale: str, folder: Path, options: Sequence[str] = ()) -> int:
    """Measure an experiment and write its result to ``folder``.

    Args:
        options: Further options of its program; the measurement then counts as a part of the experiment.

    Returns:
        Exit code: 0 if its gate passed.
    """
    experiment = EXPERIMENTS[name]
    state = _state_file(name, scale, folder)
    state.unlink(missing_ok=True)
    if experiment.program is not None:
        code: int = load(experiment.program)(["--scale", scale, "--out", str(folder), *options])
    else:
        code = _on_recordings(experiment, scale, folder)
    if code == 0 and not options:
        write_file(state, json.dumps(origin(_inputs(name)), indent=1) + "\n")
    return code


def run_several(names: Sequence[str], scale: str, folder: Path, *, again: bool = False) -> int:
    """Measure experiments one after the other, except those that are already done, unless ``again``.

    After a kill, it continues with the experiment that was being measured. If one fails, the others are still measured.

    Returns:
        Exit code: 0 if all gates passed.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console, failed = Console(), list[str]()
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(names))
        for name in names:
            progress.update(bar, description=name)
            if again:
                for part in (folder / ".paper").glob(f"{EXPERIMENTS[name].topic}-{scale}-*.json"):
                    part.unlink()
            if not again and is_done(name, scale, folder):
                console.print(f"{name}: measured before; --again measures it anew")
            else:
                began = time.monotonic()
                log = folder / ".paper" / f"{name}-{scale}.log"
                if _in_process(name, scale, folder, log) == 0:
                    console.print(f"{name}: {time.monotonic() - began:.0f} s")
                else:
                    failed.append(name)
                    console.print(f"{name}: failed, see {log}")
            progress.advance(bar)
    return 1 if failed else 0


def is_done(name: str, scale: str, folder: Path) -> bool:
    """Return whether its result exists for this source, machine, set of packages and these recordings."""
    try:
        found = json.loads(_state_file(name, scale, folder).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return bool(found == origin(_inputs(name))) and (folder / f"{EXPERIMENTS[name].topic}-{scale}.json").exists()


def _is_ours(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _on_recordings(experiment: Experiment, scale: str, folder: Path) -> int:
    from benchmarks.paper import curves
    from benchmarks.paper.recordings import read_recordings

    assert experiment.recorded is not None
    recordings = read_recordings(scale)
    failures = curves.gate(recordings)
    found = curves.Found(figures={}, rows=[]) if failures else load(experiment.recorded)(recordings)
    result = Result.of(
        benchmark=experiment.topic,
        scale=scale,
        gate_failures=failures,
        figures=found.figures,
        goals=experiment.goals if scale == "cpu" else {},
        rows=found.rows,
        notes=found.notes,
    )
    return publish(result, folder)


def _in_process(name: str, scale: str, folder: Path, log: Path) -> int:
    log.parent.mkdir(parents=True, exist_ok=True)
    command: Sequence[str] = (
        sys.executable, "-m", "benchmarks.paper", name, "--scale", scale, "--out", str(folder.resolve())
    )  # fmt: skip
    with log.open("w", encoding="utf-8") as file:
        return subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False).returncode


def _inputs(name: str) -> tuple[Path, ...]:
    if EXPERIMENTS[name].recorded is None:
        return ()
    from benchmarks.paper.recordings import RECORDINGS

    return (RECORDINGS,)


def _state_file(name: str, scale: str, folder: Path) -> Path:
    return folder / ".paper" / f"{name}-{scale}.json"
