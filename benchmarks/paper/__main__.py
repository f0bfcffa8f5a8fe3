"""Measure tables and figures of the ALTO paper anew, beside its own values: docs/paper.md has them all.

    python -m benchmarks.paper samples-saved --scale cpu
    python -m benchmarks.paper patterns warmup-sweep --scale cpu
    python -m benchmarks.paper all --scale cpu

Of several names, what is measured already stays, if it is of the same source, machine and packages: a command that was
killed resumes where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import RESULTS_DIR
from benchmarks.paper.experiments import EXPERIMENTS
from benchmarks.paper.running import run_one, run_several


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="+", choices=(*EXPERIMENTS, "all"), metavar="NAME|all", help=", ".join(EXPERIMENTS)
    )
    parser.add_argument("--scale", choices=("smoke", "cpu", "gpu"), default="smoke")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR, metavar="DIR", help="folder of the result files")
    parser.add_argument("--again", action="store_true", help="measure what is measured already, too")
    options = parser.parse_args(arguments)
    if options.names == ["all"]:
        names = [name for name, experiment in EXPERIMENTS.items() if options.scale in experiment.scales]
        return run_several(names, options.scale, options.out, again=options.again)
    for name in options.names:
        if name == "all":
            parser.error("expected names or all, found both")
        if options.scale not in EXPERIMENTS[name].scales:
            scales = ", ".join(EXPERIMENTS[name].scales)
            parser.error(f"expected a scale of {scales} for {name}, found {options.scale}")
    if len(options.names) == 1:
        return run_one(options.names[0], options.scale, options.out)
    return run_several(options.names, options.scale, options.out, again=options.again)


if __name__ == "__main__":
    raise SystemExit(main())
