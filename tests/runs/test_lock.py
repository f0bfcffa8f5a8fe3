"""The lock of a run and its lease: one process writes a run, and notices when it no longer may."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from alto.base.files import LockFile, scratch_folder
from alto.errors import RunBusyError
from alto.runs import CommandAnswer, Journal, Mailbox, RunDir, read_entries, read_events
from alto.runs.events import CheckpointSaved, TaskInterrupted


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr("alto.runs.run_dir.LOCK_TIMEOUT_S", 0.0)
    return RunDir(tmp_path)


def test_one_at_a_time(run: RunDir) -> None:
    other = RunDir(run.root)
    assert not other.is_locked()
    with run.locked():
        assert other.is_locked()
        run.check_lock()
        with pytest.raises(RunBusyError, match="found that another process works on"), other.locked():
            pass
    assert not other.is_locked()
    with other.locked():
        pass


def test_asking_makes_no_file(run: RunDir) -> None:
    assert not run.is_locked()
    assert not list(run.root.iterdir())


def _remove(path: Path) -> None:
    path.unlink()


def _replace(path: Path) -> None:
    path.unlink()
    path.touch()


@pytest.mark.parametrize("change", [_remove, _replace])
def test_a_lock_file_that_was_removed_ends_what_is_written(run: RunDir, change: object) -> None:
    with run.locked(), Journal(run.journal_file, check=run.check_lock) as journal:
        journal.append(CheckpointSaved(jobs={}))
        change(run.root / "run.lock")  # type: ignore[operator]
        other = RunDir(run.root)
        with other.locked():  # another process can have it, and this one must stop writing
            other.check_lock()
            with pytest.raises(RunBusyError, match="found it removed or replaced"):
                journal.append(CheckpointSaved(jobs={}))
            with pytest.raises(RunBusyError, match="found it removed or replaced"):
                Mailbox(run).answer("x", CommandAnswer(done=True, message=""))
    assert len(read_events(run.journal_file)) == 1
    assert not run.control.exists()


def test_a_process_that_has_lost_the_lock_cuts_no_journal(run: RunDir) -> None:
    with Journal(run.journal_file) as journal:
        journal.append(CheckpointSaved(jobs={}))
    with run.locked():
        _remove(run.root / "run.lock")
        other = RunDir(run.root)
        with other.locked(), Journal(run.journal_file, check=other.check_lock) as journal:
            journal.append(CheckpointSaved(jobs={}))
            written = run.journal_file.read_bytes()
            with pytest.raises(RunBusyError, match="found it removed or replaced"):
                Journal(run.journal_file, past=read_entries(run.journal_file)[:1], check=run.check_lock)
            assert run.journal_file.read_bytes() == written
            journal.append(CheckpointSaved(jobs={}))
    assert len(read_events(run.journal_file)) == 3


@pytest.mark.parametrize("change", [_remove, _replace])
def test_events_go_into_no_file_but_the_journal(run: RunDir, change: object) -> None:
    with Journal(run.journal_file) as journal:
        journal.append(CheckpointSaved(jobs={}))
        change(run.journal_file)  # type: ignore[operator]
        with pytest.raises(RunBusyError, match=r"journal\.jsonl as this process opened it, found it removed or replac"):
            journal.append(CheckpointSaved(jobs={}))


def test_a_file_removed_between_opening_and_locking_is_not_taken_for_the_lock(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = run.root / "run.lock", []
    real = os.open

    def open_and_lose(name: object, *arguments: object) -> int:
        descriptor = real(name, *arguments)  # type: ignore[arg-type]
        if not opened:
            path.unlink()
        opened.append(name)
        return descriptor

    monkeypatch.setattr("alto.base.files.os.open", open_and_lose)
    lock = LockFile(path)
    assert lock.acquire(5.0)
    assert len(opened) == 2
    assert lock.is_held()
    lock.release()


def _hold(path: Path, is_held: object, may_end: object) -> None:
    assert LockFile(path).acquire(0)
    is_held.set()  # type: ignore[attr-defined]
    may_end.wait(60)  # type: ignore[attr-defined]
    os._exit(9)


def test_the_lock_of_a_process_that_ended_is_free(run: RunDir) -> None:
    context = multiprocessing.get_context("spawn")
    is_held, may_end = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(run.root / "run.lock", is_held, may_end))
    process.start()
    assert is_held.wait(60)
    assert run.is_locked()
    may_end.set()
    process.join()
    assert not run.is_locked()


def test_a_reader_sees_whether_a_process_works_on_the_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def only_read(path: Path, flags: int, *arguments: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *arguments)

    for is_held in (True, False):
        with run.locked() if is_held else contextlib.nullcontext(), monkeypatch.context() as patch:
            patch.setattr(os, "open", only_read)
            assert RunDir(run.root).is_locked() is is_held


HOLDER = """
import sys
from alto.base.files import scratch_folder
with scratch_folder("alto-test-") as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_the_folders_of_killed_processes_are_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        for _ in range(3)
    ]  # fmt: skip
    folders = [Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout is not None]
    old, new, live = folders
    for holder in holders[:2]:
        holder.kill()
        holder.communicate()
    for folder in (old, live):
        (file,) = folder.iterdir()
        os.utime(file, (0, 0))
    with scratch_folder("alto-test-") as folder:
        assert folder.is_dir()
        assert not old.exists()
        assert new.exists(), "its process may be about to lock it"
        assert live.exists()
    assert not folder.exists()
    holders[2].communicate("")
    assert holders[2].returncode == 0
    assert not live.exists()


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
