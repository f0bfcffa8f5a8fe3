"""Databases for tests of the service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres import new_database, running_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[Path]:
    """A running PostgreSQL server; tests that need one are skipped where there is none."""
    with running_server() as sockets:
        yield sockets


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'alto.db'}"
    return new_database(request.getfixturevalue("postgres"))
