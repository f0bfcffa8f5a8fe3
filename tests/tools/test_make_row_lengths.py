"""The committed lengths of GSM8K's rows are those of the data."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kernels.lengths import row_lengths
from tools.make_row_lengths import derive

SHARED = Path(__file__).parents[3] / "shared"


def test_committed_lengths_are_those_of_the_data() -> None:
    data, gpt2 = SHARED / "data" / "gsm8k" / "train.jsonl", SHARED / "tokenizers" / "gpt2"
    if not data.exists() or not gpt2.exists():
        pytest.skip(f"needs GSM8K at {data} and GPT-2's tokenizer at {gpt2}")
    for tokenizer, found in derive(data, gpt2).items():
        assert tuple(found) == row_lengths(tokenizer)
