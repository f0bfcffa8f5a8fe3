"""Make the data of ``examples/rewards.yaml``: sums of two numbers with two digits.

    python examples/make_additions.py --output examples/data/additions

This writes ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl``, with one ``{"prompt": ..., "completion": ...}``
per line. The reward compares answers with the completion. No sum is in two splits. The same seed gives the same files.

The script needs only Python.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the three files")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sums = list(itertools.combinations_with_replacement(range(10, 100), 2))
    random.Random(options.seed).shuffle(sums)
    options.output.mkdir(parents=True, exist_ok=True)
    left = iter(sums)
    for name, count in (("train", 1024), ("validation", 64), ("test", 256)):
        rows = [
            {"prompt": f"What is {first} + {second}? Answer with the number only.", "completion": str(first + second)}
            for first, second in itertools.islice(left, count)
        ]
        path = options.output / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
