"""The command line on bad input; what all refusals have in common is checked here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from forks import run_code
from tiny import write_rows

from alto.cli import main

Refusal = Callable[..., str]

AS_NOBODY = """
import contextlib, io, os, sys
from alto.cli import main

sys.argv = ["alto", *{like!r}]
with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
    main()
if os.geteuid() == 0:
    os.seteuid(65534)
sys.argv = ["alto", *{arguments!r}]
main()
"""

TASK = "model: alto-tiny\ndataset: train.jsonl\nmax_steps: 1\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a valid task."""
    write_rows(tmp_path / "train.jsonl")
    (tmp_path / "task.yaml").write_text(TASK, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refusal(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refusal:
    """``refusal("tune", "task.yaml")`` returns what ``alto`` prints to stderr when it refuses its arguments."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["alto", *map(str, arguments)])
        before = sorted(folder.rglob("*"))
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return checked(ended.value.code, out, err, is_unchanged=sorted(folder.rglob("*")) == before)

    return run


@pytest.fixture
def refusal_to_nobody(folder: Path) -> Refusal:
    """The same for a user without permissions, where the tests run as root, who may read everything.

    It runs in a process of its own, because a user id belongs to all threads. This user may be unable to read Python's
    library, some of which is imported on first use; so root is refused first, with the arguments ``like``.
    """

    def run(*arguments: str, like: Sequence[str]) -> str:
        before = sorted(folder.rglob("*"))
        done = run_code(AS_NOBODY.format(like=list(like), arguments=list(arguments)), cwd=folder)
        is_unchanged = sorted(folder.rglob("*")) == before
        return checked(done.returncode, done.stdout, done.stderr, is_unchanged=is_unchanged)

    return run


def checked(code: object, out: str, err: str, *, is_unchanged: bool) -> str:
    """Check what all refusals have in common, and return the message."""
    assert code == 1, err
    assert out == ""
    assert err.partition(":")[0].endswith("Error"), err
    assert err.replace("\n", "").isprintable()
    assert len(err) < 2000
    assert is_unchanged, "a half-written file was left"
    return err
