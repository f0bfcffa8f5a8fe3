"""Datasets that are not data, never end, are too large, or would write control characters to the terminal."""

from __future__ import annotations

import csv
import gzip
import json
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="needs the data extra: pip install 'alto-lora[data]'")

import pyarrow as pa
import pyarrow.parquet as pq

from alto.cli import main
from alto.data import files
from alto.data.files import read_file
from alto.data.rows import FaultKind, RowError
from alto.errors import DataError

ROW = json.dumps({"prompt": "p", "completion": "c"}) + "\n"
ANSWER = [{"role": "assistant", "content": "a"}]


@pytest.fixture
def hostile(folder: Path) -> Path:
    """The current directory with whatever may be named as a dataset by mistake or by malice."""
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "zero.jsonl").symlink_to("/dev/zero")
    (folder / "loop.jsonl").symlink_to(folder / "loop.jsonl")
    (folder / "rows.csv").write_text("prompt,completion\np,c\np,c,d\n")
    (folder / "hundred.jsonl").write_text(ROW * 99 + "{no json\n")
    (folder / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + ROW.encode() + b"\xef\xbb\xbf{\n")
    (folder / "plain.jsonl.gz").write_text(ROW)
    (folder / "torn.jsonl.gz").write_bytes(gzip.compress(ROW.encode() * 100)[:-9])
    (folder / "no.parquet").write_text(ROW)
    (folder / "empty.jsonl").write_text("\n\n")
    (folder / "escape.jsonl").write_text(json.dumps({"\x1b[31mprompt\u202e": "<script>"}) + "\n")
    (folder / "name\x1b[31m\u202e.jsonl").write_text("{no json\n")
    (folder / "pairs.jsonl").write_text(json.dumps({"prompt": "p", "chosen": "c", "rejected": "r"}) + "\n")
    (folder / "one.jsonl").write_text(ROW)
    (folder / "silent.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "q"}]}) + "\n")
    return folder


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("absent.jsonl", "DataFileNotFoundError: dataset: expected a file"),
        ("gsm8k/../x", "dataset: expected a file, a hub dataset (owner/name) or one of gsm8k"),
        ("../gsm8k", "did you mean 'gsm8k'?"),
        ("owner/..", "DataError: dataset: expected"),
        (".", "dataset: expected a file, found the folder "),
        ("pipe.jsonl", "dataset: expected a file, found a pipe or device at "),
        ("zero.jsonl", "zero.jsonl; save the rows in a file and name that"),
        ("/dev/zero", "found a pipe or device at /dev/zero"),
        ("loop.jsonl", "found nothing at loop.jsonl"),
        ("rows.csv", "rows.csv:3: expected 2 cells"),
        ("hundred.jsonl", "hundred.jsonl:100: expected one JSON object per line, found '{no json"),
        ("bom.jsonl", "bom.jsonl:2: expected one JSON object per line"),
        ("plain.jsonl.gz", "plain.jsonl.gz: expected UTF-8 text packed by gzip"),
        ("torn.jsonl.gz", "torn.jsonl.gz: expected UTF-8 text packed by gzip"),
        ("no.parquet", "no.parquet: expected a Parquet file"),
        ("empty.jsonl", "dataset: expected at least one row, found none in"),
        ("escape.jsonl", r"found \x1b[31mprompt\u202e"),
        ("name\x1b[31m\u202e.jsonl", r"name\x1b[31m\u202e.jsonl:1: expected one JSON object"),
        ("pairs.jsonl", "dataset: expected rows with one reply for method sft, found preference pairs (preference"),
        ("one.jsonl", "validation_split: expected at least 2 rows to split, found 1"),
        ("silent.jsonl", "silent.jsonl:1: expected at least one assistant message"),
    ],
)
def test_no_dataset(refusal: Any, hostile: Path, dataset: str, message: str) -> None:
    error = refusal("preview", dataset)
    assert message in error
    (hostile / "task.yaml").write_text(json.dumps({"model": "alto-tiny", "dataset": dataset}), encoding="utf-8")
    assert message in refusal("tune", "task.yaml", "--set", "name=x")


PAIR = {"prompt": "p", "chosen": "c", "rejected": "r"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "p", "completion": "c"}], "dataset: expected preference pairs for method dpo, found rows"),
        ([{"prompt": "p", "chosen": "c"}], "pairs.jsonl:1: expected the columns of a form: preference (chosen, "),
        ([PAIR, {"chosen": "c", "rejected": "r"}], "pairs.jsonl:2: expected a prompt beside chosen and rejected"),
        ([PAIR, {**PAIR, "rejected": None}], "pairs.jsonl:2: expected rejected to be a text, found None"),
        ([{**PAIR, "rejected": "c"}, {**PAIR, "chosen": "\t"}], "pairs.jsonl:2: expected two replies with a text"),
        ([{**PAIR, "prompt": "long " * 2000}], "found none of 1 with two different replies in max_length 1024; raise"),
        (
            [{side: [{"role": "user", "content": side}, *ANSWER] for side in ("chosen", "rejected")}],
            "pairs.jsonl:1: expected both conversations of a pair to begin with the same turn, the prompt, found",
        ),
        ([{"prompt": "\x1b[31m\u202e", "chosen": "c", "rejected": 7}], "expected rejected to be a text, found 7"),
    ],
)  # fmt: skip
def test_no_pairs(refusal: Any, folder: Path, rows: list[dict[str, Any]], message: str) -> None:
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    keys = ("--set", "method=dpo", "--set", "validation_dataset=pairs.jsonl")
    assert message in refusal("preview", "pairs.jsonl", *keys)
    assert message in refusal("tune", "task.yaml", *keys, "--set", "dataset=pairs.jsonl")


def test_nothing_is_left_of_the_rows(refusal: Any) -> None:
    assert "none of 24 with a completion in max_length 1; raise" in refusal(
        "tune", "task.yaml", "--set", "max_length=1", "--set", "validation_dataset=train.jsonl"
    )


NUM_COLUMNS = 2000


class Compared(str):
    """The name of a column; counts its comparisons."""

    num_times = 0

    def __eq__(self, other: object) -> bool:
        Compared.num_times += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


class ComparedCells:
    """A CSV reader whose cells are all of this type."""

    def __init__(self, lines: Iterable[str], **options: Any) -> None:
        self._table = csv.reader(lines, **options)

    @property
    def line_num(self) -> int:
        return self._table.line_num

    def __iter__(self) -> Iterator[list[str]]:
        return self

    def __next__(self) -> list[str]:
        return list(map(Compared, next(self._table)))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> type[Compared]:
    """The class whose instances replace the names that ``read_file`` finds; it counts their comparisons."""
    without_duplicates = files._without_duplicates
    pairs_of = lambda pairs: [(Compared(key), value) for key, value in pairs]  # noqa: E731
    monkeypatch.setattr(files, "_without_duplicates", lambda pairs: without_duplicates(pairs_of(pairs)))
    kept = {"field_size_limit": csv.field_size_limit, "Error": csv.Error}
    monkeypatch.setattr(files, "csv", SimpleNamespace(reader=ComparedCells, **kept))
    monkeypatch.setattr(Compared, "num_times", 0)
    return Compared


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("wide.csv", ",".join(f"c{index}" for index in range(NUM_COLUMNS)) + "\n", "found none in"),
        ("twice.csv", ",".join(f"c{index}" for index in range(NUM_COLUMNS)) + ",c1999\n", "found 'c1999' twice"),
        ("twice.jsonl", "{" + '"a": 1, ' * NUM_COLUMNS + '"b": 1, "b": 2}\n', "the key 'a' given twice"),
        ("twice.json", "[{" + "".join(f'"c{index}": 1, ' for index in range(NUM_COLUMNS)) + '"b": 1, "b": 2}]', "'b'"),
    ],
    ids=["columns", "columns twice", "one key often", "many keys"],
)  # fmt: skip
def test_each_of_many_columns_is_looked_at_once(
    tmp_path: Path, compared: type[Compared], name: str, content: str, message: str
) -> None:
    """Comparing each with each would take hours for a million columns."""
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        _read_whole(path)
    assert compared.num_times <= 4 * NUM_COLUMNS


def _read_whole(path: Path) -> None:
    for row in read_file(path, "dataset"):
        if row.fault is not None:
            raise RowError(row.where, row.fault)


def test_comparisons_of_names_are_counted(tmp_path: Path, compared: type[Compared]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1, "b": 2}\n', encoding="utf-8")
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    for name in ("rows.jsonl", "rows.csv"):
        (row,) = read_file(tmp_path / name, "dataset")
        before = compared.num_times
        assert list(row.values).count("c") == 0
        assert compared.num_times == before + 2


@pytest.mark.parametrize("line", ["", "\n"], ids=["one line", "many lines"])
@pytest.mark.parametrize("ending", ["jsonl.gz", "json.gz", "csv.gz"])
def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, ending: str) -> None:
    monkeypatch.setattr("alto.data.files._MIN_UNPACKED_BYTES", 1024**2)
    path = tmp_path / f"rows.{ending}"
    with gzip.open(path, "wb", compresslevel=1) as packed:
        for _ in range(200):
            packed.write((b" " * 1023 + (line.encode() or b" ")) * 1024)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"at most 50 times the file's own size .*, found more; unpack it with gunzip"):
        read_file(path, "dataset")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 180 * 1024


def test_what_merely_packs_well_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(ROW.encode() * 50_000))
    assert path.stat().st_size * 50 < len(ROW) * 50_000
    assert len(read_file(path, "dataset")) == 50_000


@pytest.mark.parametrize(
    "column",
    [
        pa.array([10**15], pa.timestamp("s")),
        pa.array([2**62], pa.duration("s")),
        pa.array([10**9], pa.int32()).view(pa.date32()),
        pa.array([1], pa.timestamp("s", tz="Nowhere/Here")),
    ],
    ids=str,
)
def test_parquet_values_that_python_cannot_hold(tmp_path: Path, column: pa.Array) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": column}), path)
    [row] = read_file(path, "dataset")
    assert row.where.endswith("rows.parquet: row 1")
    assert row.fault is not None
    assert row.fault.kind == FaultKind.UNREADABLE
    assert row.fault.reason.startswith("expected values that Python can hold")


def test_rows_in_both_splits_are_noted_and_escapes_stay_written_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\x1b]0;owned\x07<script>alert(1)</script>[bold]\u202e"
    rows = folder / f"{text.replace('/', '')}.jsonl"
    rows.write_text((json.dumps({"prompt": text, "completion": text}) + "\n") * 12, encoding="utf-8")
    (folder / "task.yaml").write_text(json.dumps({"model": "alto-tiny", "dataset": rows.name, "max_steps": 1}))
    monkeypatch.setattr(sys, "argv", ["alto", "tune", "task.yaml", "--set", "validation_dataset=null"])
    with pytest.raises(SystemExit, match="0"):
        main()
    out, err = capsys.readouterr()
    shown = (out + err).replace("\n", "")
    assert shown.isprintable()
    assert "also in the training data" in " ".join((out + err).split())
    (run,) = (folder / "runs").iterdir()
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<script>alert(1)" not in page
    assert "\x1b" not in page
