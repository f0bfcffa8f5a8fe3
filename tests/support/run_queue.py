"""Runs a queue of tiny tasks; a program of its own, so that it may be killed.

python run_queue.py FOLDER MODEL NUM_GPUS EPOCHS NAME…
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

from queues import one_by_one, tiny_tasks

import alto
from alto.errors import TaskInterruptedError

if __name__ == "__main__":
    folder, model, num_gpus, epochs, *names = sys.argv[1:]
    tasks = tiny_tasks(Path(folder), Path(model), names, num_train_epochs=int(epochs))
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    engine = alto.Engine(
        total_gpus=int(num_gpus), output_dir=Path(folder) / "runs", is_interrupted=lambda: bool(signals)
    )
    try:
        engine.batched_execution(tasks, one_by_one(tasks, names, num_gpus=int(num_gpus)))
    except TaskInterruptedError:
        sys.exit(75)
