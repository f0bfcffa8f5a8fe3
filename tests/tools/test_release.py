"""``make release``: the parts that decide, without building or installing anything."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import alto
from tools import release
from tools.release import contents_faults, find_python, forbidden, release_notes

ROOT = Path(__file__).parents[2]


def test_notes_are_the_section_of_the_version() -> None:
    changelog = "# Changelog\n\n## Unreleased\n\n- new\n\n## 1.2.0 (a day)\n\n### Added\n\n- a\n\n## 1.2.0.1\n\n- old\n"
    assert release_notes(changelog, "1.2.0") == "# ALTO 1.2.0\n\n### Added\n\n- a\n"
    for absent in ("1.2", "2.0.0"):
        with pytest.raises(ValueError, match=rf"expected a section '## {re.escape(absent)}"):
            release_notes(changelog, absent)
    assert len(release_notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), alto.__version__)) > 100


def test_missing_and_additional_files_are_faults() -> None:
    assert contents_faults(["a", "b"], ["b", "a"]) == []
    assert contents_faults(["a", "junk.pyc"], ["a", "b"]) == ["lacks b", "should not have junk.pyc"]


@pytest.mark.parametrize(
    ("licence", "is_allowed"),
    [
        ("MIT License", True),
        ("Apache-2.0", True),
        ("Apache Software License; BSD License", True),
        ("Apache-2.0 AND BSD-3-Clause", True),
        ("GPL-3.0 OR MIT", True),
        ("Apache-2.0 AND CNRI-Python", True),
        ("Apache-2.0 WITH LLVM-exception AND BSL-1.0 AND MIT", True),
        ("BSL-1.1", False),
        ("Mozilla Public License 2.0 (MPL 2.0)", True),
        ("MIT; GPL-3.0", False),
        ("Apache-2.0 AND GPL-2.0-only", False),
        ("GNU General Public License v3 (GPLv3)", False),
        ("UNKNOWN", False),
    ],
)
def test_a_licence_has_to_be_on_the_list(licence: str, is_allowed: bool) -> None:
    found = forbidden([{"Name": "package", "Version": "1", "License": licence}])
    assert found == ([] if is_allowed else [f"package 1: {licence}"])


def test_an_interpreter_is_found_by_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert find_python(own) is None
    folder = tmp_path / "versions" / f"{own}.99" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    assert find_python(own) == str(folder / "python")
    (tmp_path / "versions" / "3.99.1" / "bin").mkdir(parents=True)
    (tmp_path / "versions" / "3.99.1" / "bin" / "python").symlink_to(sys.executable)
    assert find_python("3.99") is None  # it is of another version


def test_a_version_of_python_that_is_missing_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / f"alto_lora-{alto.__version__}-py3-none-any.whl"
    monkeypatch.setattr(release, "build", lambda out: (wheel, wheel, alto.__version__))
    monkeypatch.setattr(release, "try_out", lambda *_: [])
    monkeypatch.setattr(release, "find_python", lambda version: None if version == "3.12" else "python")
    assert release.main(["--out", str(tmp_path)]) == 1
    assert "Python 3.12: not tried, because this machine has no such interpreter" in capsys.readouterr().out
    assert release.main(["--out", str(tmp_path), "--pythons", "3.11"]) == 0
    notes = (tmp_path / f"release-notes-{alto.__version__}.md").read_text(encoding="utf-8")
    assert notes.startswith(f"# ALTO {alto.__version__}\n")
    monkeypatch.setattr(release, "try_out", lambda *_: ["odd 1: GPL-3.0"])
    assert release.main(["--out", str(tmp_path), "--pythons", "3.11"]) == 1
    assert "licence that is not allowed: odd 1: GPL-3.0" in capsys.readouterr().out
