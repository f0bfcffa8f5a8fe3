"""The paper's listing runs as users run it, and writes one adapter per task."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow("minutes")  # the engine's tests make the same calls
def test_paper_listing_prints_the_best_adapter_of_every_task(tmp_path: Path) -> None:
    data = tmp_path / "data"
    rows = ["--train", "24", "--validation", "6", "--test", "1"]
    subprocess.run([sys.executable, EXAMPLES / "make_word_problems.py", "--output", data, *rows], check=True)
    done = subprocess.run(
        [sys.executable, EXAMPLES / "paper_listing.py", "--data", data],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(\w+): (\S+), loss (\d+\.\d+), in (.+)$", done.stdout, re.M)
    assert [task for task, *_ in found] == ["cautious", "bold"], done.stdout
    for *_, folder in found:
        assert (tmp_path / folder / "adapter_model.safetensors").is_file()
        assert (tmp_path / folder / "adapter_config.json").is_file()
