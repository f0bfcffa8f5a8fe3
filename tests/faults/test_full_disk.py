"""A disk that takes only small files: no finished task fails, no half-written file stays, the reason is reported.

The limit is that of one file (``RLIMIT_FSIZE``), which any user may set: a report has 3.6 MB, all else is smaller.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from queues import one_by_one, tiny_tasks
from typer.testing import CliRunner

import alto
from alto.base import is_disk_full, writing
from alto.cli import app
from alto.cluster import Outcome
from alto.cluster.host import RunEnd, ending_of
from alto.errors import DiskFullError, RunBusyError, RunWriteError
from alto.report.pages import write_page
from alto.runs import read_events

LIMIT_BYTES = 2_000_000


@pytest.fixture
def small_files() -> Iterator[None]:
    """Limit the size of the files of this process and of its children."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.rglob("*") if path.suffix in (".new", ".partial") or ".html." in path.name]


def assert_without_report(result: alto.TaskResult) -> None:
    (notice,) = result.notices
    assert notice.startswith("There is no report: expected to write ")
    assert "File too large" in notice
    assert f"write it with: alto report {result.run_dir}" in notice
    root = Path(result.run_dir)
    assert (root / "best" / "adapter_model.safetensors").is_file()
    assert not (root / "report.html").exists()


def test_a_finished_task_does_not_fail_for_its_report(model: Path, tmp_path: Path, small_files: None) -> None:
    (task,) = tiny_tasks(tmp_path, model, ["one"])
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task)
    assert_without_report(result)
    assert leftovers(tmp_path) == []
    refused = CliRunner().invoke(app, ["report", result.run_dir])
    assert isinstance(refused.exception, DiskFullError)
    resumed = CliRunner().invoke(app, ["resume", result.run_dir])
    assert resumed.exit_code == 0
    assert "one: There is no report" in resumed.stderr
    assert "report:" not in resumed.stdout
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
    assert CliRunner().invoke(app, ["report", result.run_dir]).exit_code == 0
    assert (Path(result.run_dir) / "report.html").is_file()


def test_in_a_queue_neither(model: Path, tmp_path: Path, small_files: None) -> None:
    tasks = tiny_tasks(tmp_path, model, ["one"])
    (result,) = alto.Engine(output_dir=tmp_path / "runs").batched_execution(tasks, one_by_one(tasks, ["one"]))
    assert_without_report(result)
    (root,) = (tmp_path / "runs").iterdir()
    assert not (root / "report.html").exists()
    assert leftovers(tmp_path) == []
    ends = [event for event in read_events(root / "journal.jsonl") if event["event"] == "executor_ended"]
    assert [event["outcome"] for event in ends] == ["finished"]
    assert ends[0]["reason"] == result.notices[0]
    done = CliRunner().invoke(app, ["resume", str(root)])
    assert done.exit_code == 0
    assert "one: There is no report" in done.stderr
    assert f"alto report {root}" in " ".join(done.stdout.split())


def test_a_report_that_cannot_be_drawn_costs_no_result_either(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(run_dir: Path) -> None:
        raise ImportError("no plotly")

    monkeypatch.setattr("alto.engine.runner.write_report", broken)
    (task,) = tiny_tasks(tmp_path, model, ["one"])
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task)
    expected = f"There is no report: ImportError: no plotly; create it later with: alto report {result.run_dir}"
    assert result.notices == (expected,)


def test_a_page_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, small_files: None) -> None:
    page = write_page(tmp_path / "report.html", "old")
    with pytest.raises(DiskFullError, match="alto report"):
        write_page(page, "x" * (LIMIT_BYTES + 1))
    assert page.read_text() == "old"
    assert list(tmp_path.iterdir()) == [page]


def test_an_export_that_cannot_be_written_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path, **options: object) -> None:
        Path(target).mkdir()
        raise shutil.Error([(str(source), str(target), "[Errno 28] No space left on device")])

    monkeypatch.setattr("alto.artifacts.adapter.shutil.copytree", full)
    (task,) = tiny_tasks(tmp_path, model, ["one"])
    with pytest.raises(DiskFullError, match="alto resume"):
        alto.Engine(output_dir=tmp_path / "runs").tune(task)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "outcome", "name"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), Outcome.FAILED, "DiskFullError"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), Outcome.FAILED, "DiskFullError"),
        (DiskFullError("full"), Outcome.FAILED, "DiskFullError"),
        (OSError(errno.EIO, os.strerror(errno.EIO)), Outcome.LOST, "OSError"),
        (RunWriteError("broken"), Outcome.LOST, "RunWriteError"),
        (RunBusyError("busy"), Outcome.LOST, "RunBusyError"),
    ],
)
def test_only_what_another_attempt_may_not_meet_is_tried_again(
    error: BaseException, outcome: Outcome, name: str
) -> None:
    ending = ending_of(RunEnd(error=error))
    assert (ending.outcome, ending.error) == (outcome, name)
    assert str(error) in ending.reason


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (OSError(errno.ENOSPC, "x"), True),
        (OSError(errno.EIO, "x"), False),
        (OSError(errno.EROFS, "x"), False),
        (OSError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (OSError("Error while serializing: I/O error: Input/output error (os error 5)"), False),
        (shutil.Error([("a", "b", "[Errno 122] Disk quota exceeded")]), True),
    ],
)
def test_a_full_disk_is_distinguished_from_a_broken_one(error: OSError, is_full: bool, tmp_path: Path) -> None:
    assert is_disk_full(error) is is_full
    with pytest.raises(RunWriteError) as caught, writing(tmp_path, tmp_path / "file"):
        raise error
    assert (type(caught.value) is DiskFullError) is is_full
