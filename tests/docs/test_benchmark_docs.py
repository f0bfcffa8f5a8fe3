"""The page of figures says what the result files say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]

OF_OTHER_PAGES = {
    "architectures",  # docs/models.md
    "batch_size",  # docs/paper.md has these
    "early_exit_quality",
    "patterns",
    "rank_correlation",
    "samples_saved",
    "sensitivity",
    "warmup_sweep",
}


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_benchmark_docs", ROOT / "tools" / "make_benchmark_docs.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    return generator


def test_the_page_is_generated_from_the_results_as_they_are() -> None:
    generator = load_generator()
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), "run python tools/make_benchmark_docs.py"


def test_every_result_file_and_every_note_has_its_section() -> None:
    generator = load_generator()
    results = {file.stem.rpartition("-")[0] for file in generator.RESULTS.glob("*.json")}
    notes = {file.stem for file in generator.NOTES.glob("*.md")}
    assert results - OF_OTHER_PAGES | notes == set(generator.TOPICS)
