"""Tool calls from rows to a score: the reference is the row's own call, in whatever form the template writes it."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from tiny import make_task

import alto
from alto.errors import DataError

CITIES = ("Oslo", "Rome", "Lima", "Bonn")
TOOL = {
    "type": "function",
    "function": {"name": "rain", "description": "Rain.", "parameters": {"type": "object", "properties": {}}},
}


def template(name: str) -> str:
    return resources.files("trl").joinpath("chat_templates", f"{name}.jinja").read_text(encoding="utf-8")


def calls(path: Path) -> str:
    """Write questions, each answered by a single call."""
    rows: list[dict[str, Any]] = []
    for days, city in enumerate(CITIES):
        call = {"type": "function", "function": {"name": "rain", "arguments": {"city": city, "days": days}}}
        turns = [{"role": "user", "content": f"{city}?"}, {"role": "assistant", "tool_calls": [call]}]
        rows.append({"messages": turns, "tools": [TOOL]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def task(folder: Path, **keys: Any) -> alto.Task:
    rows = calls(folder / "calls.jsonl")
    settings = {"lr": 2e-2, "batch_size": 4, "max_steps": 40, "eval_steps": 0.5, "early_exit": False, "max_length": 512}
    return make_task(folder, **{"dataset": rows, "validation_dataset": rows, **settings, **keys})


def test_a_task_is_chosen_and_measured_by_its_calls(tmp_path: Path) -> None:
    select_by = {"scorer": "tool_call", "max_new_tokens": 64}
    chosen = task(tmp_path, chat_template=template("qwen2_5"), select_by=select_by, search_space={"r": [8, 16]})
    engine = alto.Engine(output_dir=tmp_path / "runs")
    result = engine.tune(chosen)
    assert (result.scorer, result.scorer_failure) == ("tool_call", "")
    assert max(score.score for score in result.finalists) >= 0.5
    found = engine.evaluate(result.run_dir, baseline=True, max_new_tokens=64)
    (mine,) = found.adapters
    assert mine.evaluation.scorer == "tool_call"
    best = next(score for score in result.finalists if score.job == result.best_job)
    assert mine.evaluation.score == best.score
    assert mine.evaluation.loss is not None
    assert found.baseline is not None
    assert found.baseline.score == 0
    first = found.predictions[0]
    assert json.loads(first.reference) == {"name": "rain", "arguments": {"city": "Oslo", "days": 0}}
    assert first.score is not None


def test_a_template_whose_calls_cannot_be_read_is_refused_before_training(tmp_path: Path) -> None:
    odd = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "CALL {{ c.function.name }} WITH {{ c.function.arguments }}{% endfor %}</{{ m.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    engine = alto.Engine(output_dir=tmp_path / "runs")
    with pytest.raises(DataError, match=r"select_by tool_call: .*writes tool calls as JSON objects.*CALL rain WITH"):
        engine.tune(task(tmp_path, chat_template=odd, select_by={"scorer": "tool_call"}, max_steps=1))
    assert not (tmp_path / "runs").exists()
