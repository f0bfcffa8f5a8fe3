"""Pages of figures, and their pictures, agree with the result files."""

from __future__ import annotations

import json
import subprocess
from datetime import datetime
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the pictures need the bench extra: pip install -e '.[bench]'")

from benchmarks.paper.experiments import EXPERIMENTS
from tools import make_benchmark_docs as generator

ROOT = Path(__file__).resolve().parents[2]
ROUND_BEGAN = datetime.fromisoformat("2026-11-22T06:30:00+00:00")
"""The start of the work on the next version."""
TO_BE_MEASURED_AGAIN: set[str] = set()
"""Results that may be older, or of a source that is not a commit."""


def test_the_pages_are_generated_from_the_results_as_they_are() -> None:
    for file, text in generator.pages().items():
        assert file.read_text(encoding="utf-8") == text, "run python -m tools.make_benchmark_docs"


def test_the_pictures_are_those_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        line
        for name in ("paper", "benchmarks")
        for line in generator.pages()[generator.DOCS / f"{name}.md"].splitlines()
    ]
    named = {line.partition("(paper/")[2].rstrip(")") for line in lines if line.startswith("![")}
    assert named == {path.name for path in generator.PICTURES.iterdir()}
    monkeypatch.setattr(generator, "PICTURES", tmp_path)
    generator.draw()
    once = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    generator.draw()
    assert once == {path.name: path.read_bytes() for path in tmp_path.iterdir()}, "equal figures, equal pictures"
    assert set(once) == named


def test_every_result_file_and_every_note_has_its_section() -> None:
    results = {file.stem for file in generator.RESULTS_DIR.glob("*.json")}
    known = {f"{found.topic}-{scale}" for found in EXPERIMENTS.values() for scale in found.scales}
    assert results <= known
    assert {file.stem for file in generator.NOTES.glob("*.md")} <= set(EXPERIMENTS)


def test_no_result_is_in_two_pages_or_sections() -> None:
    files = [f"{found.topic}-{scale}" for found in EXPERIMENTS.values() for scale in found.scales if scale != "smoke"]
    assert len(files) == len(set(files))


def test_no_figure_is_older_than_this_round() -> None:
    old = set[str]()
    for file in generator.RESULTS_DIR.glob("*.json"):
        result = json.loads(file.read_text(encoding="utf-8"))
        if datetime.fromisoformat(result["date"]) < ROUND_BEGAN or len(result["commit"]) != 40:
            old.add(file.stem)
            continue
        known = subprocess.run(["git", "cat-file", "-e", result["commit"]], cwd=ROOT, capture_output=True, check=False)
        if known.returncode == 0:  # false in a shallow clone
            command = ["git", "merge-base", "--is-ancestor", result["commit"], "HEAD"]
            merged = subprocess.run(command, cwd=ROOT, check=False)
            assert merged.returncode == 0, f"{file.name}: commit {result['commit']} is not in this history"
    assert old == TO_BE_MEASURED_AGAIN


def test_figures_in_pages_written_by_hand_are_made_from_the_results(tmp_path: Path) -> None:
    """Each number between the marks changes with its result file."""
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    for file in generator.RESULTS_DIR.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    assert generator.with_blocks(page, tmp_path) == page
    file = tmp_path / "generate-cpu.json"
    result = json.loads(file.read_text(encoding="utf-8"))
    result["figures"]["generation_speedup"] = 123.4
    file.write_text(json.dumps(result), encoding="utf-8")
    assert "123.4 times as fast as PEFT with one adapter" in generator.with_blocks(page, tmp_path)
