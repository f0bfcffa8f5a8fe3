"""Real Trackio on this machine: the content of its database, also after a resume; it prints nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

Event = dict[str, Any]

pytestmark = pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")

# Trackio reads the place of its data when imported, so every test has a process of its own.
SHOW_AND_READ = """
import json, sys
from pathlib import Path
from alto.runs.events import decode
from alto.trackers import tracking
from alto.trackers.trackio import TrackioTracker

import trackio.run
finish, finished = trackio.run.Run.finish, []

def count_and_finish(run):
    finished.append(run.name)
    finish(run)

trackio.run.Run.finish = count_and_finish

for events in json.loads(sys.argv[2]):
    with tracking({"trackio": TrackioTracker()}, Path(sys.argv[1])) as (observe,):
        for event in events:
            observe(decode(event))

assert len(finished) == len(set(finished)), finished
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps({
    run: [SQLiteStorage.get_run_config("alto", run), SQLiteStorage.get_logs("alto", run)]
    for run in SQLiteStorage.get_runs("alto")
}))
"""


def shown(starts: list[list[Event]], run_dir: Path) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return configuration and rows of every Trackio run after our run was started and resumed.

    Nothing else is printed, and no run is finished twice: starting one must not finish those beside it.
    """
    done = subprocess.run(
        [sys.executable, "-c", SHOW_AND_READ, str(run_dir), json.dumps(starts)],
        env={**os.environ, "TRACKIO_DIR": str(run_dir / "data")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tracker" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return {run: (config, rows) for run, (config, rows) in found.items()}


def curve(rows: list[dict[str, Any]], metric: str) -> list[tuple[int, float]]:
    return [(row["step"], row[metric]) for row in rows if metric in row]


def test_a_run_for_each_job(small_run: list[Event], tmp_path: Path) -> None:
    found = shown([small_run], tmp_path)
    assert set(found) == {f"{tmp_path.name}-{job}" for job in "abcd"}
    config, rows = found[f"{tmp_path.name}-d"]
    assert (config["r"], config["model"], config["_Group"]) == (8, "alto-tiny", tmp_path.name)
    assert curve(rows, "train/loss") == [(step, 2.0) for step in range(1, 101)]
    assert curve(rows, "eval/loss") == [(10, 2.1), (100, 1.9)]
    assert curve(rows, "outcome") == [(100, "completed")]


def test_resumed_run_makes_new_runs_that_are_whole(small_run: list[Event], tmp_path: Path) -> None:
    found = shown([small_run[:20], small_run], tmp_path)
    assert {config["_Group"] for config, _ in found.values()} == {tmp_path.name, f"{tmp_path.name}-resumed-1"}
    _, rows = found[f"{tmp_path.name}-resumed-1-d"]
    assert curve(rows, "train/loss") == [(step, 2.0) for step in range(1, 101)]
