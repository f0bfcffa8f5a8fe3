"""CPU seconds of every file of tests: measured, written to ``tests/durations.json``, and compared with it.

They are the CPU time of a test's process and of its descendants, which a busy machine does not change. So no test fails
for being run beside others. A process that a file leaves to the next one counts there only for what it does there.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path

import pytest

__all__ = ["DURATIONS", "FLOOR_S", "Durations", "cpu_s", "over_budget", "read_durations"]

DURATIONS = Path(__file__).parents[1] / "durations.json"
"""The table: CPU seconds by file, of a run with ``--all``."""

FLOOR_S = 40.0
"""Budget of the files that take less, and of new ones."""

_FACTOR = 3
_PROPERTY = "cpu_s"


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its descendants, dead or alive.

    Descendants that left the tree, because the process that started them is dead, do not count. So the result may fall.
    """
    # "self", because a test may replace os.getpid. Twice, because Linux may leave out a child where another ends while
    # they are listed.
    return max(_ticks("self") for _ in range(2)) / os.sysconf("SC_CLK_TCK")


def _ticks(pid: str) -> int:
    found = 0
    with contextlib.suppress(OSError):  # the process has ended meanwhile
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        found = sum(map(int, fields[11:15]))  # its own and those of children it has waited for, user and system
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread has; others may have children
                children = Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="utf-8").split()
                found += sum(map(_ticks, children))
    return found


def read_durations(file: Path = DURATIONS) -> dict[str, float]:
    """Return the table; empty if there is none."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def over_budget(found: Mapping[str, float], expected: Mapping[str, float], floor_s: float = FLOOR_S) -> list[str]:
    """Return a line for each file that took more than three times its budget."""
    budgets = {file: max(expected.get(file, 0.0), floor_s) for file in found}
    return [
        f"{file}: expected at most {_FACTOR * budgets[file]:g} s of CPU time, three times its budget, found "
        f"{seconds:.1f} s; make it faster, or write tests/durations.json anew (make durations)"
        for file, seconds in sorted(found.items())
        if seconds > _FACTOR * budgets[file]
    ]


class Durations:
    """A plugin of pytest that adds up the CPU time of every file, over all workers.

    Args:
        checks: Fail the run if a file takes more than three times its budget; nothing is checked without a table.
        writes: Write what was measured into the table; files that did not run keep their entries while they exist.
    """

    def __init__(
        self, *, checks: bool, writes: bool, file: Path = DURATIONS, root: Path | None = None, floor_s: float = FLOOR_S
    ) -> None:
        self._checks, self._writes, self._file, self._floor_s = checks, writes, file, floor_s
        self._root = root or file.parents[1]
        self._seconds: Counter[str] = Counter()
        self._problems: list[str] = []

    def _measured(self, item: pytest.Item) -> Generator[None, None, None]:
        before = cpu_s()
        try:
            return (yield)
        finally:
            item.user_properties.append((_PROPERTY, max(0.0, cpu_s() - before)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        return (yield from self._measured(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        return (yield from self._measured(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        return (yield from self._measured(item))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":  # the teardown's report has all three durations
            parts = [value for name, value in report.user_properties if name == _PROPERTY]
            self._seconds[report.nodeid.partition("::")[0]] += sum(map(float, parts))  # type: ignore[arg-type]

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        has_ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if hasattr(session.config, "workerinput") or not has_ended:
            return
        if self._writes:
            table = read_durations(self._file) | {file: round(seconds, 1) for file, seconds in self._seconds.items()}
            kept = {file: table[file] for file in sorted(table) if (self._root / file).exists()}
            self._file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        expected = read_durations(self._file)
        if self._checks and expected:
            self._problems = over_budget(self._seconds, expected, self._floor_s)
            if self._problems:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._problems:
            terminalreporter.section("files over their budget")
            for line in self._problems:
                terminalreporter.write_line(line)
