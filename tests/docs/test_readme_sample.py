"""The sample of output in README.md has the form of what the quickstart prints now."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.make_quickstart_sample import BLOCK, sample_of

ROOT = Path(__file__).parents[2]


def form(text: str) -> list[str]:
    """The lines of ``text`` with what differs between two sweeps left out: numbers, stages and columns' widths."""
    for pattern, mark in (
        (r"\d+ (?:h|min|s)\b(?: \d+ (?:min|s)\b)?", "TIME"),
        (r"(?<=samples trained, ).*", "SAVED"),
        (r"\d[\d.,]*(?:e-?\d+)?", "#"),
        (r"completed|underperforming|overfitting|diverging", "STAGE"),
        (r"nan", "#"),
        (r"[★ ]+", " "),
    ):
        text = re.sub(pattern, mark, text)
    return text.splitlines()


@pytest.mark.slow("models")
def test_the_sample_in_the_readme_has_the_form_of_what_the_quickstart_prints() -> None:
    subprocess.run([sys.executable, str(ROOT / "examples" / "make_word_problems.py")], check=True, capture_output=True)
    (in_readme,) = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    space = "{learning_rate: [0.001, 0.02], r: [4, 8], per_device_train_batch_size: [4, 8]}"
    # So short a run needs a share that pays for all rows, else a note says that it does not, and a rung that stays
    # whatever evaluations cost.
    early_exit = "early_exit={evaluation_share: 10, rungs: [[0.3, 0.5]]}"
    found = sample_of(["num_train_epochs=0.1", "eval_steps=0.5", early_exit, f"search_space={space}"])
    assert form(in_readme) == form(found)
