"""A child process that runs a task under a memory limit that is too small for its first planned pass.

``python capped_task.py FOLDER MEBIBYTES``: the run goes to FOLDER/runs; MEBIBYTES is the memory that is left once the
model is loaded.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from tiny import load_tiny, make_task

from alto.executor import RunInputs, TaskContext, TaskSession, run_alone
from alto.runs import Journal, RunDir


def main(folder: Path, mebibytes: int) -> None:
    """Train four jobs whose step is a pass of 1,852 tokens, 463 per job."""
    space = {"lr": [1e-4, 2e-4, 3e-4, 4e-4], "lora_dropout": [0.1]}
    task = make_task(folder, search_space=space, batch_size=24, early_exit={"enabled": False}, num_train_epochs=2)
    backbone, data = load_tiny(task)
    run = RunDir.create(folder / "runs", task)
    with Journal(run.journal_file) as journal:
        session = TaskSession(TaskContext.of(task, backbone, data), journal, RunInputs(run_dir=run))
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + mebibytes * 2**20,) * 2)
        run_alone(session)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
