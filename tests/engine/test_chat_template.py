"""A task's own chat template: trained by, kept with the adapter and in the run, and checked when the run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import load_tokenizer, make_task

from alto.data import read_task_rows
from alto.engine import Engine
from alto.errors import RunChangedError
from alto.executor.recovery import check_data, data_fingerprint, data_fingerprints
from alto.runs.events import TaskStarted, decode

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>({{ m.content }})<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_the_template_is_kept_with_the_adapter_and_in_the_run(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE, encoding="utf-8")
    task = make_task(tmp_path, chat_template=str(file), max_steps=2, max_slots=1, report_to="none")
    engine = Engine(output_dir=tmp_path / "runs")
    result = engine.tune(task)
    file.write_text("{{ 'changed since' }}", encoding="utf-8")
    adapter = Path(result.adapter_dir)
    assert (adapter / "chat_template.jinja").read_text(encoding="utf-8") == TEMPLATE
    assert "chat_template.jinja" in (adapter / "README.md").read_text(encoding="utf-8")
    of_run = engine.evaluate(result.run_dir, metric="loss")
    of_folder = engine.evaluate(adapter, dataset=task.validation_dataset, metric="loss")
    losses = [found.adapters[0].evaluation.loss for found in (of_run, of_folder)]
    assert losses[1] == pytest.approx(result.best_validation_loss, rel=1e-4)
    assert losses[0] == pytest.approx(result.best_validation_loss, rel=1e-4)

    started = decode(json.loads((Path(result.run_dir) / "journal.jsonl").read_text(encoding="utf-8").split("\n")[0]))
    assert isinstance(started.event, TaskStarted)
    own = read_task_rows(task).encode(load_tokenizer())
    with pytest.raises(RunChangedError, match="expected the data that the run began with"):
        check_data(started.event, own, None)


def test_the_template_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    data = read_task_rows(make_task(tmp_path)).encode(load_tokenizer())
    assert len({data_fingerprint(data), data_fingerprint(data, TEMPLATE), data_fingerprint(data, TEMPLATE + " ")}) == 3


def test_runs_are_compared_by_their_training_and_validation_rows(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    with_test = task.replace(test_dataset=task.validation_dataset)
    other_rows = task.replace(dataset=task.validation_dataset)
    found, tested, templated, other = (
        data_fingerprints(read_task_rows(each).encode(load_tokenizer()), template)
        for each, template in ((task, None), (with_test, None), (task, TEMPLATE), (other_rows, None))
    )
    assert found["fingerprint"] == found["train_validation_fingerprint"]
    for each in (tested, templated):
        assert each["fingerprint"] != found["fingerprint"]
        assert each["train_validation_fingerprint"] == found["train_validation_fingerprint"]
        assert each["validation_fingerprint"] == found["validation_fingerprint"]
    assert other["train_validation_fingerprint"] != found["train_validation_fingerprint"]
    assert other["validation_fingerprint"] == found["validation_fingerprint"]
