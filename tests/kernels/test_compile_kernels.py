"""Kernels are compiled before the first step, for a GPU that is absent, in a process without Triton's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.slow("kernels"),
]

PROGRAM = Path(__file__).parents[1] / "support" / "compiled_steps.py"


@pytest.mark.parametrize("dropout", ["dropout", "none"])
def test_steps_of_any_adapters_and_tokens_find_their_kernels_compiled(dropout: str) -> None:
    done = subprocess.run([sys.executable, str(PROGRAM), dropout], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    total = found["progress"][-1][1]
    assert found["progress"] == [[number, total] for number in range(total + 1)]
    # Six ops for groups of one and of two modules, those with dropout twice, and three kernels of the optimizer; the
    # two groups of one module share most.
    assert total >= (6 + 3 + 3 if dropout == "dropout" else 6 + 3)
    assert found["again"] == []
    assert found["num_launched"] == 0, "compiling runs nothing"
    assert found["later"] == []
