"""The searches at their smallest scale, and the meaning of their figures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="needs the peers: pip install -r benchmarks/peers.txt")

import alto
from alto.data.source import carve_rows
from alto.runs import read_entries
from alto.spec import Task
from benchmarks import search

pytestmark = [pytest.mark.slow("benchmarks"), pytest.mark.filterwarnings("ignore::FutureWarning")]

DATA = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "train.jsonl"


@pytest.mark.skipif(not DATA.exists(), reason=f"needs {DATA}")
def test_the_smallest_scale_passes_its_gate(tmp_path: Path) -> None:
    assert search.main(["--scale", "smoke", "--threads", "1", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "search-smoke.json").read_text(encoding="utf-8"))
    assert found["gate"] == "passed"
    assert set(search.GOALS) <= set(found["figures"])
    assert {row["system"] for row in found["rows"]} == {"tpe", "pbt", "grid", "optuna"}


@pytest.mark.skipif(not DATA.exists(), reason=f"needs {DATA}")
def test_leaders_are_judged_as_they_were_in_the_search(tmp_path: Path) -> None:
    with DATA.open(encoding="utf-8") as lines:
        splits = carve_rows([json.loads(line) for line in lines], (12, 4, 4), 1)
    search.write_rows(tmp_path, splits)
    bests, drift = search.with_alto("grid", SMOKE, 1, "alto-tiny", tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    entries = read_entries(run / "journal.jsonl")
    leaders = [point for _, point in search.leaders_of(entries)]
    assert len(leaders) == len(bests) > 1
    result = alto.load_run(run)
    assert leaders[-1].job == result.best_job
    assert leaders[-1].validation_loss == pytest.approx(result.best_validation_loss)
    assert drift < 1e-4
    last, config = leaders[-1], search.configs_of(entries)[leaders[-1].job]
    changed = Task(
        **{**config, "seed": 2},
        model="alto-tiny",
        dataset=str(tmp_path / "train.jsonl"),
        validation_dataset=str(tmp_path / "test.jsonl"),
        max_length=512,
        data_seed=1,
        report_to="none",
    )
    other = search.judge_alone(changed, [last], 4, tmp_path / "other")[last.step]
    assert abs(other.train_ema / last.train_ema - 1) > 1e-4, "another job differs"


SMOKE = search.SIZES["smoke"]
SLOW = [(10.0, 2.0, 2.1), (50.0, 1.5, 1.6), (90.0, 1.2, 1.3)]
FAST = [(5.0, 1.8, 1.9), (9.0, 1.2, 1.25), (40.0, 1.0, 1.1)]


def rows(**systems: list[search.Best]) -> list[dict[str, object]]:
    everything = {"tpe": FAST, "pbt": SLOW, "grid": SLOW, "optuna": SLOW, **systems}
    return [{"seed": 1, "system": system, "bests": bests, "drift": 0.0} for system, bests in everything.items()]


def test_time_to_loss_is_to_the_worse_of_both_ends() -> None:
    size = search.Size(rows=(1, 1, 1), seeds=(1,), duration_s=100.0)
    found = search.figures(rows(), size)
    assert found["tpe_over_optuna_time_to_loss"] == pytest.approx(90 / 9)
    assert found["pbt_over_optuna_time_to_loss"] == 1
    found = search.figures(rows(tpe=SLOW, optuna=FAST), size)
    assert found["tpe_over_optuna_time_to_loss"] == pytest.approx(9 / 90)
    assert search.time_to(FAST, 0.5) == math.inf


RISING = [(1.0, 1.0, 1.0), (2.0, 1.5, 1.0)]
LATE = [(111.0, 1.0, 1.0)]
BACKWARDS = [(2.0, 1.0, 1.0), (1.0, 0.9, 1.0)]
UNTESTED = [(2.0, 1.0, math.nan)]


@pytest.mark.parametrize(
    ("system", "bests"),
    [("tpe", []), ("tpe", LATE), ("tpe", BACKWARDS), ("tpe", UNTESTED), ("pbt", RISING), ("optuna", RISING)],
)
def test_the_gate_refuses(system: str, bests: list[search.Best]) -> None:
    size = search.Size(rows=(1, 1, 1), seeds=(1,), duration_s=100.0)
    assert search.gate(rows(), size) == []
    assert search.gate(rows(tpe=RISING), size) == [], "losses on more rows may be higher"
    assert len(search.gate(rows(**{system: bests}), size)) == 1


@pytest.mark.parametrize("drift", [0.03, math.nan])
def test_the_gate_refuses_jobs_that_are_others_alone(drift: float) -> None:
    size = search.Size(rows=(1, 1, 1), seeds=(1,), duration_s=100.0)
    (failure,) = search.gate([{**rows()[0], "drift": drift}], size)
    assert "alone as in the search" in failure
