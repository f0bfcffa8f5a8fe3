"""A run that is killed at any instant, however often, ends with the winner, curves and files of one that was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kill_trials.py")
NUM_KILLS = 52


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_runs_are_resumed_as_if_nothing_had_happened(seed: int, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), str(seed), str(NUM_KILLS)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["problems"] == {}, done.stderr[-5000:]
    assert sum(outcome["kills"].values()) >= NUM_KILLS
    assert all(outcome["kills"][kind] for kind in ("file", "line", "weights", "time", "command")), outcome["kills"]
    # What the instants were drawn from: hundreds of file operations, every journal line, every checkpoint's weights.
    assert outcome["counts"]["seen"]["file"] > 200
    assert outcome["counts"]["seen"]["line"] > 50
