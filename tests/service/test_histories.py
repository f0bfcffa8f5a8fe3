"""Histories that a service keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from services import served

from alto.runs import read_history
from alto.service import context
from alto.service.access import Caller
from alto.service.api.tasks import list_
from alto.service.store.tables import JobRow

CALLER = Caller(tenant="t", scopes=frozenset({"read"}))


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The runs whose journals were folded, in order."""
    found: list[Path] = []

    def counted(run: Path) -> Any:
        found.append(run)
        return read_history(run)

    monkeypatch.setattr(context, "read_history", counted)
    return found


def test_a_page_of_many_tasks_folds_only_journals_that_have_changed(tmp_path, write_run, small_run, folded):
    journal = (write_run(small_run) / "journal.jsonl").read_bytes()
    with served(tmp_path / "data") as found:
        service = found.service
        with service.store.writing() as session:
            for number in range(100):
                row = JobRow(
                    id=f"ftjob-{number}", tenant="t", status="running", run_dir=f"t/ftjob-{number}", model="alto-tiny",
                    created_at=0, request={}, task={}, training_file="file-0", seed=1,
                )  # fmt: skip
                session.add(row)
                service.run_of(row).mkdir(parents=True)
                (service.run_of(row) / "journal.jsonl").write_bytes(journal)
        first = list_(service, CALLER, limit=100)
        assert len(first["data"]) == len(folded) == 100
        assert first["data"][0]["samples_trained"] == 1700
        assert list_(service, CALLER, limit=100) == first
        assert len(folded) == 100, "nothing has changed"
        changed = service.run_of(row) / "journal.jsonl"
        changed.write_bytes(b"".join(journal.splitlines(keepends=True)[:-1]))
        list_(service, CALLER, limit=100)
        assert folded[100:] == [changed.parent]


def test_the_history_that_was_used_least_lately_is_forgotten(tmp_path, write_run, small_run, folded, monkeypatch):
    monkeypatch.setattr(context, "_MOST_HISTORIES", 2)
    journal = (write_run(small_run) / "journal.jsonl").read_bytes()
    runs = [tmp_path / name for name in "abc"]
    for run in runs:
        run.mkdir()
        (run / "journal.jsonl").write_bytes(journal)
    known = context.Histories()
    for number in (0, 1, 0, 2, 0):
        known.read(runs[number])
    assert folded == runs
