"""Every form a row may have, and every way a file can be wrong: the message says where and what to do."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alto.data import Message, read_conversations
from alto.errors import DataError, DataFileNotFoundError, DataFormatError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def build(*lines: Any, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        path.write_text(text, encoding="utf-8")
        return path

    return build


def turns(*pairs: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message(role, content) for role, content in pairs)


MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": MESSAGES}, turns(("system", "s"), ("user", "u"), ("assistant", "a"))),
        ({"messages": MESSAGES[2:]}, turns(("assistant", "a"))),
        ({"messages": MESSAGES[1:] * 2, "id": 7}, turns(("user", "u"), ("assistant", "a")) * 2),
        ({"prompt": "p", "completion": "c"}, turns(("user", "p"), ("assistant", "c"))),
        ({"question": "q", "answer": "a"}, turns(("user", "q"), ("assistant", "a"))),
        (
            {"system": "s", "question": "q", "answer": "a"},
            turns(("system", "s"), ("user", "q"), ("assistant", "a")),
        ),
        ({"system": "s", "prompt": "p", "completion": "c"}, turns(("system", "s"), ("user", "p"), ("assistant", "c"))),
        ({"system": None, "prompt": "p", "completion": "c"}, turns(("user", "p"), ("assistant", "c"))),
        ({"system": "", "prompt": "p", "completion": "c"}, turns(("user", "p"), ("assistant", "c"))),
        ({"prompt": "é 漢", "completion": ""}, turns(("user", "é 漢"), ("assistant", ""))),
    ],
)
def test_every_form(write: Write, row: dict[str, Any], expected: tuple[Message, ...]) -> None:
    assert read_conversations(write(row)) == [expected]


def test_rows_keep_their_order_and_may_mix_forms(write: Write) -> None:
    rows = [{"prompt": "1", "completion": "x"}, {"question": "2", "answer": "x"}, {"messages": MESSAGES[1:]}]
    assert [row[0].content for row in read_conversations(write(*rows))] == ["1", "2", "u"]


def test_gzip_reads_as_plain(write: Write, tmp_path: Path) -> None:
    plain = write({"prompt": "p", "completion": "ü"}, {"question": "q", "answer": "a"})
    zipped = tmp_path / "rows.jsonl.gz"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_conversations(zipped) == read_conversations(plain)


def test_byte_order_mark_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "p", "completion": "c"}\r\n\n   \n{"prompt": "q", "completion": "d"}')
    assert [row[0].content for row in read_conversations(path)] == ["p", "q"]


def test_home_is_expanded(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write({"prompt": "p", "completion": "c"})
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(read_conversations("~/rows.jsonl")) == 1


GOOD = {"prompt": "p", "completion": "c"}
NO_CONTENT = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant"}]}
WRONG_ROLE = {"messages": [{"role": "human", "content": "u"}]}
PARTS = {"messages": [{"role": "assistant", "content": [{"type": "text"}]}]}


@pytest.mark.parametrize(
    ("bad", "found", "remedy"),
    [
        ("{not json}", "'{not json}", "write every row on one line"),
        ('{"prompt":', '\'{"prompt":', "write every row on one line"),
        ([1, 2], "list", "name its columns"),
        ("null", "NoneType", "name its columns"),
        ({}, "none", "rename the columns"),
        ({"instruction": "i", "output": "o"}, "instruction, output", "rename the columns"),
        ({"prompt": "p", "answer": "a"}, "prompt, answer", "rename the columns"),
        ({"prompt": 5, "completion": "c"}, "prompt to be a text, found 5", "correct the row"),
        ({"prompt": "p", "completion": None}, "completion to be a text, found None", "correct the row"),
        ({"system": {"a": 1}, **GOOD}, "system to be a text, found {'a': 1}", "correct the row"),
        ({"messages": "hello"}, "'hello'", "correct the row"),
        ({"messages": []}, "[]", "correct the row"),
        ({"messages": ["hello"]}, "'hello'", "correct the row"),
        (NO_CONTENT, "{'role': 'assistant'}", "correct the row"),
        (WRONG_ROLE, "'human'", "correct the row"),
        (PARTS, "[{'type': 'text'}]", "correct the row"),
        ({"messages": MESSAGES[:2]}, "none", "add it"),
    ],
)
def test_wrong_row_names_file_line_and_remedy(write: Write, bad: Any, found: str, remedy: str) -> None:
    path = write(GOOD, "", bad, GOOD)
    with pytest.raises(DataFormatError) as caught:
        read_conversations(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: expected ")
    assert found in message
    assert message.endswith(remedy)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataFileNotFoundError, match=r"found nothing at .*absent.jsonl; check the path") as caught:
        read_conversations(tmp_path / "absent.jsonl")
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(DataFileNotFoundError):
        read_conversations(tmp_path)


@pytest.mark.parametrize("lines", [(), ("", "  ")])
def test_no_rows(write: Write, lines: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match=r"found none in .*rows.jsonl; is it the right file"):
        read_conversations(write(*lines))


def test_other_file_types_are_refused(write: Write) -> None:
    with pytest.raises(DataFormatError, match=r"\.jsonl or \.jsonl\.gz .* found rows\.csv; convert it"):
        read_conversations(write("a,b", name="rows.csv"))


def _cut(data: bytes) -> bytes:
    return data[:-9]


def _scramble(data: bytes) -> bytes:
    return data[:12] + bytes(byte ^ 0x5A for byte in data[12:40]) + data[40:]


@pytest.mark.parametrize("damage", [_cut, _scramble, lambda data: b"plain text", lambda data: data[:6]])
def test_damaged_gzip(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "rows.jsonl.gz"
    lines = "".join(json.dumps({"prompt": str(n), "completion": "c" * n}) + "\n" for n in range(50))
    path.write_bytes(damage(gzip.compress(lines.encode())))
    with pytest.raises(DataFormatError, match=r"rows.jsonl.gz: expected UTF-8 text, found .*; save it as UTF-8"):
        read_conversations(path)


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"prompt": "é", "completion": "c"}'.encode("latin-1"))
    with pytest.raises(DataFormatError, match="expected UTF-8 text"):
        read_conversations(path)
