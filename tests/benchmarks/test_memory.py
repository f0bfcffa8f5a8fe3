"""The memory benchmark at its smallest scale: its rows, its figures, its file."""

from __future__ import annotations

import json

import memory
import pytest
from kernels_lib.shapes import SHAPES
from memory_lib import child
from memory_lib.plans import PLANS

from alto.backbone import load_backbone
from alto.executor.profiling import measure, profile


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch, tmp_path):
    def measured(task, lengths, *, num_rows, max_tokens):
        return measure.measure(task, load_backbone(task.model), lengths, num_rows=num_rows, max_tokens=max_tokens)

    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(profile, "_measured_in_child", measured)
    monkeypatch.setattr(memory, "in_child", child.answer)


def test_the_smallest_scale_predicts_peaks_and_durations(tmp_path):
    assert memory.main(["--scale", "smoke", "--threads", "1", "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "memory-smoke.json").read_text(encoding="utf-8"))
    assert found["gate"] == "passed"
    assert [row["table"] for row in found["rows"]] == ["peak", "duration"]
    assert all(row["predicted"] > 0 and row["measured"] > 0 for row in found["rows"])
    assert set(found["goals"]) <= set(found["figures"])


def test_figures_are_relative_to_what_was_measured():
    rows = [
        {"table": "peak", "predicted": 110.0, "measured": 100.0},
        {"table": "peak", "predicted": 80.0, "measured": 100.0},
        {"table": "duration", "predicted": 5.0, "measured": 10.0},
    ]
    assert memory.figures(rows) == pytest.approx(
        {
            "memory_error_median": 0.15,
            "memory_error_worst": 0.2,
            "memory_above_prediction": 0.25,
            "duration_error_median": 0.5,
            "duration_error_worst": 0.5,
        }
    )


def test_every_scale_has_the_cases_that_its_goals_are_about():
    for scale, least in (("cpu", (12, 6)), ("gpu", (6, 2))):
        models = memory.PLANS[scale].models
        assert sum(len(model.peaks) for model in models) >= least[0]
        assert sum(len(model.durations) for model in models) >= least[1]


@pytest.mark.parametrize(("scale", "model"), [(scale, model) for scale in PLANS for model in PLANS[scale].models])
def test_no_rank_is_larger_than_a_module_of_the_model(scale, model):
    shape = SHAPES[model.shape]
    head_size = shape["hidden_size"] // shape["num_attention_heads"]
    smallest_side = min(shape["hidden_size"], head_size * shape["num_key_value_heads"])
    assert max(*model.ranks, *(rank for case in model.durations for rank in case.ranks)) <= smallest_side
