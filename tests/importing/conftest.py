"""Configurations of other tools, in the user's current directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign_configs import write_configs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(write_configs(tmp_path / "work"))
    return tmp_path / "work"
