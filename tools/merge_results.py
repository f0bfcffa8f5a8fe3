"""Merge the pieces of a benchmark, which several commands have written, perhaps on several machines, into one result
file.

    python -m tools.merge_results kernels --scale gpu FOLDER...

All pieces must come from one commit, one kind of machine and the same versions. If a piece is in several folders, the
latest one is used. Pieces that were measured without git get the commit of this checkout, provided that its source is
the one that was measured.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.common import RESULTS_DIR, SCALES, Result, commit_id, source_digest
from benchmarks.pieces import UNKNOWN, Piece, Study, assemble, origin_of, read_pieces, write_piece

ROOT = Path(__file__).resolve().parent.parent

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


def merge(study: Study, folders: Sequence[Path], target: Path) -> Result:
    """Return the result of the pieces in ``folders``; it is also written to ``target``, with the pieces.

    If a piece is in several folders, the latest one is used. Pieces that were measured without git get the commit of
    this checkout, provided that its source is the one that was measured.

    Raises:
        ValueError: There are no pieces, or two of them differ in their origin.
    """
    latest: dict[str, Piece] = {}
    for folder in folders:
        for piece in read_pieces(study, folder):
            if piece.name not in latest or latest[piece.name].date < piece.date:
                latest[piece.name] = piece
    pieces = [latest[name] for name in study.pieces if name in latest]
    for piece in pieces[1:]:
        if differences := origin_of(piece).differences(origin_of(pieces[0])):
            raise ValueError(
                f"Expected pieces of one commit, machine and set of versions; found {piece.name} and {pieces[0].name} "
                f"apart: {'; '.join(differences)}. Measure one of them again, or leave its folder out."
            )
    if pieces and all(origin_of(piece).commit == UNKNOWN for piece in pieces):
        commit = commit_id() if origin_of(pieces[0]).source == source_digest() else UNKNOWN
        for piece in pieces:
            piece.origin = replace(origin_of(piece), commit=commit)
    result = assemble(study, pieces)
    for piece in pieces:
        write_piece(study, piece, target)
    result.write(target)
    return result


if __name__ == "__main__":
    raise SystemExit(main())
