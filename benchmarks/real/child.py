"""``python -m benchmarks.real.child``: tunes a task as ``alto tune`` does, in a process of its own.

The request is on stdin, and the result on the last line of stdout; both are JSON. The journal has no durations of
evaluations, so the calls of the functions that evaluate and measure are timed here.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from alto import Engine, Task
from alto.engine import runner
from alto.executor.trainer import Trainer

__all__ = ["answer"]


class CallTimes:
    """Sums the durations of calls by name. A call within another timed call counts as a part of the outer one.

    Attributes:
        total_s: Seconds by name; 0 for a name that was never called.
    """

    def __init__(self) -> None:
        self.total_s: dict[str, float] = defaultdict(float)
        self._is_within = False

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` in a form whose calls are timed under ``name``."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_within:
                return function(*args, **kwargs)
            self._is_within, began = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.total_s[name] += time.perf_counter() - began
                self._is_within = False

        return call


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Tune the task of ``request``.

    Returns:
        ``run_dir``; ``evaluation_s``, seconds of evaluations of jobs and of the base; ``measuring_s``, seconds of
        measuring steps and choosing the packing, evaluations among them included.
    """
    torch.set_num_threads(request["threads"])
    times = CallTimes()
    with (
        mock.patch.object(Trainer, "evaluate", times.timed("evaluation", Trainer.evaluate)),
        mock.patch.object(Trainer, "evaluate_base", times.timed("evaluation", Trainer.evaluate_base)),
        mock.patch.object(runner, "pack", times.timed("measuring", runner.pack)),
    ):
        result = Engine(output_dir=request["output_dir"]).tune(Task(**request["task"]))
    return {
        "run_dir": result.run_dir,
        "evaluation_s": times.total_s["evaluation"],
        "measuring_s": times.total_s["measuring"],
    }


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
