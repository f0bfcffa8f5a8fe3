"""Put the pieces of a benchmark that several commands have written, perhaps each on a machine of its own, into one
result file.

    python tools/merge_results.py kernels --scale gpu FOLDER...

All must come from one commit, one kind of machine and the same versions. Where a piece lies in several folders, the
latest counts. Pieces that were measured where there was no git get this checkout's commit, if its source is the one
that they were measured of.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import RESULTS_DIR, SCALES  # noqa: E402
from benchmarks.pieces import merge  # noqa: E402

STUDIES = {
    "kernels": "benchmarks.kernels.program",
    "memory": "benchmarks.memory.program",
    "utilization": "benchmarks.paper.utilization",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=tuple(STUDIES))
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--scale", choices=SCALES, default="gpu")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR)
    options = parser.parse_args(arguments)
    study = importlib.import_module(STUDIES[options.benchmark]).study
    try:
        result = merge(study(options.scale), options.folders, options.out)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(result.table())
    return 0 if result.gate == "passed" else 1


if __name__ == "__main__":
    raise SystemExit(main())
