"""The page of base models agrees with the results."""

from __future__ import annotations

from tools import make_model_docs as generator


def test_the_page_is_generated_from_the_result_as_it_is() -> None:
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), "run python -m tools.make_model_docs"
