"""The further ranks of an executor: the errors where they cannot be started, or cannot report themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from alto.cluster.attempt import AttemptDir, ending_of_exit
from alto.cluster.base import Outcome, TaskTicket
from alto.cluster.orders import Orders


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    return AttemptDir.create(tmp_path, 1)


def test_an_executor_whose_ranks_cannot_be_started_says_why(attempt: AttemptDir, tmp_path: Path) -> None:
    attempt.rank_log(1).mkdir()  # where a file must be
    code = "from alto.cluster.worker import main; main()"
    orders = Orders(tmp_path)
    orders.work(TaskTicket(task="a", run_dir=str(tmp_path), host="none:none"), attempt)
    done = subprocess.run(
        [sys.executable, "-c", code, str(orders.root), "--parent", str(os.getpid()), "--grace-s", "60"],
        env={**os.environ, "WORLD_SIZE": "2", "RANK": "0"},
        start_new_session=True,
        check=False,
    )
    assert done.returncode == 1
    ending = attempt.ending()
    assert ending is not None
    assert (ending.outcome, ending.error) == (Outcome.LOST, "RunWriteError")
    assert f"expected to write {attempt.rank_log(1)}, found: Is a directory" in ending.reason


def test_a_rank_that_can_write_nothing_is_quoted_from_its_own_log(attempt: AttemptDir) -> None:
    attempt.stderr.write_text("what the first rank said\n", encoding="utf-8")
    attempt.rank_log(2).write_text("what the third rank said\n", encoding="utf-8")
    assert ending_of_exit(83, attempt, 2).reason.endswith("its log ends with: what the third rank said")
