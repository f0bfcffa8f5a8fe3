"""Writes the sample of output in README.md: what the quickstart prints at its end, its table shortened."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["BLOCK", "sample_of"]

_ROOT = Path(__file__).parents[1]
_README = _ROOT / "README.md"
_TASK = _ROOT / "examples" / "quickstart.yaml"
_NUM_JOBS = 3

BLOCK = re.compile(r"(?<=```\n)quickstart finished after.*?(?=```)", re.DOTALL)
"""The sample in README.md."""


def sample_of(settings: Sequence[str] = ()) -> str:
    """Run the quickstart, whose data must have been made, and return its summary with the best ``_NUM_JOBS`` jobs.

    Args:
        settings: Keys of the task to override, as ``alto tune --set`` takes them.

    Raises:
        subprocess.CalledProcessError: The run failed.
    """
    overrides = [part for setting in settings for part in ("--set", setting)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "alto", "tune", str(_TASK), "--output-dir", f"{folder}/runs"]
        done = subprocess.run(
            [*command, *overrides], env=os.environ | {"COLUMNS": "80"}, capture_output=True, text=True, check=True
        )
        printed = done.stdout.replace(folder, "…")
    head, table, end = printed[printed.index("quickstart finished after") :].split("\n\n", 2)
    lines = [line.rstrip() for line in table.splitlines()]
    jobs = [*lines[: 2 + _NUM_JOBS], "  …"]
    text = "\n\n".join((head, "\n".join(jobs), end.rstrip()))
    return re.sub(r"quickstart-\d{8}-\d{6}\S*?(?=/)", "quickstart-<id>", text) + "\n"


def main() -> None:
    page = _README.read_text(encoding="utf-8")
    assert len(BLOCK.findall(page)) == 1, "README.md has one sample"
    text = sample_of()
    _README.write_text(BLOCK.sub(lambda _: text, page), encoding="utf-8")
    print("wrote the sample of README.md")


if __name__ == "__main__":
    main()
