"""Files from outside: a regular file of sane size, or an error at once."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from alto.base.files import is_number, read_bytes, read_json


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_a_regular_file_is_read_whole_and_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_bytes(tmp_path / "file", 5) == read_bytes(tmp_path / "link", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_bytes(tmp_path / "file", 4)


def test_a_pipe_without_a_writer_is_not_waited_for(pipe: Path) -> None:
    with pytest.raises(OSError, match="not a regular file"):
        read_bytes(pipe, 5)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path, 5)
    with pytest.raises(OSError, match="not a regular file"):
        read_bytes(Path("/dev/zero"), 5)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(tmp_path / "socket"))
        with pytest.raises(OSError, match=r"No such device|not a regular file"):
            read_bytes(tmp_path / "socket", 5)


@pytest.mark.parametrize("text", ["", "{", "NaN", '{"a": Infinity}', "[" * 100_000, "\xff", "9" * 5000])
def test_what_is_no_strict_json_is_a_value_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError):  # noqa: PT011  (json's own words)
        read_json(tmp_path / "file")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2, -0.1, True, "1", None, 10**400])
def test_numbers_have_bounds(value: object) -> None:
    assert is_number(0.5, least=0, most=1)
    assert not is_number(value, least=0, most=1)
