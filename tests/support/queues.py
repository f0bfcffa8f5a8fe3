"""Queues of tiny tasks whose durations are known, so that nothing has to be measured first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiny import make_task

import alto
from alto.records import Gpu, Placement, Schedule

NODE = "local"


def tiny_tasks(folder: Path, model: Path, names: Sequence[str], **changes: Any) -> list[alto.Task]:
    """Return tasks of two jobs each on the model in ``model``. They are packed in the same way on a busy machine, where
    a measured packing would differ, and with it the last bits of losses."""
    settings: dict[str, Any] = {
        "max_slots": 2,
        "max_tokens_per_step": 4096,
        "max_tokens_per_pass": 4096,
        "model": str(model),
        "num_train_epochs": 1,
        "r": 4,
        "search_space": {"lr": [1e-3, 1e-2]},
        "report_to": "none",
        "checkpoint_interval_s": 0,
    }
    return [make_task(folder, name=name, **(settings | changes)) for name in names]


def one_by_one(tasks: Sequence[alto.Task], names: Sequence[str], *, num_gpus: int = 1, node: str = NODE) -> Schedule:
    """Return a schedule of the tasks one after the other on the slots of a node, by default of this machine, ten
    seconds each."""
    return Schedule(
        method="lpt",
        status="heuristic",
        placements=tuple(
            Placement(
                task=name,
                gpus=(Gpu(node, index % num_gpus),),
                start_s=10.0 * (index // num_gpus),
                duration_s=10.0,
            )
            for index, (name, _) in enumerate(zip(names, tasks, strict=True))
        ),
        bound_s=10.0,
    )
