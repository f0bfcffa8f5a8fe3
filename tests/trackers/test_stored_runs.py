"""What is kept of a tool's ids, and that each tool keeps its own."""

from __future__ import annotations

from pathlib import Path

from alto.trackers.base import StoredRuns


def test_nothing_is_known_of_a_new_run(tmp_path: Path) -> None:
    stored = StoredRuns(tmp_path, "mlflow")
    assert stored.id_of("job-000") is None
    assert stored.ended_at("job-000") == 0


def test_what_is_kept_is_there_when_the_run_is_resumed(tmp_path: Path) -> None:
    stored = StoredRuns(tmp_path, "mlflow")
    stored.set_id("run", "f00d")
    stored.set_id("job-000", "beef")
    stored.set_ended("job-000", 30)
    again = StoredRuns(tmp_path, "mlflow")
    assert (again.id_of("run"), again.id_of("job-000"), again.ended_at("job-000")) == ("f00d", "beef", 30)
    assert StoredRuns(tmp_path, "wandb").id_of("run") is None
