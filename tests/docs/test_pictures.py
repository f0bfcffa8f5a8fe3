"""The pictures of README.md: ``make lint`` names every source that has changed since they were made."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("openai", reason="the extra dev is not installed")
pytest.importorskip("pexpect", reason="the extra dev is not installed")
pytest.importorskip("playwright", reason="the extra dev is not installed")
pytest.importorskip("pyte", reason="the extra dev is not installed")

from tools.make_pictures import DIGESTS, DRAWN_BY, PICTURES, ROOT, changed_sources, write_digests


def test_changed_new_and_removed_sources_are_named(tmp_path: Path) -> None:
    for place in DRAWN_BY:
        copy = shutil.copytree if (ROOT / place).is_dir() else shutil.copy
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / place, tmp_path / place)
    (tmp_path / PICTURES).mkdir(parents=True)
    write_digests(tmp_path)
    assert changed_sources(tmp_path) == []
    with (tmp_path / "src/alto/report/templates/report.css").open("a", encoding="utf-8") as file:
        file.write("h1 { color: red; }\n")
    (tmp_path / "src/alto/views/new.py").touch()
    (tmp_path / "src/alto/service/dashboard/static/dashboard.js").unlink()
    assert changed_sources(tmp_path) == [
        "src/alto/report/templates/report.css",
        "src/alto/service/dashboard/static/dashboard.js",
        "src/alto/views/new.py",
    ]
    assert (ROOT / DIGESTS).is_file()
