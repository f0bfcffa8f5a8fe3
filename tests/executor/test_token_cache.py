"""Jobs that train on tokens on disk train exactly as on tokens in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import curves_of, make_task, read_journal, run_task

from alto.runs import RunDir
from alto.spec import Task

SPACE = {"learning_rate": [1e-3, 1e-2], "per_device_train_batch_size": [3, 4]}


@pytest.mark.parametrize("source", ["one file", "mixture", "labelled mixture", "bad rows"])
def test_losses_are_equal_to_the_last_bit(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))
    task = make_task(tmp_path, num_train_epochs=2, search_space=SPACE)
    if source == "mixture":
        sources = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": 2} for name in ("train", "validation")]
        task = task.replace(dataset=sources, validation_dataset=None, validation_split=0.2)
    if source == "labelled mixture":
        pairs = [{"prompt": f"{n} plus 1?", "chosen": f" Yes: {n + 1}.", "rejected": f" No, {n}"} for n in range(16)]
        for name, rows in (("few", pairs[:5]), ("more", pairs[5:])):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": 2} for name in ("few", "more")]
        task = task.replace(method="kto", dataset=sources, validation_dataset=None, validation_split=0.2)
    if source == "bad rows":
        with (tmp_path / "train.jsonl").open("a") as file:
            file.write("{\n" + json.dumps({"prompt": "1?", "completion": ""}) + "\n")
        task = task.replace(on_bad_row="skip")
    in_memory, on_disk = (journal_of(task.replace(token_cache=where), tmp_path / where) for where in ("memory", "disk"))
    assert curves_of(on_disk) == curves_of(in_memory)
    fingerprints = [journal[0]["data"]["fingerprint"] for journal in (in_memory, on_disk)]
    assert fingerprints[0] == fingerprints[1], "a run can be resumed with either cache"
    assert on_disk[-1]["best_job"] == in_memory[-1]["best_job"]
    bad = [note for note in on_disk[0]["notes"] if "left out" in note]
    assert len(bad) == (source == "bad rows")


def journal_of(task: Task, folder: Path) -> list[dict[str, Any]]:
    run_dir = RunDir.create(folder, task)
    run_task(task, run_dir)
    return read_journal(run_dir.root)
