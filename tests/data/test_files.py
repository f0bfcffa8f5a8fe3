"""Every kind of file, and every way it can be wrong: the message names the place and the remedy."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="needs the data extra: pip install 'alto-lora[data]'")

import pyarrow as pa
import pyarrow.parquet as pq
from budgets import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alto.data.files import read_file
from alto.data.rows import RowError
from alto.errors import AltoError, DataError, DataFormatError, UnsupportedError
from alto.version import install_command

ROWS = [{"prompt": "p", "completion": "c, ü\n2"}, {"prompt": "q", "completion": 'say "d"'}]


def values(path: Path) -> list[dict[str, Any]]:
    return [dict(row.values) for row in read_file(path, "dataset")]


def refusal(path: Path) -> str:
    """Return why the file, or else its first bad row, is refused."""
    with pytest.raises(DataError) as caught:
        _read_whole(path)
    return str(caught.value)


def _read_whole(path: Path) -> None:
    for row in read_file(path, "dataset"):
        if row.fault is not None:
            raise RowError(row.where, row.fault)


def _json_lines(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")


def _json(path: Path) -> None:
    path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")


def _json_object(path: Path) -> None:
    path.write_text(json.dumps({"version": 1, "data": ROWS}), encoding="utf-8")


def _table(delimiter: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8", newline="") as lines:
            table = csv.DictWriter(lines, ["prompt", "completion"], delimiter=delimiter)
            table.writeheader()
            table.writerows(ROWS)

    return write


WRITERS = [
    ("rows.jsonl", _json_lines),
    ("rows.NDJSON", _json_lines),
    ("rows.json", _json),
    ("rows.json", _json_object),
    ("rows.csv", _table(",")),
    ("rows.tsv", _table("\t")),
]


@pytest.mark.parametrize(("name", "write"), WRITERS)
def test_every_ending_gives_the_same_rows_packed_or_not(
    tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    path = tmp_path / name
    write(path)
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert values(path) == ROWS
    assert values(packed) == ROWS


def test_parquet(tmp_path: Path) -> None:
    folder = tmp_path / "day=1"  # not a column of a partition
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    rows = read_file(folder / "rows.parquet", "dataset")
    assert [dict(row.values) for row in rows] == ROWS
    assert rows[1].where == f"{folder / 'rows.parquet'}: row 2"


def test_damaged_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 but no more")
    assert "expected a Parquet file, found something else" in refusal(path)


def test_parquet_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UnsupportedError, match=re.escape(install_command("data"))):
        read_file(path, "dataset")


def test_byte_order_mark_line_ends_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "p"}\r\n\n   \n{"prompt": "q"}')
    assert values(path) == [{"prompt": "p"}, {"prompt": "q"}]
    table = tmp_path / "rows.csv"
    table.write_bytes(b"\xef\xbb\xbfprompt,completion\r\np,c\r\n\r\nq,d")
    assert values(table) == [{"prompt": "p", "completion": "c"}, {"prompt": "q", "completion": "d"}]
    assert read_file(table, "dataset")[1].where == f"{table}:4"


def test_a_row_of_a_table_is_named_by_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('prompt,completion\n"a\nb",c\nx,y\n', encoding="utf-8")
    assert [row.where for row in read_file(path, "dataset")] == [f"{path}:2", f"{path}:4"]


def test_a_line_of_twenty_megabytes(tmp_path: Path) -> None:
    before = 131_072
    csv.field_size_limit(before)
    for name, content in (
        ("rows.jsonl", json.dumps({"text": "x" * 20_000_000})),
        ("rows.csv", "text\n" + "x" * 20_000_000),
    ):
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        assert len(values(path)[0]["text"]) == 20_000_000
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{not json}\n', ":2: expected one JSON object per line, found '{not json}"),
        ("a.jsonl", b'{"a": 1}\n[1, 2]\n', ":2: expected a JSON object, found [1, 2]"),
        ("a.jsonl", b"\nnull\n", ":2: expected a JSON object, found None"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xe9"}\n', ":2: expected UTF-8 text"),
        ("a.jsonl", b'{"a": "\x00"}\n', r"""found '{"a": "\x00"}"""),
        ("a.jsonl", b'{"a": \x1b[31mred}\n', r"""found '{"a": \x1b[31mred}"""),
        ("a.jsonl", b'{"a": 1, "a": 2}\n', ":1: expected one JSON object per line, found the key 'a' given twice"),
        ("a.jsonl", b'{"a": ' + b"[" * 100_000 + b"\n", ":1: expected one JSON object per line, found one nested too"),
        ("a.jsonl", b'{"a": ' + b"9" * 5000 + b"}\n", ":1: expected one JSON object per line, found Exceeds the limit"),
        ("a.jsonl", '{"a": 1}\n'.encode("utf-16"), ":1: expected UTF-8 text"),
        ("a.json", b'{"a": 1}', "or an object with one such list, found an object with 0"),
        ("a.json", b'{"a": [], "b": []}', "with 2 lists; its keys are a, b; keep the list of rows only"),
        ("a.json", b'[\n{"a": 1},\n oops]', "expected a JSON list of rows, found"),
        ("a.json", b"[7]", ": row 1: expected a JSON object, found 7"),
        ("a.json", b"7", "expected a JSON list of rows, found 7; put the rows in a list"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", ":3: expected 2 cells (a, b), found 3; put a text with commas"),
        ("a.csv", b"a,b\n1,2\n1,\"2\n", ":3: expected cells between separators"),
        ("a.csv", b"a,a\n1,2\n", ":1: expected every column once, found 'a' twice"),
        ("a.tsv", b"a;b\n1;2\n", "found semicolons; name the file .csv"),
        ("a.csv", b"a,b\n1,\xff\n", ":2: expected UTF-8 text"),
        ("a.txt", b"hello", "expected a file ending in .jsonl, .ndjson, .json, .csv, .tsv, .parquet"),
        ("a.jsonl", b"", "expected at least one row, found none in"),
        ("a.json", b" ", "expected at least one row, found none in"),
        ("a.json", b"[]", "expected at least one row, found none in"),
        ("a.csv", b"a,b\n", "expected at least one row, found none in"),
    ],
)  # fmt: skip
def test_a_wrong_file_names_place_finding_and_remedy(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    error = refusal(path)
    assert message in error
    assert str(path) in error or path.name in error
    assert error.isprintable()
    assert len(error) < 400 + len(str(path))


def _cut(data: bytes) -> bytes:
    return data[:-9]


def _scramble(data: bytes) -> bytes:
    return data[:12] + bytes(byte ^ 0x5A for byte in data[12:40]) + data[40:]


@pytest.mark.parametrize("damage", [_cut, _scramble, lambda data: b"plain text", lambda data: data[:6]])
def test_damaged_gzip(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "rows.jsonl.gz"
    lines = "".join(json.dumps({"prompt": str(n), "completion": "c" * n}) + "\n" for n in range(50))
    path.write_bytes(damage(gzip.compress(lines.encode())))
    with pytest.raises(
        DataFormatError, match=r"rows.jsonl.gz: expected UTF-8 text packed by gzip, found something else"
    ):
        read_file(path, "dataset")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.tsv", "rows.jsonl.gz", "rows.parquet"])
@settings(max_examples=examples(100), suppress_health_check=list(HealthCheck))
@given(
    content=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode("utf-8", "ignore")))
)
def test_any_bytes_are_read_or_refused_by_name(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with contextlib.suppress(AltoError):
        read_file(path, "dataset")


def test_a_csv_of_semicolons_is_a_table(tmp_path: Path) -> None:
    path = tmp_path / "excel.csv"
    path.write_bytes('\ufeffTicket Text;Category\r\n"Müller, was;\nnun?";Billing\r\n'.encode())
    assert [row.values for row in read_file(path, "dataset")] == [
        {"Ticket Text": "Müller, was;\nnun?", "Category": "Billing"}
    ]
