"""Databases for tests of the service."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres import new_database, running_server

collect_ignore_glob = [] if all(map(importlib.util.find_spec, ("fastapi", "sqlalchemy", "openai"))) else ["test_*.py"]
"""Machines that only measure have neither the extra ``service`` nor OpenAI's client."""


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
