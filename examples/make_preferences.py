"""Make preference pairs: short word problems, each with a good answer and a worse one.

    python examples/make_preferences.py --output examples/data/preferences

This writes ``train.jsonl`` and ``validation.jsonl``, with one ``{"prompt": ..., "chosen": ..., "rejected": ...}`` per
line. The chosen answer shows its arithmetic and ends with ``#### 36``, as in ``make_word_problems.py``, which makes the
problems. The rejected one has, in turn, a wrong last step, no arithmetic, or no last line. The same seed and counts
give the same files.

The script needs only Python.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from make_word_problems import make_rows, row_count, write_splits

SLIPS = (-10, -2, -1, 1, 2, 10)


def with_a_slip(answer: str, rng: random.Random) -> str:
    """Return the same steps with a wrong last result."""
    right = int(answer.rpartition("#### ")[2])
    wrong = right + rng.choice([slip for slip in SLIPS if right + slip > 0])
    *steps, last, _ = answer.split("\n")
    return "\n".join([*steps, last.replace(f"= {right} ", f"= {wrong} "), f"#### {wrong}"])


def without_steps(answer: str, rng: random.Random) -> str:
    """Return only the result."""
    return answer.rpartition("\n")[2]


def without_result(answer: str, rng: random.Random) -> str:
    """Return only the steps."""
    return answer.rpartition("\n")[0]


FAULTS: Sequence[Callable[[str, random.Random], str]] = (with_a_slip, without_steps, without_result)


def make_pairs(count: int, seed: int) -> list[dict[str, str]]:
    """Return ``count`` pairs, with the faults in turn.

    Raises:
        ValueError: There are not that many different problems.
    """
    rng = random.Random(seed)
    return [
        {
            "prompt": row["question"],
            "chosen": row["answer"],
            "rejected": FAULTS[number % len(FAULTS)](row["answer"], rng),
        }
        for number, row in enumerate(make_rows(count, seed))
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make preference pairs of right and wrong answers to word problems.")
    default_output = Path(__file__).parent / "data" / "preferences"
    parser.add_argument("--output", type=Path, default=default_output, help="folder for the two files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=row_count, default=240, metavar="PAIRS")
    parser.add_argument("--validation", type=row_count, default=45, metavar="PAIRS")
    options = parser.parse_args(arguments)
    sizes = {"train": options.train, "validation": options.validation}
    try:
        write_splits(options.output, sizes, options.seed, make_pairs)
    except ValueError as error:
        parser.error(str(error))
    counts = ", ".join(f"{size} {split}" for split, size in sizes.items())
    print(f"Wrote {counts} pairs to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
