"""Runs a queue of tiny tasks, or goes on with one; a program of its own, so that it may be killed.

python run_queue.py FOLDER MODEL NUM_GPUS EPOCHS NAME…
python run_queue.py FOLDER resume
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


def main(folder: Path, model: str, *settings: str) -> None:
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    engine = alto.Engine(
        total_gpus=1 if model == "resume" else int(settings[0]),
        output_dir=folder / "runs",
        is_interrupted=lambda: bool(signals),
    )
    try:
        if model == "resume":
            (queue,) = (folder / "runs").glob("queue-*")
            engine.resume_queue(queue)
        else:
            num_gpus, epochs, *names = settings
            tasks = tiny_tasks(folder, Path(model), names, num_train_epochs=int(epochs))
            engine.batched_execution(tasks, one_by_one(tasks, names, num_gpus=int(num_gpus)))
    except TaskInterruptedError:
        sys.exit(75)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
