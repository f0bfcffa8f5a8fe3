"""The benchmark of device use and memory at its smallest scale, its figures, and a gate that fails on wrong results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="the baseline needs the bench extra: pip install -e '.[bench]'")

from alto.kernels import torch_backend
from benchmarks.kernels.shapes import SHAPES
from benchmarks.paper import utilization
from benchmarks.paper.utilization import ALTO, PEFT, PLANS, draw_utilization, main
from benchmarks.pieces import Piece

# PEFT 0.21 still reads names that Transformers 5.23 deprecates.
pytestmark = [
    pytest.mark.slow("benchmarks"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]

(MODEL,) = PLANS["smoke"].models
(CASE,) = MODEL.cases["memory"]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("smoke")
    assert main(["--scale", "smoke", "--threads", "1", "--out", str(folder)]) == 0
    found: dict[str, Any] = json.loads((folder / "utilization-smoke.json").read_text(encoding="utf-8"))
    return found


def test_the_smallest_scale_passes_its_gate_and_measures_every_point(smoke: dict[str, Any]) -> None:
    assert smoke["gate"] == "passed"
    points = [(PEFT, 1), (ALTO, 1), (ALTO, 2)]
    assert [(row["table"], row["batch_size"], row["system"], row["adapters"]) for row in smoke["rows"]] == [
        *(("memory", 1, *point) for point in points),
        *(("step", size, *point) for size in (1, 2) for point in points),
    ]
    for row in smoke["rows"]:
        if row["table"] == "memory":
            assert 0 < row["base_bytes"] < row["peak_bytes"]
            rest = row["peak_bytes"] - row["base_bytes"]
            assert row["bytes_per_adapter"] * row["adapters"] == pytest.approx(rest)
        else:
            assert 0 < row["tokens_per_s_min"] <= row["tokens_per_s"] <= row["tokens_per_s_max"]
            assert 0 < row["device_use_min"] <= row["device_use"] <= row["device_use_max"]


def test_figures_compare_many_adapters_with_one(smoke: dict[str, Any]) -> None:
    names = [f"memory_of_base_share_{name}_bs1_tiny" for name in ("peft", "1", "2")]
    names += ["memory_per_adapter_ratio_bs1_tiny"]
    for size in (1, 2):
        names += [f"device_use_{name}_bs{size}_tiny" for name in ("peft", "1", "2")]
        names += [f"{name}_bs{size}_tiny" for name in ("device_use_ratio", "tokens_per_s_over_peft")]
    assert list(smoke["figures"]) == names
    peft, _, two = (row for row in smoke["rows"] if row["table"] == "memory")
    assert smoke["figures"][names[3]] == pytest.approx(two["peak_bytes"] / (2 * peft["peak_bytes"]))


def test_it_is_drawn(smoke: dict[str, Any]) -> None:
    figure = pytest.importorskip("matplotlib.figure", reason="pictures need the bench extra").Figure()
    from benchmarks.paper.curves import Found

    axes = list(figure.subplots(1, 2))
    draw_utilization(Found(figures=smoke["figures"], rows=smoke["rows"]), axes)
    assert [len(axis.get_lines()) for axis in axes] == [4, 2]


def test_a_wrong_gradient_turns_the_gate_red_and_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch_backend.grouped_backward_weight
    monkeypatch.setattr(
        torch_backend, "grouped_backward_weight", lambda x_TK, *rest, **settings: right(1.01 * x_TK, *rest, **settings)
    )
    monkeypatch.setattr(utilization, "in_child", lambda *_: pytest.fail("measured behind a red gate"))
    monkeypatch.setattr(utilization, "take_turns", lambda *_: pytest.fail("timed behind a red gate"))
    assert main(["--scale", "smoke", "--threads", "1", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "utilization-smoke.json").read_text(encoding="utf-8"))
    assert (found["gate"], found["figures"], found["rows"]) == ("failed", {}, [])
    assert "tiny, 1 adapters, batch size 1: alto, job 0 (rank 16), gradient of A" in " ".join(found["notes"])
    assert not any("peft, job" in note for note in found["notes"]), "PEFT is right"


class TestMemory:
    """Memory of points whose answers the test sets."""

    @pytest.fixture(autouse=True)
    def _answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peaks = {(PEFT, 1): 200, (ALTO, 1): 250, (ALTO, 2): 300}

        def answer(request: dict[str, Any], module: str) -> dict[str, int]:
            assert module == utilization.CHILD
            peak = self.peaks.get((request["system"], request["num_adapters"]))
            if peak is None:
                raise RuntimeError("its process ended with exit code 1 and said: torch.OutOfMemoryError: 46 GiB")
            return {"peak_bytes": peak, "base_bytes": 100}

        monkeypatch.setattr(utilization, "in_child", answer)

    def measured(self) -> Piece:
        piece = Piece(name="tiny memory")
        utilization._measure_memory("smoke", MODEL, CASE, 1, piece, lambda: None)
        return piece

    def test_is_divided_into_the_base_and_what_adapters_need(self) -> None:
        piece = self.measured()
        assert [row["bytes_per_adapter"] for row in piece.rows] == [100, 150, 100]
        assert piece.figures == pytest.approx(
            {
                "memory_of_base_share_peft_bs1_tiny": 0.5,
                "memory_of_base_share_1_bs1_tiny": 0.4,
                "memory_of_base_share_2_bs1_tiny": 1 / 3,
                "memory_per_adapter_ratio_bs1_tiny": 0.75,
            }
        )

    def test_has_no_ratio_where_one_job_has_no_peak(self) -> None:
        del self.peaks[PEFT, 1]
        piece = self.measured()
        assert not any("ratio" in name for name in piece.figures)
        assert piece.errors == [
            "tiny memory, batch size 1: peft, 1 adapters: RuntimeError: its process ended with exit code 1 and said: "
            "torch.OutOfMemoryError: 46 GiB"
        ]

    def test_a_peak_below_the_base_model_fails_the_gate(self) -> None:
        self.peaks[ALTO, 2] = 100
        with pytest.raises(
            utilization.GateFailedError, match=r"2 adapters: a peak of 100 bytes, not more than the 100"
        ):
            self.measured()


@pytest.mark.parametrize("scale", PLANS)
def test_every_plan_can_be_measured(scale: str) -> None:
    for model in PLANS[scale].models:
        shape = SHAPES[model.shape]
        head_size = shape["hidden_size"] // shape["num_attention_heads"]
        assert model.rank <= head_size * shape["num_key_value_heads"], "no rank is larger than a module"
        for case in (case for cases in model.cases.values() for case in cases):
            assert model.num_rows % case.batch_size == 0, "all epochs train the same rows"
            assert case.numbers[0] == 1
            assert list(case.numbers) == sorted(set(case.numbers))
