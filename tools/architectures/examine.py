"""Examines one model type in a process of its own, so that a crash or a hang does not end the other examinations."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

from tools.architectures.verdict import Verdict

__all__ = ["examine", "preloaded_context"]

_PRELOAD = ["torch", "transformers", "peft", "alto.executor", "tools.architectures.check"]


def preloaded_context() -> BaseContext:
    """Return a context whose processes have already imported the needed modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def examine(context: Any, model_type: str, time_limit_s: float) -> Verdict:
    """Return the verdict of one model type, found in a process of its own."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_examine, args=(model_type, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(time_limit_s):
            return Verdict(model_type=model_type, status="timeout", reason=f"no answer within {time_limit_s:g} s")
        verdict: Verdict = receiver.recv()
        return verdict
    except EOFError:
        process.join()
        return Verdict(model_type=model_type, status="crash", reason=f"its process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()
        receiver.close()


def _examine(model_type: str, sender: Connection) -> None:
    from tools.architectures.check import check

    sender.send(check(model_type))
    sender.close()
