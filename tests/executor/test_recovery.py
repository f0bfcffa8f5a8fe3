"""Out-of-memory errors: which errors count, and what an attempt records for the next one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from alto.backbone import is_out_of_memory
from alto.executor import read_oom_record, recover
from alto.executor.micro_batches import NoMemoryError, watching
from alto.runs import RunDir


def test_it_is_read_back(tmp_path: Path) -> None:
    assert read_oom_record(RunDir(tmp_path)) is None
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
    assert read_oom_record(RunDir(tmp_path)) is None
    past = recover(RunDir(tmp_path))
    assert past.oom_record is None
    assert past.notes[0].startswith("oom.json is damaged and is not used")


def test_what_pytorch_says_on_this_machine_is_recognised() -> None:
    with pytest.raises(NoMemoryError) as caught, watching("forward"):
        torch.empty(2**60, dtype=torch.uint8)
    assert caught.value.phase == "forward"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        NoMemoryError("backward"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("could not create a memory object"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_other_libraries_are_understood(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: an illegal memory access was encountered"), ValueError("out of memory")]
)
def test_other_errors_are_let_through(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)), watching("forward"):
        raise error
