"""The time of a test session: the order in which workers run the tests, and the CPU time of files."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from budgets import reason_to_skip, slowest_first
from durations import cpu_s, over_budget, read_durations

ROOT = Path(__file__).parents[2]


class Item:
    """The part of a test that :func:`slowest_first` reads."""

    def __init__(self, file: str, number: int, *, is_slow: bool = False) -> None:
        self.nodeid = f"{file}::test_{number}"
        self.is_slow = is_slow

    def get_closest_marker(self, name: str) -> Any:
        return True if name == "slow" and self.is_slow else None


@pytest.mark.parametrize("num_workers", [2, 3, 5])
@pytest.mark.parametrize("is_known", [False, True])
def test_every_worker_begins_with_slow_files_and_files_stay_together(num_workers: int, is_known: bool) -> None:
    items = [Item(f"light-{file}", number) for file in range(20) for number in range(10)]
    items[100:100] = [
        Item(f"slow-{file}", number, is_slow=number == 1 and not is_known) for file in range(5) for number in range(3)
    ]
    durations = {f"slow-{file}": 30.0 + file for file in range(5)} | {"light-3": 2.0} if is_known else None
    found = slowest_first(items, num_workers, durations)  # type: ignore[arg-type]
    assert sorted(map(id, found)) == sorted(map(id, items))
    starts = [worker * len(items) // num_workers for worker in range(num_workers)]
    assert all(found[start].nodeid.startswith("slow") for start in starts)
    if is_known:
        assert [found[start].nodeid for start in starts] == [f"slow-{4 - n}::test_0" for n in range(num_workers)]
    files = [item.nodeid.partition("::")[0] for item in found]
    changes = sum(one != other for one, other in itertools.pairwise(files))
    assert changes <= 25 + num_workers, "a file is split at most between two workers"


class Marked:
    """A test that is marked ``slow``."""

    nodeid = "file::test"

    def __init__(self, *kinds: str) -> None:
        self.marks = [pytest.mark.slow(kind).mark for kind in kinds]

    def iter_markers(self, name: str) -> Any:
        return self.marks if name == "slow" else []

    def get_closest_marker(self, name: str) -> None:
        assert name == "gpu"


@pytest.mark.parametrize(
    ("kinds", "runs_in"),
    [((), "test test-all nightly"), (("models",), "test-all nightly"), (("models", "minutes"), "nightly")],
)
def test_every_kind_runs_in_its_sessions(kinds: tuple[str, ...], runs_in: str) -> None:
    sessions = {"test": (False, False), "test-all": (True, False), "nightly": (True, True)}
    for session, (runs_all, is_nightly) in sessions.items():
        reason = reason_to_skip(Marked(*kinds), runs_all=runs_all, is_nightly=is_nightly)  # type: ignore[arg-type]
        assert (reason == "") == (session in runs_in.split())
    with pytest.raises(pytest.UsageError, match=r"found slow\('unknown',\); name the kind"):
        reason_to_skip(Marked("unknown"), runs_all=True, is_nightly=True)  # type: ignore[arg-type]


def test_a_file_may_take_three_times_its_budget() -> None:
    found = {"new.py": 120.0, "slow.py": 299.0, "fast.py": 119.0}
    assert over_budget(found, {"slow.py": 100.0, "fast.py": 1.0}) == []
    (problem,) = over_budget(found | {"slow.py": 301.0}, {"slow.py": 100.0})
    assert problem.startswith("slow.py: expected at most 300 s of CPU time, three times its budget, found 301.0 s; ")
    (problem,) = over_budget(found | {"fast.py": 121.0}, {"slow.py": 100.0, "fast.py": 1.0})
    assert problem.startswith("fast.py: expected at most 120 s")


def test_children_count_although_a_thread_ends_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    burn = "import sys, time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        own, found = sum(os.times()[:4]), os.listdir
        monkeypatch.setattr(os, "listdir", lambda path: ["999999999", *found(path)])
        assert cpu_s() - own > 0.4
        child.communicate()


def test_a_test_may_replace_the_process_id(monkeypatch: pytest.MonkeyPatch) -> None:
    own, parent = cpu_s(), os.getppid()
    monkeypatch.setattr(os, "getpid", lambda: parent)
    assert own <= cpu_s() < own + 1
    monkeypatch.setattr(os, "getpid", lambda: 999_999_999)
    assert own <= cpu_s() < own + 1


CONFTEST = """
from pathlib import Path

from durations import Durations

def pytest_addoption(parser):
    parser.addoption("--writes", action="store_true")

def pytest_configure(config):
    here, writes = Path(__file__).parent, config.option.writes
    config.pluginmanager.register(
        Durations(checks=not writes, writes=writes, file=here / "durations.json", root=here, floor_s=0.1)
    )
"""
BUSY = """
import subprocess
import sys
import time

import forks
import pytest

BURN = "import time\\nwhile time.process_time() < 0.5: pass"

@pytest.fixture(scope="module")
def made():
    subprocess.run([sys.executable, "-c", BURN], check=True)

@pytest.mark.parametrize("number", range(2))
def test_it(made, number):
    time.sleep(0.1)

def test_forks():
    forks.run_code("import time\\nstart = time.process_time()\\nwhile time.process_time() < start + 0.5: pass")
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist", "loadfile")], ids=["alone", "workers"])
def test_cpu_time_of_all_processes_of_a_file_is_written_and_held_against_it(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_busy.py").write_text(BUSY)
    (tmp_path / "test_idle.py").write_text("import time\n\ndef test_it():\n    time.sleep(0.5)\n")
    table = tmp_path / "durations.json"
    table.write_text('{"test_gone.py": 3.0}')

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, *options, "."]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
        )

    written = run("--writes")
    assert written.returncode == 0, written.stdout
    found = read_durations(table)
    assert found.keys() == {"test_busy.py", "test_idle.py"}, "the entry of a deleted file is removed"
    assert found["test_busy.py"] >= 1.0, "half a second in a child, and half in a fork"
    assert found["test_idle.py"] < 0.4, "sleeping takes no CPU time"
    assert run().returncode == 0
    table.write_text(json.dumps({"test_busy.py": 0.2, "test_idle.py": 0.2}))
    failed = run()
    assert failed.returncode == 1, failed.stdout
    assert "test_busy.py: expected at most 0.6 s of CPU time" in failed.stdout
    assert "test_idle.py: expected" not in failed.stdout
