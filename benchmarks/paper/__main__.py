"""Measure the tables and figures of the ALTO paper, to compare them with its own values, and all other benchmarks.

    python -m benchmarks.paper samples-saved --scale cpu
    python -m benchmarks.paper end-to-end --scale gpu --model Qwen/Qwen3-8B --dataset train.jsonl --out measured
    python -m benchmarks.paper all --scale cpu      # the paper's: docs/paper.md
    python -m benchmarks.paper others --scale cpu   # all others: docs/benchmarks.md

If several names are given, experiments that were already measured with the same source, machine and packages are not
measured again, so a killed command continues where it stopped. Options of an experiment follow its name: NAME --help
shows them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from alto.errors import AltoError
from benchmarks.common import RESULTS_DIR, SCALES
from benchmarks.paper.experiments import EXPERIMENTS, OTHERS, PAPER, Experiment, load
from benchmarks.paper.running import nothing_else_in, run_one, run_several

GROUPS: Mapping[str, Mapping[str, Experiment]] = {"all": PAPER, "others": OTHERS}


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    named = next((name for name in arguments if name in EXPERIMENTS), None)
    if named is not None and not {"-h", "--help"}.isdisjoint(arguments):
        program = EXPERIMENTS[named].program
        return load(program)(["--help"]) if program is not None else _parser().parse_args(["--help"])
    parser = _parser()
    options, own = parser.parse_known_args(arguments)
    names = list[str]()
    for name in options.names:
        chosen = GROUPS[name] if name in GROUPS else {name: EXPERIMENTS[name]}
        names += [each for each, found in chosen.items() if name not in GROUPS or options.scale in found.scales]
    for name in names:
        if options.scale not in EXPERIMENTS[name].scales:
            scales = ", ".join(EXPERIMENTS[name].scales)
            parser.error(f"expected a scale of {scales} for {name}, found {options.scale}")
    if not names:
        parser.error(f"expected a scale of {' or '.join(options.names)}, found {options.scale}, which none of them has")
    is_one = len(names) == 1 and options.names[0] not in GROUPS
    if own and not is_one:
        parser.error(f"expected options of one experiment after its name, found {' '.join(own)} after several")
    if own and EXPERIMENTS[names[0]].program is None:
        parser.error(f"expected no other options for {names[0]}, found {' '.join(own)}")
    if options.out is None and (replacing := [each for each in own if each.split("=")[0] in ("--model", "--dataset")]):
        parser.error(
            f"expected a folder beside {' and '.join(replacing)}, so that no documented result is replaced, found "
            "none; add --out FOLDER"
        )
    out: Path = RESULTS_DIR if options.out is None else options.out
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        parser.error(f"--out: expected a folder that can be written to, found {out} ({error.strerror}); name another")
    try:
        with nothing_else_in(out):
            if is_one:
                return run_one(names[0], options.scale, out, own)
        return run_several(names, options.scale, out, again=options.again)
    except AltoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # an option of a program must not be taken for a short form of an option here
    )
    parser.add_argument(
        "names", nargs="+", choices=(*EXPERIMENTS, *GROUPS), metavar="NAME|all|others", help=", ".join(EXPERIMENTS)
    )
    parser.add_argument("--scale", choices=SCALES, default="smoke")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the result files; benchmarks/results if not named"
    )
    parser.add_argument("--again", action="store_true", help="of several: measure what is measured already, too")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
