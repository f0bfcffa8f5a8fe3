"""The benchmark of the service at its smallest scale, and its gate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra service is not installed")

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow("benchmarks")


def run(folder: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    arguments = ["--scale", "smoke", "--out", str(folder)]
    program = f"import sys; from benchmarks.service import program as service; {before}"
    program += f"sys.exit(service.main({arguments!r}))"
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_smallest_scale_passes_its_gate(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "service-smoke.json").read_text(encoding="utf-8"))
    assert found["gate"] == "passed"
    figures = found["figures"]
    assert (figures["lost"], figures["duplicated"], figures["order_violations"]) == (0, 0, 0)
    assert figures["events_followed"] > 40
    assert {"create_p50_ms", "create_p99_ms", "retrieve_p95_ms", "list_p50_ms", "upload_p50_ms"} <= set(figures)


def test_a_task_that_is_not_there_and_an_event_out_of_order_fail_the_gate(tmp_path: Path) -> None:
    lose = "check = service._check; service._check = lambda root, load, num: ("
    lose += "load.jobs.update(none='tenant-000'), setattr(load, 'order_violations', 1), check(root, load, num))[-1]; "
    done = run(tmp_path, lose)
    assert done.returncode == 1
    assert "lost: expected 0, found" in done.stdout
    assert "order_violations: expected 0, found 1" in done.stdout
