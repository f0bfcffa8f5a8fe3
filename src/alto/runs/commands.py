"""The commands that messages tell users to run."""

from __future__ import annotations

import shlex
from pathlib import Path

__all__ = ["note_resumption", "resume_command"]


def resume_command(root: str | Path) -> str:
    """Return the shell command that resumes the run or queue in ``root``, with the path quoted for the shell."""
    return f"alto resume {shlex.quote(str(root))}"


def note_resumption(error: BaseException, root: str | Path) -> None:
    """Add the command that resumes the run or queue in ``root`` to a `KeyboardInterrupt`, as a note of the exception.

    Other errors are not changed: their messages already contain the command.
    """
    if isinstance(error, KeyboardInterrupt) and not getattr(error, "__notes__", None):
        error.add_note(f"continue with: {resume_command(root)}")
