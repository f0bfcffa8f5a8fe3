"""Measure the memory and the speed of a task's data in memory and on disk (``token_cache``).

    python -m tools.measure_token_cache [--megabytes 32]

The tool makes a file of random words. For every way, a separate process reads it, tokenises it and collates every row
of one epoch in batches. The tool prints a row for each: the largest resident memory above that of the process before,
and rows per second of processor time, which other processes of the machine change little. It also checks that all ways
give the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from alto.backbone import resolve_model
from alto.data import DataOrder, JobRows, collate, digest_of, read_task_rows
from alto.spec import Task

WAYS = ("memory", "disk", "disk, again")
ROW_CHARS = 4096
BATCH_ROWS = 8
MAX_LENGTH = 4096
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurement of one way: bytes above those of the process before, seconds of processor time, rows, tokens and
    their digest."""

    way: str
    peak_bytes: int
    encode_s: float
    epoch_s: float
    num_rows: int
    num_tokens: int
    digest: str


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--megabytes", type=int, default=32, help="size of the file of rows, MiB")
    size = arguments.parse_args().megabytes
    with tempfile.TemporaryDirectory(prefix="alto-token-cache-") as folder:
        found = measure(Path(folder), size * MIB)
    print("| way | memory above the process before | rows/CPU s tokenised | rows/CPU s collated |")
    print("|---|---|---|---|")
    for one in found:
        rates = (f"{one.num_rows / seconds:,.0f}" for seconds in (one.encode_s, one.epoch_s))
        print(f"| {one.way} | {one.peak_bytes / MIB:,.0f} MiB | {' | '.join(rates)} |")
    print(f"{found[0].num_rows:,} rows, {found[0].num_tokens:,} tokens, {size} MiB of text; tokens are equal.")


def measure(folder: Path, num_bytes: int) -> list[Measured]:
    """Return the measurement of every way for a file of ``num_bytes`` bytes in ``folder``, after checking that their
    tokens are equal."""
    file = write_rows(folder / "rows.jsonl", num_bytes)
    os.environ["ALTO_CACHE"] = str(folder / "cache")
    found = [_in_a_child(file, way, folder / "measured.json") for way in WAYS]
    assert len({one.digest for one in found}) == 1, "the ways differ in their tokens"
    return found


def write_rows(file: Path, num_bytes: int) -> Path:
    """Write a file of about ``num_bytes`` bytes, whose rows are texts of random words."""
    words = random.Random(0)
    with file.open("w", encoding="utf-8") as rows:
        while rows.tell() < num_bytes:
            text = " ".join(words.choices(("adapter", "base", "of", "rank", "17", "tune", "x"), k=ROW_CHARS // 5))
            rows.write(json.dumps({"text": text}) + "\n")
    return file


def _in_a_child(file: Path, way: str, result: Path) -> Measured:
    """Return the measurement of ``way`` in a process of its own."""
    child = os.fork()
    if child == 0:
        try:
            result.write_text(json.dumps(asdict(_measured(file, way))), encoding="utf-8")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    values: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    result.unlink()
    return Measured(**values)


def _measured(file: Path, way: str) -> Measured:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("alto-tiny"))
    tokenizer("some text", verbose=False)
    task = Task(model="alto-tiny", dataset=str(file), max_length=MAX_LENGTH, token_cache=way.partition(",")[0])
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before, began = _memory("VmRSS"), time.process_time()
    data = read_task_rows(task).encode(tokenizer)
    encoded = time.process_time()
    train = data.train
    order = DataOrder(len(train), BATCH_ROWS, seed=0)
    for step in range(-(-len(train) // BATCH_ROWS)):
        collate([JobRows(train, 0, tuple(order.rows_of_step(step)))])
    return Measured(
        way=way,
        epoch_s=time.process_time() - encoded,
        encode_s=encoded - began,
        peak_bytes=_memory("VmHWM") - before,
        num_rows=sum(map(len, data.splits)),
        num_tokens=sum(split.num_tokens for split in data.splits),
        digest=digest_of(*data.splits),
    )


def _memory(name: str) -> int:
    """Return bytes of this process: ``VmRSS`` is the memory that it holds, ``VmHWM`` the most that it held."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
