"""``docs/kernels.md`` is generated from the results, and has every kernel of every group."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools import make_kernel_docs as tool

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "kernels.md"


def test_the_page_is_current() -> None:
    assert tool.page() == PAGE.read_text(encoding="utf-8")


def test_every_kernel_of_every_group_is_there() -> None:
    rows = re.findall(r"^\| (q k v|o|gate up|down) \| (\w+) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    kernels = ("shrink", "expand", "dy", "dx", "da")
    assert rows == [(group, kernel) for group in ("q k v", "o", "gate up", "down") for kernel in kernels] * 2


def test_measurements_are_next_to_predictions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    common = {"table": "op", "model": "1b", "batch_size": 1}
    rows = [
        common | {"op": "grouped_shrink", "shape": "2048 × 2048+512+512", "median_us": 11.25},
        common | {"op": "grouped_expand", "shape": "8192 × 2048", "median_us": 22.25},
        common | {"op": "grouped_backward_input", "shape": "8192 × 2048", "median_us": 33.25},
    ]
    (tmp_path / "kernels-gpu.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    monkeypatch.setattr(tool, "RESULTS_DIR", tmp_path)
    measured = re.findall(r"^\| ([^|]+) \| (\w+) \|.*\| (\d+\.\d) \|$", tool.page(), flags=re.MULTILINE)
    assert measured == [("q k v", "shrink", "11.2"), ("down", "expand", "22.2")]
