"""The process that forks executors: the environment of its children, how their ends are reported, and its own death."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alto.cluster.processes import HELD_SIGNALS
from alto.cluster.zygote import ForkedProcess, Zygote

LIMIT_S = 300.0
"""A limit for what must not hang."""


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


def until(condition: Callable[[], object], zygote: Zygote) -> None:
    gives_up_at = time.monotonic() + LIMIT_S
    while not condition():
        zygote.poll()
        assert time.monotonic() < gives_up_at
        time.sleep(0.01)


def fork(zygote: Zygote, action: str, file: Path, *args: str, **variables: str) -> ForkedProcess:
    return zygote.fork("forked_mains", [action, str(file), *args], {**os.environ, **variables})


def server_of(zygote: Zygote) -> subprocess.Popen[bytes]:
    assert zygote._server is not None
    return zygote._server.process


def test_a_child_is_as_if_it_had_been_started(zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEFT_OUT", "1")
    file = tmp_path / "facts.json"
    variables = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": ""}
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        forked = zygote.fork(
            "forked_mains", ["report", str(file), "more", "words"], variables, uses=["alto.engine.work"]
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    until(lambda: forked.has_exited, zygote)
    assert forked.exit_code == 7
    facts = json.loads(file.read_text(encoding="utf-8"))
    parent = server_of(zygote).pid
    assert facts == {
        "argv": ["more", "words", "--parent", str(parent)],
        "cwd": str(tmp_path),
        "environment": variables | {"LC_CTYPE": "C.UTF-8"} if "LC_CTYPE" in facts["environment"] else variables,
        "parent": parent,
        "leads": True,
        "held": sorted(HELD_SIGNALS),
        "files": 200,
        "threads": 3,
        "imported": ["torch", "transformers"],
        "cuda": False,
    }
    zygote.reap(forked)
    assert len(list(Path(f"/proc/{parent}/task").iterdir())) == 1


def test_signals_errors_and_missing_modules_are_ends(zygote: Zygote, tmp_path: Path) -> None:
    waits = fork(zygote, "wait", tmp_path / "waits")
    raises = fork(zygote, "raise", tmp_path / "raises")
    missing = zygote.fork("alto.no_such_module", [], os.environ, uses=["alto.no_such_module"])
    until(lambda: (tmp_path / "waits").exists() and raises.has_exited and missing.has_exited, zygote)
    assert (raises.exit_code, missing.exit_code, waits.has_exited) == (1, 1, False)
    assert waits.pid is not None
    os.kill(waits.pid, signal.SIGKILL)
    until(lambda: waits.has_exited, zygote)
    assert waits.exit_code == -signal.SIGKILL


def test_a_process_keeps_its_number_until_it_is_reaped(zygote: Zygote, tmp_path: Path) -> None:
    forked = fork(zygote, "raise", tmp_path / "raises")
    until(lambda: forked.has_exited, zygote)
    stat = Path(f"/proc/{forked.pid}/stat")
    assert stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    zygote.reap(forked)
    until(lambda: not stat.exists(), zygote)


def test_where_the_zygote_dies_what_it_forked_is_still_watched_and_the_next_one_forks(tmp_path: Path) -> None:
    zygote = Zygote()
    try:
        orphan = fork(zygote, "wait", tmp_path / "orphan")
        until((tmp_path / "orphan").exists, zygote)
        server_of(zygote).kill()
        until(lambda: zygote._server is None, zygote)
        assert not orphan.has_exited
        again = fork(zygote, "report", tmp_path / "again")
        until(lambda: again.has_exited, zygote)
        assert again.exit_code == 7
        assert json.loads((tmp_path / "again").read_text(encoding="utf-8"))["imported"] == []
        assert orphan.pid is not None
        os.kill(orphan.pid, signal.SIGKILL)
        until(lambda: orphan.has_exited, zygote)
        assert orphan.exit_code is None
    finally:
        zygote.close()


def test_a_fork_that_the_zygote_did_not_live_to_do_says_so(tmp_path: Path) -> None:
    zygote = Zygote()
    forked = fork(zygote, "report", tmp_path / "never")
    server_of(zygote).kill()
    until(lambda: forked.has_exited, zygote)
    assert forked.pid is None
    assert forked.reason.startswith("the process that starts executors has died")
    zygote.close()


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import os, sys; from alto.cluster.zygote import Zygote; zygote = Zygote.shared()\n"
        "forked = zygote.fork('forked_mains', ['wait', sys.argv[1]], dict(os.environ))\n"
        "while forked.pid is None: zygote.poll()\n"
        "print(zygote._server.process.pid, forked.pid, flush=True)\n"
        "os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "child")], capture_output=True, check=True)
    server, child = map(int, done.stdout.split())
    gives_up_at = time.monotonic() + LIMIT_S
    while Path(f"/proc/{server}").exists():
        assert time.monotonic() < gives_up_at
        time.sleep(0.01)
    assert Path(f"/proc/{child}").exists()  # a worker notices that its parent has gone; this one does not look
    os.kill(child, signal.SIGKILL)


def test_one_is_shared_as_long_as_imports_would_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Zygote, "_shared", None)
    first = Zygote.shared()
    monkeypatch.setenv("ALTO_CACHE", "elsewhere")
    assert Zygote.shared() is first
    monkeypatch.setenv("HF_HOME", "elsewhere")
    assert Zygote.shared() is not first
