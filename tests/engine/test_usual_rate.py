"""The learning rate near which a search begins: known once the model is loaded, and kept when a run is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import load_tokenizer, make_task, random_llama, read_journal, save_model

import alto
from alto.engine.start import with_usual_rate
from alto.errors import TaskInterruptedError
from alto.spec import Task, read_run_task

SPACE = {"lr": {"min": 1e-6, "max": 0.5, "log": True}, "r": [2, 4]}
TPE = {"algorithm": "tpe", "num_initial_jobs": 4, "budget": {"jobs": 6}}
USUAL = 0.0126
"""That of a hidden size of 32."""


def make(folder: Path, **changes: Any) -> Task:
    keys = {"search_space": SPACE, "search": TPE, "num_train_epochs": 3, "report_to": "none"}
    return make_task(folder, **(keys | changes))


def configs(run_dir: str | Path) -> list[Any]:
    return [job["config"] for job in read_journal(run_dir)[0]["jobs"]]


def test_a_resumed_run_has_the_jobs_that_were_drawn_near_it(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="needs the search extra: pip install -e '.[search]'")
    task = make(tmp_path, model=str(save_model(tmp_path / "model")), checkpoint_interval_s=0)
    calls = iter(range(3))
    with pytest.raises(TaskInterruptedError):
        alto.Engine(output_dir=tmp_path / "runs", is_interrupted=lambda: next(calls, None) is None).tune(task)
    [run] = (tmp_path / "runs").iterdir()
    written = read_run_task(run / "task.yaml")
    assert written.search.usual_learning_rate == pytest.approx(USUAL, rel=0.01)
    assert [job.config.to_dict() for job in written.jobs] == configs(run)
    assert written.jobs[0].config != task.jobs[0].config
    assert written.jobs[3].config == task.jobs[3].config, "drawn from the whole range"
    before = (run / "task.yaml").read_text(encoding="utf-8")
    alto.Engine().resume(run)
    assert (run / "task.yaml").read_text(encoding="utf-8") == before
    assert len(read_journal(run)[0]["jobs"]) == 4


def test_only_a_search_that_begins_and_names_none_takes_it(tmp_path: Path) -> None:
    config = random_llama(len(load_tokenizer())).config
    for task, begins in (
        (make(tmp_path), False),
        (make(tmp_path, search={**TPE, "usual_learning_rate": 1e-3}), True),
        (make(tmp_path, search={"algorithm": "random"}), True),
        (make(tmp_path, search={"algorithm": "pbt"}), True),
    ):
        assert with_usual_rate(task, config, begins=begins) is task
    found = with_usual_rate(make(tmp_path, search_space="auto"), config, begins=True)
    assert found.search.usual_learning_rate == pytest.approx(USUAL, rel=0.01)
    assert found.search_space.to_dict()["learning_rate"]["max"] == pytest.approx(5 * USUAL, rel=0.01)
