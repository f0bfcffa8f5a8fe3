"""The page of base models says what the sweep has found."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_generated_from_the_result_as_it_is() -> None:
    spec = importlib.util.spec_from_file_location("make_model_docs", ROOT / "tools" / "make_model_docs.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), "run python tools/make_model_docs.py"
