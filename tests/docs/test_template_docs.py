"""The page of chat templates describes what both libraries do, with a reason for every difference."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")

import trl


@pytest.fixture(scope="module")
def generator() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # trl's own
        from tools import make_template_docs
    return make_template_docs


def test_the_page_is_what_both_libraries_do(generator: Any) -> None:
    written = generator.PAGE.read_text(encoding="utf-8")
    version = re.search(r"with TRL (\S+);", written)
    assert version is not None
    if version[1] != trl.__version__:
        pytest.skip(f"the page was written with trl {version[1]}, installed is {trl.__version__}")
    assert written == generator.page(), "run python -m tools.make_template_docs"


def test_every_reply_is_trained_under_every_template(generator: Any) -> None:
    """Independently of the letters: in a row whose reply is words, these words and an end are trained."""
    for model in generator.TEMPLATES:
        tokenizer = generator.make_tokenizer(model)
        for name in ("one turn", "one word", "two turns"):
            case = generator.CASES[name]
            rows = generator.of_alto(case, tokenizer)
            trained = "".join(generator.trained_text(row, tokenizer) for row in rows)
            for message in case["messages"]:
                assert (message["content"] in trained) == (message["role"] == "assistant"), (model, name)
            ends = [token for row in rows for token, on in zip(row.ids, row.mask, strict=True) if on][-2:]
            assert tokenizer.eos_token_id in ends, (model, name)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ((False, True, False), (False, False, True)),  # trains a token that TRL does not train
        ((False, True, False), (False, True, True)),  # lacks a token that follows
    ],
)
def test_a_difference_without_a_reason_fails(generator: Any, ours: tuple[bool, ...], theirs: tuple[bool, ...]) -> None:
    rows = [generator.Masked(ids=(1, 2, 3), mask=ours)]
    with pytest.raises(ValueError, match="a difference without a reason"):
        generator.compared(rows, generator.Masked(ids=(1, 2, 3), mask=theirs), 9)
