"""The benchmark of launches at its smallest scale; it compiles for a GPU, so it has a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="there are no kernels to launch without Triton")

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow("minutes")


def run(folder: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    arguments = ["--scale", "smoke", "--out", str(folder)]
    program = f"import sys; from benchmarks.kernels import launches; {before}"
    program += f"sys.exit(launches.main({arguments!r}))"
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_smallest_scale_passes_its_gate(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "launches-smoke.json").read_text(encoding="utf-8"))
    assert found["gate"] == "passed"
    # Four groups of six launches each, as tests/kernels count them for a group.
    assert found["figures"]["launches_per_step_1b"] == 16 * 4 * 5
    assert {row["way"] for row in found["rows"]} == {"alto", "triton"}


def test_another_argument_fails_the_gate(tmp_path: Path) -> None:
    swapped = (
        "was = launches.launch_by_triton; launches.launch_by_triton = lambda kernel, grid, tensors, *others, **c: "
    )
    done = run(tmp_path, swapped + "was(kernel, (grid[0] + 1, *grid[1:]), tensors, *others, **c); ")
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads((tmp_path / "launches-smoke.json").read_text(encoding="utf-8"))
    assert found["figures"] == {}
    assert "qkv: launches" in " ".join(found["notes"])
