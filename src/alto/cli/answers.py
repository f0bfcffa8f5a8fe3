"""Waits for the answer to a command that another process carries out."""

from __future__ import annotations

import time

from alto.runs import Answer, Mailbox, QueueMailbox, RunDir

__all__ = ["wait_for_answer"]

_LOOK_S = 1.0
"""Interval at which the lock of the run is tested while waiting, in seconds."""


def wait_for_answer(
    run: RunDir, mailbox: Mailbox | QueueMailbox, command: str, wait_s: float
) -> tuple[bool, Answer | None]:
    """Return whether a process works on the run or queue, and its answer; stop waiting when the process ends.

    Args:
        run: The run or queue of the mailbox.
        mailbox: Holds the command.
        command: Id of the command.
        wait_s: Longest wait, in seconds.
    """
    gives_up_at = time.monotonic() + wait_s
    while True:
        is_live = run.is_locked()  # tested first: a process answers all commands before it ends
        left_s = max(0.0, gives_up_at - time.monotonic())
        answer = mailbox.wait_for_answer(command, min(left_s, _LOOK_S) if is_live else 0.0)
        if answer is not None or not is_live or not left_s:
            return is_live, answer
