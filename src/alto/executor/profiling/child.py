"""Runs a measurement in a separate process: ``python -m alto.executor.profiling.child``.

It reads a request from stdin. It writes lines to stdout: first the expected remaining time, again and again, and at
last the measurements; all as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from alto.backbone import is_out_of_memory, load_backbone
from alto.errors import DeviceMemoryError
from alto.executor.profiling.measure import measure
from alto.executor.profiling.sketch import RowLength, SpanLength
from alto.spec import Task


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the result of :func:`measure`; if nothing fits into memory, ``no_memory`` with the reason."""
    torch.set_num_threads(request["threads"])
    task = Task(**request["task"])
    try:
        backbone = load_backbone(task.base_model, gradient_checkpointing=task.gradient_checkpointing is True)
        lengths = [RowLength(tuple(SpanLength(*span) for span in spans)) for spans in request["lengths"]]
        measured = measure(
            task,
            backbone,
            lengths,
            num_rows=request["num_rows"],
            max_tokens=request["max_tokens"],
            on_progress=_report_remaining,
        )
    except DeviceMemoryError as error:
        return {"no_memory": str(error)}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"no_memory": f"not enough memory for the base model {task.model!r}; load a smaller model"}
    return measured.to_dict()


def _report_remaining(remaining_s: float) -> None:
    print(json.dumps({"remaining_s": remaining_s}), flush=True)


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
