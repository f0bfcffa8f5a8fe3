"""What an attempt leaves for the next one about memory, when it was damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from alto.executor import read_refusal, recover
from alto.runs import RunDir


def test_it_is_read_back(tmp_path: Path) -> None:
    assert read_refusal(RunDir(tmp_path)) is None
    (tmp_path / "oom.json").write_text(json.dumps({"phase": "forward", "max_tokens_per_pass": 64}))
    past = recover(RunDir(tmp_path))
    assert past.max_tokens_per_pass == 64
    assert past.notes == ()


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "7", "null", "{}", "[" * 100_000, '{"max_tokens_per_pass": "x"}', '{"max_tokens_per_pass": NaN}',
     '{"max_tokens_per_pass": 0}', '{"max_tokens_per_pass": true}', '{"max_tokens_per_pass": 5, "seq": 1}', None],
)  # fmt: skip
def test_a_damaged_one_is_named_and_not_used(tmp_path: Path, content: str | None) -> None:
    if content is None:
        os.mkfifo(tmp_path / "oom.json")
    else:
        (tmp_path / "oom.json").write_text(content)
    assert read_refusal(RunDir(tmp_path)) is None
    past = recover(RunDir(tmp_path))
    assert past.refusal is None
    assert past.notes[0].startswith("oom.json is damaged and is not used")
