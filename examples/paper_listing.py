"""The listing of the ALTO paper, on one device: two tasks, one schedule, the best adapter of each.

make quickstart                     # once: sets up, and makes the data used here
.venv/bin/python examples/paper_listing.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import alto

WORD_PROBLEMS = Path(__file__).parent / "data" / "word_problems"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the ALTO paper's listing on one device.")
    parser.add_argument("--data", type=Path, default=WORD_PROBLEMS, help="folder with train.jsonl and validation.jsonl")
    options = parser.parse_args()

    engine = alto.Engine(strategy="adapter_parallel", total_gpus=1)

    tasks = [
        alto.Task(
            name=name,
            model="alto-tiny",
            num_gpus=1,
            dataset=str(options.data / "train.jsonl"),
            validation_dataset=str(options.data / "validation.jsonl"),
            search_space={"lr": learning_rates, "batch_size": [2, 8]},
        )
        for name, learning_rates in (("cautious", [0.001, 0.002]), ("bold", [0.005, 0.02]))
    ]

    schedule = engine.schedule(tasks, method="MILP")
    best_adapters = engine.batched_execution(
        tasks, schedule, alto.EarlyExit(policy="paper", warmup_ratio=0.05, select_ratio=0.25)
    )

    for result in best_adapters:
        print(f"{result.task}: {result.best_job}, loss {result.best_validation_loss:.4f}, in {result.adapter_dir}")


if __name__ == "__main__":
    main()
