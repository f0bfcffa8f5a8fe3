"""Several processes, one per rank, that do the same checks one after the other."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from forks import forks

__all__ = ["NOT_REACHED", "failures_on_ranks"]

NOT_REACHED = "not reached: a check before it failed"
_TIMEOUT_S = 600.0
_COLLECTIVE_TIMEOUT = timedelta(minutes=3)
"""Time limit. Ranks share few cores, and one may be far ahead of another."""

Check = Callable[..., None]


def failures_on_ranks(
    num_ranks: int, checks: Iterable[tuple[str, Check, tuple[Any, ...]]], folder: Path
) -> dict[str, str]:
    """Call every check with its arguments on every rank, one after the other.

    A check that fails ends its rank, and so all ranks: otherwise the tensors that it should have gathered with the
    others would meet the next check.

    Args:
        checks: A name, a function that can be imported, and its arguments.
        folder: An empty folder.

    Returns:
        Failures by the name of the check; checks that are missing passed on all ranks.
    """
    checks = list(checks)
    context = forks()
    queue = context.Queue()
    processes = [
        context.Process(
            target=_serve, args=(rank, num_ranks, checks, str(folder / "store"), queue, dict(os.environ)), daemon=True
        )
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        reports = [queue.get(timeout=_TIMEOUT_S) for _ in processes]
    finally:
        for process in processes:
            process.terminate()
            process.join()
    failures: dict[str, str] = {}
    for _, failed, reason in reports:
        if failed is not None:
            failures[failed] = failures.get(failed, "") + reason
    least = min(len(passed) for passed, _, _ in reports)
    for name, _, _ in checks[least:]:
        failures.setdefault(name, NOT_REACHED)
    return failures


def _serve(
    rank: int,
    num_ranks: int,
    checks: list[tuple[str, Check, tuple[Any, ...]]],
    store: str,
    queue: Any,
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)
    passed: list[str] = []
    failed, reason = None, ""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=_COLLECTIVE_TIMEOUT
    )
    for name, check, args in checks:
        try:
            check(*args)
        except BaseException:
            failed, reason = name, f"rank {rank}: {traceback.format_exc()}"
            break
        passed.append(name)
    queue.put((passed, failed, reason))
    if failed is None:
        dist.destroy_process_group()
