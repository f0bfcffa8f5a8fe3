"""A PostgreSQL server for tests, in a folder of its own, if Debian's package is installed."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["REQUIRED", "new_database", "running_server"]

REQUIRED = "ALTO_TEST_POSTGRESQL"
"""Environment variable: if it is set, tests fail instead of being skipped without PostgreSQL."""


def _programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


@contextlib.contextmanager
def running_server() -> Iterator[Path]:
    """Run a server that listens only on a socket in the yielded folder."""
    programs = _programs()
    if programs is None:
        assert not os.environ.get(REQUIRED), "expected Debian's package postgresql"
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with tempfile.TemporaryDirectory(prefix="alto-pg-") as folder:
        data, sockets = Path(folder) / "data", Path(folder)
        # The server refuses to run as root.
        as_user = ["runuser", "-u", "postgres", "--"] if getpass.getuser() == "root" else []
        if as_user:
            subprocess.run(["chown", "postgres", folder], check=True)
        run = [*as_user, str(programs / "pg_ctl"), "-D", str(data), "-w", "-s"]
        initialise = [*as_user, str(programs / "initdb"), "-D", str(data), "-U", "alto", "-A", "trust", "--no-sync"]
        subprocess.run(initialise, check=True, capture_output=True, cwd="/")
        options = f"-k {sockets} -c listen_addresses='' -c fsync=off"
        log = ["-l", str(sockets / "log")]
        subprocess.run([*run, *log, "-o", options, "start"], check=True, capture_output=True, cwd="/")
        try:
            yield sockets
        finally:
            subprocess.run([*run, "-m", "immediate", "stop"], check=False, capture_output=True, cwd="/")


def new_database(sockets: Path) -> str:
    """Return the address of a new empty database."""
    import psycopg

    name = f"alto_{secrets.token_hex(6)}"
    with psycopg.connect(host=str(sockets), user="alto", dbname="postgres", autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    return f"postgresql+psycopg://alto@/{name}?host={sockets}"
