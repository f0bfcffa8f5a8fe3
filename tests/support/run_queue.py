"""Runs a queue of tiny tasks on one GPU, or continues one; a program of its own, so that it may be killed.

    python run_queue.py FOLDER CLUSTER MODEL NAME…
    python run_queue.py FOLDER CLUSTER

Executors die and wait as ``deaths.plan_deaths(FOLDER, …)`` has set. Every entry that an observer gets is printed as a
line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

from deaths import TRAIN
from queues import one_by_one, tiny_tasks

import alto
from alto.cluster import open_cluster
from alto.engine import queues as engine_queues
from alto.errors import TaskInterruptedError
from alto.runs import JournalEntry

INTERRUPTED = 75
"""Exit code of a program that was asked to stop."""

SETTINGS = {
    "search_space": {"lr": [1e-3, 1e-2], "batch_size": [4, 8]},
    "num_train_epochs": 3,
    "max_slots": 3,
}


def print_entry(entry: JournalEntry) -> None:
    print(json.dumps(entry.to_dict()), flush=True)


def main(folder: Path, cluster: str, model: str = "", *names: str) -> None:
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    engine_queues.TRAIN = TRAIN
    engine = alto.Engine(
        cluster=cluster,
        total_gpus=1,
        output_dir=folder / "runs",
        observers=[print_entry],
        is_interrupted=lambda: bool(signals),
    )
    try:
        if not names:
            (queue,) = (folder / "runs").glob("queue-*")
            engine.resume_queue(queue)
            return
        with contextlib.closing(open_cluster(cluster, total_gpus=1)) as opened:
            (node,) = opened.nodes
        tasks = tiny_tasks(folder, Path(model), names, **SETTINGS)
        engine.batched_execution(tasks, one_by_one(tasks, names, node=node.name))
    except TaskInterruptedError:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
