"""Numbers with an exponent are numbers, and texts that look like numbers are written so that they stay texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from alto.spec import Task, load_task
from alto.spec.strict_yaml import read_yaml, write_yaml

BASE = "model: alto-tiny\ndataset: train.jsonl\n"


@pytest.mark.parametrize("written", ["1e-3", "1E-3", "1.e-3", "1.0e-3", "0.1e-2", ".1e-2", "+1e-3", "10e-4"])
@pytest.mark.parametrize(
    "place", ["lr: {}", "search_space: {{lr: [{}, 0.5]}}", "search_space: {{lr: {{min: {}, max: 1, num: 2}}}}"]
)
def test_a_rate_with_an_exponent_is_a_number_in_a_file(written: str, place: str, tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(BASE + place.format(written) + "\n", encoding="utf-8")
    expected = Task(model="alto-tiny", dataset="train.jsonl", **yaml.safe_load(place.format("0.001")))
    assert load_task(file) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e3", 1000.0),
        ("2E-4", 2e-4),
        ("-1e+2", -100.0),
        ("5.e1", 50.0),
        ("[1e2, a1e2, 1e, e1]", [100.0, "a1e2", "1e", "e1"]),
    ],
)
def test_numbers_of_yaml_1_2(text: str, value: object) -> None:
    assert read_yaml(text) == value


@pytest.mark.parametrize("quoted", ["'1e-3'", '"1e-3"'])
def test_quotes_keep_a_text(quoted: str) -> None:
    assert read_yaml(quoted) == "1e-3"


@pytest.mark.parametrize("name", ["1e5", "12E7", "3.e-2"])
def test_a_task_whose_name_looks_like_a_number_is_read_back(name: str, tmp_path: Path) -> None:
    task = Task(name=name, model="alto-tiny", dataset="train.jsonl")
    file = tmp_path / "task.yaml"
    file.write_text(task.to_yaml(), encoding="utf-8")
    assert load_task(file) == task


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.from_regex(r"[-+]?[0-9]*\.?[0-9]*[eE][-+]?[0-9]+", fullmatch=True)
        | st.text("ab1e-.", max_size=6),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text("abe1", min_size=1, max_size=4), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_what_is_written_is_read_back(value: object) -> None:
    assert read_yaml(write_yaml(value)) == value
