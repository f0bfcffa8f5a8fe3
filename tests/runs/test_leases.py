"""A run that was leased to another process is not written any more by those that worked on it before."""

from __future__ import annotations

from pathlib import Path

import pytest

from alto.errors import RunBusyError
from alto.runs import Journal, RunDir
from alto.runs.events import TaskInterrupted

NEWS = TaskInterrupted(training=("job-000",))


def test_a_run_without_leases_is_written(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with run.locked(), Journal(run.journal_file, check=run.check_lock) as journal:
        journal.append(NEWS)
    assert len(run.journal_file.read_text().splitlines()) == 1


def test_a_process_that_began_before_the_lease_writes_no_more(tmp_path: Path) -> None:
    before, after = RunDir(tmp_path), RunDir(tmp_path)
    after.lease(1)
    with before.locked(), Journal(before.journal_file, check=before.check_lock) as journal:
        journal.append(NEWS)
        after.lease(2)
        known = before.journal_file.read_bytes()
        with pytest.raises(RunBusyError, match=r"expected lease 1 of .* found 2: another process was given the run"):
            journal.append(NEWS)
        assert before.journal_file.read_bytes() == known


def test_a_process_that_begins_after_the_lease_writes(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for number in (1, 2):
        run.lease(number)
        with run.locked(), Journal(run.journal_file, check=run.check_lock) as journal:
            journal.append(NEWS)
    assert len(run.journal_file.read_text().splitlines()) == 2


def test_the_first_lease_ends_those_that_had_none(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with run.locked():
        RunDir(tmp_path).lease(1)
        with pytest.raises(RunBusyError, match="expected lease none"):
            run.check_lock()
