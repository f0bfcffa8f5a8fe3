"""Damaged files, a full or read-only disk, two processes on one run, signals, clock jumps."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forks import run_code
from journals import entries, event
from tiny import curves_of, make_task, read_journal

import alto
from alto.early_exit import audit
from alto.engine.runner import TaskRunner
from alto.errors import RunBusyError, RunError, RunNotFoundError, RunWriteError, TaskInterruptedError
from alto.executor import session
from alto.executor.checkpoint import StateStore
from alto.executor.recorder import JournalRecorder
from alto.runs import JobAction, Journal, JournalEntry, Mailbox, RunDir, read_entries, read_events, read_history
from alto.runs.events import CheckpointSaved, JobEvaluated

SPACE = {"lr": [1e-3, 1e-2], "batch_size": [4, 8]}
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def checkpoint_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_SAVING_FRACTION", 1e9)


def task_in(folder: Path, model: Path, **changes: Any) -> alto.Task:
    settings = {"search_space": SPACE, "num_train_epochs": 3, "max_slots": 3, "checkpoint_interval_s": 0}
    return make_task(folder, model=str(model), report_to="none", **(settings | changes))


def interrupted_run(task: alto.Task, output_dir: Path, after_steps: int = 7) -> Path:
    """Stop a run cleanly before the ``after_steps``-th step of the loop."""
    calls = iter(range(after_steps))
    engine = alto.Engine(output_dir=output_dir, is_interrupted=lambda: next(calls, None) is None)
    with pytest.raises(TaskInterruptedError, match="continue with: alto resume"):
        engine.tune(task)
    (root,) = output_dir.iterdir()
    return root


def facts_of(root: Path) -> tuple[Any, Any, Any]:
    """Return curves, exits and winner of a run."""
    events = read_journal(root)
    curves = {job: (curve.train, curve.validation) for job, curve in curves_of(events).items()}
    exits = {event["job"]: (event["reason"], event["step"]) for event in events if event["event"] == "job_exited"}
    assert audit(entries(events)) == ()
    return curves, exits, events[-1]["best_job"]


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return facts_of(Path(alto.Engine(output_dir=folder / "runs").tune(task_in(folder, model)).run_dir))


@pytest.fixture
def stopped(model: Path, tmp_path: Path) -> Path:
    """A run of the same task, stopped half-way."""
    return interrupted_run(task_in(tmp_path, model), tmp_path / "runs")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 0x20
    path.write_bytes(bytes(data))


def damage(folder: Path, name: str, how: Callable[[Path], None]) -> None:
    paths = sorted(folder.glob(f"jobs/*/{name}"))
    assert paths
    how(paths[0])


def cut_last_line(root: Path) -> None:
    path = root / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-30])


def garble_a_line_in_the_middle(root: Path) -> None:
    lines = (root / "journal.jsonl").read_bytes().splitlines(keepends=True)
    lines[len(lines) // 2] = b"\x00\xff not json\n"
    (root / "journal.jsonl").write_bytes(b"".join(lines))


def drop_a_line(root: Path) -> None:
    lines = (root / "journal.jsonl").read_bytes().splitlines(keepends=True)
    del lines[len(lines) // 2]
    (root / "journal.jsonl").write_bytes(b"".join(lines))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "nothing": lambda root: None,
    "last line torn": cut_last_line,
    "line in the middle garbled": garble_a_line_in_the_middle,
    "line missing": drop_a_line,
    "first line torn": lambda root: (root / "journal.jsonl").write_bytes(b'{"seq": 0, "time": 17'),
    "journal empty": lambda root: (root / "journal.jsonl").write_bytes(b""),
    "journal gone": lambda root: (root / "journal.jsonl").unlink(),
    "weights truncated": lambda root: damage(root, "last/adapter_model.safetensors", truncate),
    "weights flipped": lambda root: damage(root, "last/adapter_model.safetensors", flip),
    "optimizer truncated": lambda root: damage(root, "last/optimizer.safetensors", truncate),
    "optimizer empty": lambda root: damage(root, "last/optimizer.safetensors", lambda path: path.write_bytes(b"")),
    "best flipped": lambda root: damage(root, "best/adapter_model.safetensors", flip),
    "state.json torn": lambda root: damage(root, "last/state.json", truncate),
    "a job's folder gone": lambda root: damage(root, "", shutil.rmtree),
    "all jobs gone": lambda root: shutil.rmtree(root / "jobs"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_run_falls_back_to_what_is_whole(kind: str, stopped: Path, undisturbed: tuple[Any, Any, Any]) -> None:
    DAMAGES[kind](stopped)
    result = alto.Engine().resume(stopped)
    assert facts_of(stopped) == undisturbed
    assert result.best_job == undisturbed[2]
    assert (stopped / "best" / "adapter_model.safetensors").is_file()


def test_a_damaged_checkpoint_restarts_the_run_with_a_note(stopped: Path) -> None:
    """Only one copy of a state is kept: the previous one is removed once the new one is durable."""
    assert not [*stopped.glob("jobs/*/*.previous")]
    checkpoints = [event for event in read_journal(stopped) if event["event"] == "checkpoint"]
    moved = next(job for job, at in checkpoints[-1]["jobs"].items() if at["slot"] is not None)
    flip(stopped / "jobs" / moved / "last" / "adapter_model.safetensors")
    alto.Engine().resume(stopped)
    started = read_journal(stopped)[0]
    assert started["notes"][0].endswith("checkpoints are damaged; the run starts from the beginning.")


class DeathError(BaseException):
    """Simulates a kill: no code catches it to save anything."""


@pytest.mark.parametrize(("owner", "name"), [(JournalRecorder, "checkpoint"), (StateStore, "remove_predecessors")])
def test_a_process_that_dies_around_a_commit_loses_nothing_that_was_committed(
    owner: type,
    name: str,
    model: Path,
    tmp_path: Path,
    undisturbed: tuple[Any, Any, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It dies when states are on disk and not in the journal, or when the previous states still exist."""
    calls, done = iter(range(6)), getattr(owner, name)

    def die_at_last(*args: Any) -> None:
        if next(calls, None) is None:
            raise DeathError
        done(*args)

    task = task_in(tmp_path, model)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, die_at_last)
        with pytest.raises(DeathError):
            alto.Engine(output_dir=tmp_path / "runs").tune(task)
    (root,) = (tmp_path / "runs").iterdir()
    assert [*root.glob("jobs/*/*.previous")], "the last commit needs them, or nobody removed them"
    alto.Engine().resume(root)
    events = read_journal(root)
    assert [event["notes"] for event in events if event["event"] == "task_resumed"] == [[]]
    assert facts_of(root) == undisturbed
    assert {path.name for path in root.glob("jobs/*/*")} == {"best"}


def test_a_run_that_starts_over_says_so(stopped: Path) -> None:
    shutil.rmtree(stopped / "jobs")
    alto.Engine().resume(stopped)
    started = read_journal(stopped)[0]
    assert started["event"] == "task_started"
    assert "damaged; the run starts from the beginning" in started["notes"][0]


def test_a_finished_run_gives_its_result_again(model: Path, tmp_path: Path) -> None:
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task_in(tmp_path, model))
    root = Path(result.run_dir)
    before = read_journal(root)
    shutil.rmtree(root / "best")
    (root / "report.html").unlink()
    assert alto.Engine().resume(root) == result
    assert read_journal(root) == before
    assert (root / "best" / "adapter_model.safetensors").is_file()
    assert (root / "report.html").is_file()


def test_other_data_are_not_gone_on_with(stopped: Path) -> None:
    data = stopped.parents[1] / "train.jsonl"
    data.write_text(data.read_text().replace("plus", "and"))
    before = read_journal(stopped)
    with pytest.raises(RunError, match=r"different rows or tokens in .*train\.jsonl; put the files"):
        alto.Engine().resume(stopped)
    assert [event["event"] for event in read_journal(stopped)][-1] in ("checkpoint", before[-1]["event"])


def test_a_command_whose_answer_was_lost_is_not_carried_out_twice(model: Path, tmp_path: Path) -> None:
    """The task died after committing a clone, and before removing the command from the mailbox."""
    sent: dict[Path, bytes] = {}

    def send(entry: JournalEntry) -> None:
        if isinstance(entry.event, JobEvaluated) and not sent:
            (root,) = (tmp_path / "runs").iterdir()
            Mailbox(RunDir(root)).send(JobAction.CLONE, "job-000", changes={"learning_rate": 2e-3})
            sent.update({path: path.read_bytes() for path in (root / "control").iterdir()})

    calls = iter(range(4))
    runner = TaskRunner(observers=[send], is_interrupted=lambda: next(calls, None) is None)
    with pytest.raises(TaskInterruptedError):
        runner.begin(task_in(tmp_path, model), tmp_path / "runs")
    ((path, command),) = sent.items()
    assert not path.exists()
    path.write_bytes(command)
    root = path.parents[1]
    alto.Engine().resume(root)
    assert [event["job"] for event in read_journal(root) if event["event"] == "job_added"] == ["job-004"]
    answer = Mailbox(RunDir(root)).wait_for_answer(path.name.removesuffix(".command.json"), 0)
    assert answer is not None
    assert answer.done
    assert not path.exists()


def change_task(root: Path, **changes: Any) -> None:
    (root / "task.yaml").write_text(alto.load_task(root / "task.yaml").replace(**changes).to_yaml())


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"search_space": {"lr": [2e-3, 1e-2], "batch_size": [4, 8]}}, "job-000, job-001"),
        ({"early_exit": False}, "early_exit"),
    ],
)
def test_other_jobs_or_rules_are_not_gone_on_with(changes: dict[str, Any], what: str, stopped: Path) -> None:
    change_task(stopped, **changes)
    with pytest.raises(RunError, match=f"found different settings of {what}; put it back"):
        alto.Engine().resume(stopped)


def test_a_run_may_go_on_with_fewer_slots(stopped: Path) -> None:
    change_task(stopped, max_slots=1)
    result = alto.Engine().resume(stopped)
    assert audit(entries(read_journal(stopped))) == ()
    assert all(job.exit_reason or job.steps == job.total_steps for job in result.job_results)


def test_a_finished_run_without_its_winner_says_so(model: Path, tmp_path: Path) -> None:
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task_in(tmp_path, model))
    shutil.rmtree(Path(result.run_dir) / "jobs")
    assert alto.Engine().resume(result.run_dir) == result
    shutil.rmtree(result.adapter_dir)
    with pytest.raises(RunNotFoundError, match="Restore the folder"):
        alto.Engine().resume(result.run_dir)


def test_no_run_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="none of its files"):
        alto.Engine().resume(tmp_path)


def test_a_run_in_work_is_not_started_twice(model: Path, tmp_path: Path) -> None:
    errors = []

    def resume_it(entry: JournalEntry) -> None:
        if isinstance(entry.event, JobEvaluated) and not errors:
            (root,) = (tmp_path / "runs").iterdir()
            with pytest.raises(RunBusyError, match=r"that another process works on .*alto show --watch") as caught:
                alto.Engine().resume(root)
            errors.append(caught.value)
            assert RunDir.open(root).is_locked()

    result = TaskRunner(observers=[resume_it]).begin(task_in(tmp_path, model), tmp_path / "runs")
    assert errors
    assert audit(entries(read_journal(result.run_dir))) == ()
    assert not RunDir.open(result.run_dir).is_locked()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_cleanly_and_says_how_to_go_on(
    number: signal.Signals, model: Path, tmp_path: Path, undisturbed: tuple[Any, Any, Any]
) -> None:
    task = task_in(tmp_path, model)
    file = tmp_path / "task.yaml"
    file.write_text(task.to_yaml())
    # The command line runs in a process of its own that signals itself at its fourth evaluation.
    code = f"""
        import os, signal, sys
        signal.signal({int(number)}, signal.SIG_DFL)  # where the tests run in the background, it is ignored
        from alto.runs import journal
        from alto.runs.events import JobEvaluated
        seen = []
        append = journal.Journal.append
        def watched(self, event):
            entry = append(self, event)
            seen.append(type(event))
            if seen[-1] is JobEvaluated and seen.count(JobEvaluated) == 4:
                os.kill(os.getpid(), {int(number)})
            return entry
        journal.Journal.append = watched
        sys.argv = ["alto", "tune", {str(file)!r}, "--output-dir", {str(tmp_path / "runs")!r}]
        from alto.cli import main
        main()
    """
    done = run_code(textwrap.dedent(code), cwd=ROOT)
    (root,) = (tmp_path / "runs").iterdir()
    assert done.returncode == 128 + number, done.stderr
    assert f"continue with: alto resume {root}" in done.stderr
    assert "Traceback" not in done.stderr
    assert read_journal(root)[-1]["event"] == "task_interrupted"
    assert (root / "report.html").is_file()
    alto.Engine().resume(root)
    assert facts_of(root) == undisturbed


FILL_THE_DISK = """
    import sys
    import alto
    from alto.executor import session
    session.MAX_SAVING_FRACTION = 1e9
    {before}
    engine = alto.Engine(output_dir={runs!r})
    try:
        engine.tune(alto.load_task({file!r}))
    except alto.AltoError as error:
        print(type(error).__name__, error)
"""


def fill_the_disk(task: alto.Task, folder: Path, before: str) -> str:
    """Return a program that trains on a disk of limited size."""
    (folder / "task.yaml").write_text(task.to_yaml())
    code = FILL_THE_DISK.format(before=before, runs=str(folder / "runs"), file=str(folder / "task.yaml"))
    return textwrap.dedent(code)


@pytest.mark.parametrize("limit", [6_000, 20_000])
def test_a_disk_that_ends_leaves_a_run_to_go_on_with(
    limit: int, model: Path, tmp_path: Path, undisturbed: tuple[Any, Any, Any]
) -> None:
    """The limit applies to each file: it stops the journal, or the weights of a checkpoint."""
    before = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))"
    done = run_code(fill_the_disk(task_in(tmp_path, model), tmp_path, before))
    assert done.returncode == 0, done.stderr
    message = done.stdout
    (root,) = [path for path in (tmp_path / "runs").iterdir() if not path.name.startswith(".")]
    assert message.startswith("DiskFullError")
    assert f"continue with: alto resume {root}" in message
    alto.Engine().resume(root)
    assert facts_of(root) == undisturbed


@pytest.mark.slow("campaigns")
def test_a_full_disk_leaves_a_run_to_go_on_with(model: Path, tmp_path: Path, undisturbed: tuple[Any, Any, Any]) -> None:
    disk = tmp_path / "disk"
    (disk / "runs").mkdir(parents=True)
    mount = f"mount -t tmpfs -o size=700k tmpfs {disk / 'runs'}"
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode
    ):
        pytest.skip("this machine lets nobody mount a small tmpfs")
    task = task_in(disk, model)
    saved = tmp_path / "saved"
    # The disk disappears with the process, so its content is copied first.
    copy = f"import atexit, shutil; atexit.register(shutil.copytree, {str(disk / 'runs')!r}, {str(saved)!r})"
    code = fill_the_disk(task, disk, copy)
    command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    message = done.stdout
    assert message.startswith("DiskFullError")
    assert "No space left on device" in message
    (root,) = [path for path in saved.iterdir() if not path.name.startswith(".")]
    alto.Engine().resume(root)
    assert facts_of(root) == undisturbed


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_run_is_not_gone_on_with(stopped: Path) -> None:
    stopped.chmod(0o500)
    with pytest.raises(RunWriteError, match="make the disk writable"):
        alto.Engine().resume(stopped)
    stopped.chmod(0o700)


def test_the_journal_s_time_does_not_follow_a_clock_that_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    now = time.time()
    with Journal(path) as journal:
        journal.append(event("task_started", jobs=[]))
        monkeypatch.setattr(time, "time", lambda: now - 86_400)
        journal.append(CheckpointSaved(jobs={}))
    past = read_entries(path)
    with Journal(path, past=past) as journal:
        journal.append(event("task_resumed"))
    times = [event["time"] for event in read_events(path)]
    assert times == sorted(times)
    assert times[-1] - times[0] < 3600


def test_a_clock_that_jumps_does_not_bend_a_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: tuple[Any, Any, Any]
) -> None:
    real = time.time

    def jump(entry: JournalEntry) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + (-86_400 if entry.seq % 2 else 86_400))

    result = TaskRunner(observers=[jump]).begin(task_in(tmp_path, model), tmp_path / "runs")
    assert facts_of(Path(result.run_dir)) == undisturbed
    assert 0 < result.duration_s < 600
    history = read_history(result.run_dir)
    assert all(stay.end is not None and stay.end >= stay.start for stay in history.occupancy)


def test_state_json_names_what_it_covers(stopped: Path) -> None:
    state = json.loads(next(stopped.glob("jobs/*/last/state.json")).read_text())
    assert {"adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"} == set(state["sha256"])
