"""The searches at their smallest scale, and what their figures mean."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="needs the peers: pip install -r benchmarks/peers.txt")

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


SLOW = [(10.0, 2.0, 2.1), (50.0, 1.5, 1.6), (90.0, 1.2, 1.3)]
FAST = [(5.0, 1.8, 1.9), (9.0, 1.2, 1.25), (40.0, 1.0, 1.1)]


def rows(**systems: list[search.Best]) -> list[dict[str, object]]:
    everything = {"tpe": FAST, "pbt": SLOW, "grid": SLOW, "optuna": SLOW, **systems}
    return [{"seed": 1, "system": system, "bests": bests} for system, bests in everything.items()]


def test_time_to_loss_is_to_the_worse_of_both_ends() -> None:
    size = search.Size(rows=(1, 1, 1), seeds=(1,), duration_s=100.0)
    found = search.figures(rows(), size)
    assert found["tpe_over_optuna_time_to_loss"] == pytest.approx(90 / 9)
    assert found["pbt_over_optuna_time_to_loss"] == 1
    found = search.figures(rows(tpe=SLOW, optuna=FAST), size)
    assert found["tpe_over_optuna_time_to_loss"] == pytest.approx(9 / 90)
    assert search.time_to(FAST, 0.5) == math.inf


@pytest.mark.parametrize("bests", [[], [(1.0, 1.0, 1.0), (2.0, 1.5, 1.0)], [(111.0, 1.0, 1.0)]])
def test_the_gate_refuses(bests: list[search.Best]) -> None:
    size = search.Size(rows=(1, 1, 1), seeds=(1,), duration_s=100.0)
    assert search.gate(rows(), size) == []
    assert len(search.gate(rows(tpe=bests), size)) == 1
