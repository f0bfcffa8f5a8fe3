from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.spec.strict_yaml import read_yaml
from alto.spec.validation import is_number_text, plain


@pytest.mark.parametrize("text", ["1e-4", "1e5", "2.5E5", "-3.E-2", " 7 ", "0.1", ".5", ".5e3", "+2"])
def test_what_a_file_reads_as_a_number(text):
    assert is_number_text(text)
    assert read_yaml(text) == float(text)
    assert isinstance(read_yaml(text), int | float)


@pytest.mark.parametrize("text", ["", "2*r", "1e", "e5", "nan", "1e-4x", "1.2.3", "--1", "0x1f", "1 2"])
def test_what_is_no_number(text):
    assert not is_number_text(text)


@given(
    st.integers(-999, 999),
    st.none() | st.integers(0, 999),
    st.sampled_from("eE"),
    st.sampled_from(["", "+", "-"]),
    st.integers(0, 99),
)
def test_the_remedy_is_read_as_the_number_that_was_meant(whole, fraction, mark, sign, exponent):
    text = f"{whole}{'' if fraction is None else f'.{fraction}'}{mark}{sign}{exponent}"
    assert is_number_text(text)
    assert read_yaml(text) == float(text)


def test_plain_leaves_only_python_types():
    value = plain([np.float64(0.5), [np.str_("q"), 1], True, None])
    assert value == (0.5, ("q", 1), True, None)
    assert [type(item) for item in value] == [float, tuple, bool, type(None)]
    assert type(value[1][0]) is str
