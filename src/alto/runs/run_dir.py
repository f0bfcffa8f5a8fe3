"""The folder of a run.

::

    runs/<name>-<id>/
        task.yaml            the task as it was resolved
        journal.jsonl        everything that happened
        jobs/<job>/best/     adapter with the job's best validation loss, PEFT format
        jobs/<job>/last/     adapter and optimizer state when the job last left its slot
        best/                the task's best adapter
        report.html
"""

from __future__ import annotations

import time
from pathlib import Path

from alto.errors import RunError, RunExistsError
from alto.spec import Task

__all__ = ["RunDir"]


class RunDir:
    """Names of the files of a run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.task_file = root / "task.yaml"
        self.journal_file = root / "journal.jsonl"
        self.best = root / "best"

    @classmethod
    def create(cls, output_dir: str | Path, task: Task) -> RunDir:
        """A new, empty run directory ``<output_dir>/<name>-<id>`` that holds the resolved task.

        Raises:
            RunError: The folder cannot be made.
        """
        stem = f"{task.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        for attempt in range(1000):
            root = Path(output_dir) / (stem if attempt == 0 else f"{stem}-{attempt}")
            try:
                root.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise RunError(
                    f"output_dir: expected a folder that can be written, found {output_dir} ({error.strerror}); "
                    "choose another with --output-dir"
                ) from error
            run = cls(root.resolve())
            run.task_file.write_text(task.to_yaml(), encoding="utf-8")
            return run
        raise RunExistsError(f"expected a free name for the run, found {stem} and 999 others taken; clear {output_dir}")

    def job(self, job: str, kind: str) -> Path:
        """Folder of a job's adapter; ``kind`` is ``best`` or ``last``."""
        return self.root / "jobs" / job / kind
