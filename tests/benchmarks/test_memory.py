"""The memory benchmark at its smallest scale: its rows, its figures, its file."""

from __future__ import annotations

import json

import pytest

from alto.backbone import load_backbone
from alto.executor.profiling import measure, profile
from alto.spec import BaseModelSpec
from benchmarks.kernels.shapes import SHAPES
from benchmarks.memory import child
from benchmarks.memory import program as memory
from benchmarks.memory.plans import PLANS

pytestmark = pytest.mark.slow("benchmarks")

IN_CHILD = memory.in_child


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch, tmp_path):
    def measured(task, lengths, *, num_rows, max_tokens, on_progress):
        return measure.measure(
            task, load_backbone(BaseModelSpec(id=task.model)), lengths, num_rows=num_rows, max_tokens=max_tokens
        )

    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(profile, "_measured_in_child", measured)
    monkeypatch.setattr(memory, "in_child", child.answer)


def test_the_smallest_scale_predicts_peaks_and_durations(tmp_path):
    assert memory.main(["--scale", "smoke", "--threads", "1", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "memory-smoke.json").read_text(encoding="utf-8"))
    assert found["gate"] == "passed"
    assert [row["table"] for row in found["rows"]] == ["peak", "duration"]
    assert all(row["predicted"] > 0 and row["measured"] > 0 for row in found["rows"])
    assert set(found["goals"]) <= set(found["figures"])


class TestACaseThatFails:
    """A failing case is recorded and the others are measured; its group has no figure."""

    @pytest.fixture(autouse=True)
    def _answers(self, monkeypatch):
        plan = {"memory": {"fixed_bytes": 4e9, "bytes_per_token": 10.0}, "slot_bytes": 100, "duration_s": 2.0}
        limits = dict.fromkeys(("max_slots", "max_tokens_per_step", "max_tokens_per_pass"), 1)
        self.actions = []

        def answer(request):
            self.actions.append(request["action"])
            if request["action"] == "plan":
                return plan | limits
            if request["action"] == "run":
                return {"duration_s": 2.5}
            if request.get("num_jobs") == self.fails:
                raise RuntimeError("its process ended with exit code 1 and said: torch.OutOfMemoryError: 46 GiB")
            return {"num_tokens": 7, "peak_bytes": 1 if request.get("num_jobs") == self.tiny else 4_000_000_000}

        self.fails = self.tiny = None
        monkeypatch.setattr(memory, "in_child", answer)
        monkeypatch.setattr(memory, "_save", lambda *_: None)

    def run(self, tmp_path, *options):
        code = memory.main(["--scale", "cpu", "--out", str(tmp_path), *options])
        return code, json.loads((tmp_path / "memory-cpu.json").read_text(encoding="utf-8"))

    def test_has_no_figures_of_its_stage(self, tmp_path):
        self.fails = 4
        code, found = self.run(tmp_path)
        assert (code, found["gate"]) == (1, "passed")
        assert set(found["figures"]) == {"duration_error_median", "duration_error_worst"}
        assert found["notes"][0].startswith("Failed: tiny: 4 jobs × 2 rows: RuntimeError: its process ended")
        assert len([row for row in found["rows"] if row["table"] == "peak"]) == 11

    def test_has_no_row_where_the_gate_is_red(self, tmp_path):
        self.tiny = 8
        code, found = self.run(tmp_path, "--models", "tiny", "--stages", "peaks")
        assert (code, found["gate"], found["figures"]) == (1, "failed", {})
        assert "a peak of 1 bytes, less than the base model's" in found["notes"][0]
        assert len(found["rows"]) == 6

    def test_figures_wait_for_all_models(self, tmp_path):
        assert self.run(tmp_path, "--models", "tiny", "--stages", "durations")[1]["figures"] == {}
        assert " ".join(self.actions) == "plan run plan run plan run plan run"
        code, found = self.run(tmp_path, "--models", "25m", "--stages", "durations")
        assert code == 0
        assert found["figures"] == pytest.approx({"duration_error_median": 0.2, "duration_error_worst": 0.2})
        assert "Not measured: tiny peaks." in found["notes"]


def test_a_child_that_fails_says_why(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    child_file = tmp_path / "benchmarks" / "memory" / "child.py"
    child_file.parent.mkdir(parents=True)
    child_file.write_text("raise MemoryError('46 GiB')", encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"exit code 1 and said: MemoryError: 46 GiB"):
        IN_CHILD({})
    assert "Traceback" in capsys.readouterr().err
    child_file.write_text("print('loading'); print('{\"a\": 1}')", encoding="utf-8")
    assert IN_CHILD({}) == {"a": 1}


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
