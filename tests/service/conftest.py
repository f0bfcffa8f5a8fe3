"""Databases for tests of the service."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from postgres import new_database, running_server

if TYPE_CHECKING:
    from sites import Site

collect_ignore_glob = [] if all(map(importlib.util.find_spec, ("fastapi", "sqlalchemy", "openai"))) else ["test_*.py"]
"""Machines that only measure have neither the extra ``service`` nor OpenAI's client."""


@pytest.fixture(scope="session")
def postgres() -> Iterator[Path]:
    """A running PostgreSQL server; tests that need one are skipped without it."""
    with running_server() as sockets:
        yield sockets


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'alto.db'}"
    return new_database(request.getfixturevalue("postgres"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    from sites import open_site

    with open_site(tmp_path_factory.mktemp("service")) as found:
        yield found
