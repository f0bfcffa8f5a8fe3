from __future__ import annotations

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from alto.spec.validation import plain, yaml_number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-4", "1.0e-4"),
        ("1e5", "1.0e+5"),
        ("2.5e5", "2.5e+5"),
        ("-3.E-2", "-3.0e-2"),
        (" 7 ", "7"),
        ("0.1", "0.1"),
        ("", None),
        ("2*r", None),
        ("1e", None),
        ("nan", None),
    ],
)
def test_yaml_number(text, expected):
    assert yaml_number(text) == expected


@given(st.integers(-999, 999), st.none() | st.integers(0, 999), st.sampled_from(["", "+", "-"]), st.integers(0, 99))
def test_yaml_reads_the_remedy_as_the_number_that_was_meant(whole, fraction, sign, exponent):
    text = f"{whole}{'' if fraction is None else f'.{fraction}'}e{sign}{exponent}"
    assert yaml.safe_load(yaml_number(text)) == float(text)


def test_plain_leaves_only_python_types():
    value = plain([np.float64(0.5), [np.str_("q"), 1], True, None])
    assert value == (0.5, ("q", 1), True, None)
    assert [type(item) for item in value] == [float, tuple, bool, type(None)]
    assert type(value[1][0]) is str
