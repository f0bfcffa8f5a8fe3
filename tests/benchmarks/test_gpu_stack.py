"""Benchmarks in the environment of a machine with a GPU: the source on the path, and a few carried wheels.

Two more benchmarks of ``make bench-gpu`` run on that stack in ``test_kernels`` and ``test_adapter_parallel``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_stack import ROOT, gpu_stack

pytest.importorskip("peft", reason="the baselines need the bench extra: pip install -e '.[bench]'")

from benchmarks.kernels import program as kernels
from benchmarks.memory import program as memory
from benchmarks.paper import utilization

pytestmark = pytest.mark.slow("benchmarks")


def run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_the_stack_hides_what_such_machines_lack(tmp_path: Path) -> None:
    code = """
import importlib.util, json, sys
from importlib import metadata
import alto, pydantic, typer
names = ["plotly", "trl", "datasets", "ortools", "ray", "bitsandbytes", "pyarrow", "hypothesis", "alto-lora"]
missing = [name for name in names if name == "alto-lora" or importlib.util.find_spec(name) is None]
listed = [found.name for found in metadata.distributions() if found.name in names]
print(json.dumps([alto.__file__, missing == names, listed]))
"""
    found = json.loads(run([sys.executable, "-c", code], gpu_stack(tmp_path)))
    assert found == [str(ROOT / "src" / "alto" / "__init__.py"), True, []]


def test_memory_measures_there(tmp_path: Path) -> None:
    """Whole tasks run in processes of their own, which import the executor, the journal and checkpoints."""
    command = [sys.executable, "-m", "benchmarks.paper", "memory", "--stages", "durations", "--threads", "1"]
    run([*command, "--out", str(tmp_path)], gpu_stack(tmp_path))
    found = json.loads((tmp_path / "memory-smoke.json").read_text(encoding="utf-8"))
    assert (found["gate"], [row["table"] for row in found["rows"]]) == ("passed", ["duration"])


def test_device_use_is_measured_there(tmp_path: Path) -> None:
    """It needs no matplotlib, which draws the measurements."""
    command = [sys.executable, "-m", "benchmarks.paper", "utilization", "--stages", "steps", "--threads", "1"]
    run([*command, "--out", str(tmp_path)], gpu_stack(tmp_path))
    found = json.loads((tmp_path / "utilization-smoke.json").read_text(encoding="utf-8"))
    assert (found["gate"], {row["table"] for row in found["rows"]}) == ("passed", {"step"})


def test_pytest_finds_the_tests_of_the_gpu_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-p", "no:cacheprovider"]
    found = run(command, gpu_stack(tmp_path, tests=True))
    for file in ("kernels/test_dropout.py", "backbone/test_attention.py", "benchmarks/test_kernels.py"):
        assert f"tests/{file}" in found


@pytest.mark.parametrize(("given", "expected"), [("carried", "src:carried"), (None, "src")])
def test_make_keeps_the_path_that_it_is_given(tmp_path: Path, given: str | None, expected: str) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "path: $PYTHONPATH"\n', encoding="utf-8")
    python.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MAKEFLAGS")}
    environment |= {} if given is None else {"PYTHONPATH": given}
    printed = run(["make", "--silent", "bench-gpu", f"PYTHON={python}"], environment).splitlines()
    assert {line for line in printed if line.startswith("path: ")} == {f"path: {expected}"}


def test_make_measures_every_piece_even_if_one_fails(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@" >> "$LOG"\ncase "$*" in *peaks*) exit 1;; esac\n', encoding="utf-8")
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "--silent", "bench-gpu", f"PYTHON={python}", "BENCH_OUT=out"],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "MAKEFLAGS"} | {"LOG": str(tmp_path / "log")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    benchmarks = {"kernels": kernels, "memory": memory, "utilization": utilization}
    measured = set()
    for line in (tmp_path / "log").read_text(encoding="utf-8").splitlines():
        _, module, name, *options = line.split()
        assert module == "benchmarks.paper"
        if name == "adapter-parallel":
            continue
        benchmark = benchmarks[name]
        chosen = benchmark._options(options)
        assert (chosen.scale, str(chosen.out)) == ("gpu", "out")
        names = {f"{model} {stage}" for model in chosen.models for stage in chosen.stages}
        measured |= {(benchmark, name) for name in names.intersection(benchmark.study("gpu").pieces)}
    assert measured == {(each, name) for each in benchmarks.values() for name in each.study("gpu").pieces}
    assert "failed: " in done.stdout
