"""Processes that begin with all imports done: they are forked from a server of this session, which imports once.

A new Python that imports torch and transformers takes seconds of a core. A test that is not about this start uses these
processes instead of ``subprocess``.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path

__all__ = ["forks", "run_code"]

_IMPORTED = ["torch.distributed", "transformers", "peft", "alto.cli.app", "alto.cluster.worker", "alto.engine.work"]


def forks() -> ForkServerContext:
    """Return the context of these processes; functions that they run must be importable."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in _IMPORTED if name.partition(".")[0] in sys.modules])
    return context


def run_code(
    code: str, *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run like ``subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)``, with imports done.

    Functions that are registered with ``atexit`` are not called.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = forks().Process(target=_run, args=(code, folder, str(cwd or Path.cwd()), dict(env or os.environ)))
        process.start()
        process.join()
        printed = [Path(folder, name).read_text(encoding="utf-8") for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess([sys.executable, "-c", code], process.exitcode or 0, *printed)


def _run(code: str, folder: str, cwd: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        file = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, stream.fileno())
        os.close(file)
    os.chdir(cwd)
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
