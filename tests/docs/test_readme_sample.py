"""The sample of output in README.md has the form of the quickstart's present output."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.make_quickstart_sample import BLOCK, sample_of

ROOT = Path(__file__).parents[2]


def form(text: str) -> list[str]:
    """Return the lines of ``text`` without what differs between two sweeps: numbers, stages and widths of columns."""
    for pattern, mark in (
        (r"\d+ (?:h|min|s)\b(?: \d+ (?:min|s)\b)?", "TIME"),
        (r"(?<=samples trained, ).*", "SAVED"),
        (r"\d[\d.,]*(?:e-?\d+)?", "#"),
        (r"completed|underperforming|overfitting|diverging", "STAGE"),
        (r"nan", "#"),
        (r"─+", "─"),
        (r"[★ ]+", " "),
    ):
        text = re.sub(pattern, mark, text)
    return text.splitlines()


@pytest.mark.slow("models")
def test_the_sample_in_the_readme_has_the_form_of_what_the_quickstart_prints() -> None:
    subprocess.run([sys.executable, str(ROOT / "examples" / "make_word_problems.py")], check=True, capture_output=True)
    (in_readme,) = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    space = "{learning_rate: [0.001, 0.02], r: [4, 8], per_device_train_batch_size: [4, 8]}"
    # Without a share that pays for all rows, so short a run prints a note about it; the rung stays whatever evaluations
    # cost.
    early_exit = "early_exit={evaluation_share: 10, rungs: [[0.3, 0.5]]}"
    found = sample_of(["num_train_epochs=0.1", "eval_steps=0.5", early_exit, f"search_space={space}"])
    assert form(in_readme) == form(found)
