"""Commands in messages can be copied into a shell."""

from __future__ import annotations

import shlex

import pytest

from alto.base import note_resumption, resume_command


@pytest.mark.parametrize("root", ["runs/a-1", "/my runs/a-1", "runs/it's", "runs/$HOME;x"])
def test_a_shell_reads_the_path_as_one_word(root: str) -> None:
    assert shlex.split(resume_command(root)) == ["alto", "resume", root]


def test_only_an_interrupt_by_the_user_gets_a_note_and_only_one() -> None:
    stop, other = KeyboardInterrupt(), RuntimeError()
    note_resumption(stop, "/my runs/a")
    note_resumption(stop, "/elsewhere")
    note_resumption(other, "/my runs/a")
    assert stop.__notes__ == ["continue with: alto resume '/my runs/a'"]
    assert not hasattr(other, "__notes__")
