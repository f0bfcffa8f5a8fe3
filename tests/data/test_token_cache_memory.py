"""A process that trains on tokens on disk holds a bounded part of them in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from alto.data import IGNORED, DataOrder, Span
from alto.data.token_cache import TokenWriter, open_rows
from tools import measure_token_cache as tool

ROOT = Path(__file__).resolve().parents[2]
NUM_MIB = 8
NUM_ROWS, NUM_TOKENS = 2000, 5000
MEASURING = """
import dataclasses, json, pathlib, sys
from tools import measure_token_cache as tool
from alto.data import token_cache
token_cache._RESIDENT_BYTES = tool.MIB
found = tool.measure(pathlib.Path(sys.argv[1]), int(sys.argv[2]) * tool.MIB)
print(json.dumps([dataclasses.asdict(one) for one in found]))
"""


def test_reading_holds_a_bounded_part_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of 40 MiB of tokens and 8 MiB of masks are read in the order of an epoch."""
    writer = TokenWriter(tmp_path / "rows")
    ids_T = torch.arange(NUM_TOKENS)
    targets_T = torch.cat([ids_T[1:], torch.tensor([IGNORED])])
    for _ in range(NUM_ROWS):
        writer.add(ids_T, targets_T, (Span(NUM_TOKENS),))
    writer.dataset()
    monkeypatch.setattr("alto.data.token_cache._RESIDENT_BYTES", tool.MIB)
    assert _growth(tmp_path / "rows") < 12 * tool.MIB
    monkeypatch.setattr("alto.data.token_cache._RESIDENT_BYTES", 10**12)
    assert _growth(tmp_path / "rows") > 40 * tool.MIB, "read pages stay resident unless they are released"


def _growth(folder: Path) -> int:
    """Return the peak growth in bytes of a new process that reads every row of an epoch."""
    result = folder.parent / "growth"
    child = os.fork()
    if child == 0:
        try:
            rows = open_rows(folder)
            order = DataOrder(NUM_ROWS, 4, seed=0)
            read = [rows.targets[0]]
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            before = tool._memory("VmRSS")
            for step in range(NUM_ROWS // 4):
                read = [rows.targets[row] for row in order.rows_of_step(step)]
            assert len(read) == 4
            result.write_text(str(tool._memory("VmHWM") - before))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return int(result.read_text())


@pytest.mark.slow("benchmarks")
def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    """In memory a token takes 16 bytes; on disk, a part of every file stays mapped. A new process measures both,
    because this one has freed memory of other tests to use."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURING, str(tmp_path), str(NUM_MIB)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    found = {values["way"]: tool.Measured(**values) for values in json.loads(done.stdout)}
    num_bytes_in_memory = 16 * found["memory"].num_tokens
    assert found["memory"].peak_bytes > num_bytes_in_memory
    for way in tool.WAYS[1:]:
        assert found[way].peak_bytes < found["memory"].peak_bytes / 2, found[way]
        assert found[way].num_tokens == found["memory"].num_tokens
