"""Parts of a measurement that is killed and started again."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from benchmarks.parts import Part, forget_parts, measured_rows


def parts_of(inputs: tuple[Path | str, ...], measured: list[str], broken: str = "") -> dict[str, Part]:
    def measure(name: str, folder: Path) -> tuple[list[dict[str, str]], list[str]]:
        assert not list(folder.iterdir())
        if name == broken:
            raise KeyboardInterrupt
        measured.append(name)
        return [{"part": name}], []

    return {name: Part(measure=partial(measure, name), inputs=inputs) for name in ("a", "b")}


def test_measured_parts_are_not_measured_again(tmp_path: Path) -> None:
    measured = list[str]()
    with pytest.raises(KeyboardInterrupt):
        measured_rows(tmp_path, parts_of((), measured, broken="b"))
    assert measured_rows(tmp_path, parts_of((), measured)) == ([{"part": "a"}, {"part": "b"}], [])
    assert measured == ["a", "b"]
    forget_parts(tmp_path, ["a"])
    measured_rows(tmp_path, parts_of((), measured))
    assert measured == ["a", "b", "a"]


def test_parts_of_other_inputs_are_measured_again(tmp_path: Path) -> None:
    rows, model = tmp_path / "train.jsonl", tmp_path / "model"
    model.mkdir()
    for number, change in enumerate(
        [
            lambda: rows.write_text("1"),
            lambda: rows.write_text("22"),
            lambda: (model / "weights").write_bytes(b"1"),
            lambda: (model / "weights").write_bytes(b"22"),
        ],
        start=1,
    ):
        change()
        measured = list[str]()
        for _ in range(2):
            measured_rows(tmp_path / "out", parts_of((rows, model), measured))
        assert measured == ["a", "b"], number
    measured_rows(tmp_path / "out", parts_of(("owner/model",), measured))
    assert measured == ["a", "b"] * 2


def test_one_with_failures_is_not_kept(tmp_path: Path) -> None:
    part = Part(measure=lambda _: ([{"x": 1}], ["wrong"]), inputs=())
    assert measured_rows(tmp_path, {"a": part}) == ([{"x": 1}], ["a: wrong"])
    assert not (tmp_path / ".paper").exists()
