"""A benchmark in pieces, which are measured one by one, in one command or in several, and merged into one result file.

A long run may end before its last figure: at a time limit, in a driver, or because one variant does not fit into the
memory. So every piece (a stage of one model, for instance) is written to ``<benchmark>-<scale>.pieces/`` as it grows. A
failure in a piece is recorded there, and the other pieces continue. The result file is made of the pieces that one
machine has measured from one state of the source, with the same versions. A study that takes longer than a day may span
several states of the source. Then every row names its commit, and times are compared only between pieces of one commit.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import (
    Result,
    command_line,
    commit_id,
    format_table,
    machine_info,
    option_parser,
    package_versions,
    publish,
    source_digest,
    strict_json,
    write_file,
)

__all__ = [
    "GateFailedError",
    "Origin",
    "Piece",
    "Study",
    "assemble",
    "origin_of",
    "piece_name",
    "piece_options",
    "read_pieces",
    "run_chosen",
    "run_pieces",
    "write_piece",
]

UNKNOWN = "unknown"
_MEMORY_TOLERANCE = 0.01


class GateFailedError(Exception):
    """Raised if the correctness gate of a piece failed, so that nothing of it may be published; its sentences are the
    faults."""

    def __init__(self, failures: Sequence[str]) -> None:
        super().__init__("; ".join(failures))
        self.failures = tuple(failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The origin of figures; figures of two origins are not merged into one result.

    Attributes:
        source: Digest of the files that could change a figure. It distinguishes states that the commit does not: with
            changes, or without a commit.
    """

    commit: str
    source: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]

    @classmethod
    def here(cls) -> Origin:
        """Return the origin of this process."""
        return cls(commit=commit_id(), source=source_digest(), machine=machine_info(), versions=package_versions())

    def differences(self, other: Origin) -> list[str]:
        """Return the differences of two origins, one phrase each; empty if they are the same.

        Two machines of one kind count as the same, because a borrowed machine is often another one the next time. The
        name of the kernel is not compared, and memory only to a hundredth, because both differ between such machines.
        An unknown commit (a checkout without git) counts as that of the same source.
        """
        found = []
        if self.source != other.source:
            found.append(f"another state of the source (commit {self.commit[:18]}, not {other.commit[:18]})")
        elif self.commit != other.commit and UNKNOWN not in (self.commit, other.commit):
            found.append(f"commit {self.commit[:18]}, not {other.commit[:18]}")
        for key in sorted({*self.machine, *other.machine} - {"platform"}):
            mine, theirs = self.machine.get(key), other.machine.get(key)
            if key == "memory_bytes" and mine and theirs and math.isclose(mine, theirs, rel_tol=_MEMORY_TOLERANCE):
                continue
            if mine != theirs:
                found.append(f"{key} {mine}, not {theirs}")
        for package in sorted({*self.versions, *other.versions}):
            mine, theirs = (origin.versions.get(package, "none") for origin in (self, other))
            if mine != theirs:
                found.append(f"{package} {mine}, not {theirs}")
        return found


@dataclass(slots=True, kw_only=True)
class Piece:
    """The findings of one piece so far.

    Attributes:
        failures: Faults that its gate found, one sentence each. Variants with faults are not timed: they have neither
            rows nor figures.
        errors: Other failures (out of memory, an exception), one sentence each.
        figures, rows, notes: Parts of a ``Result``.
        is_finished: Whether the piece is finished.
    """

    name: str
    failures: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_finished: bool = False
    command: str = ""
    date: str = ""
    origin: Origin | None = None

    @property
    def is_sound(self) -> bool:
        """True if everything was measured, and the gate passed."""
        return self.is_finished and not self.failures and not self.errors


Flush = Callable[[], None]
"""Function that writes the findings of a piece so far."""

Action = Callable[[Piece, Flush], None]
"""Function that measures a piece; it raises ``GateFailedError`` if nothing of the piece may be published."""


def _own_figures(pieces: Mapping[str, Piece]) -> dict[str, float]:
    return {name: value for piece in pieces.values() for name, value in piece.figures.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The measurements of a benchmark at a scale.

    Attributes:
        pieces: Names of all pieces, in the order of the result.
        figures: Function from pieces by name to the figures; usually those of the pieces themselves.
        spans_sources: Whether pieces of other states of the source count too.
        untimed: Names of pieces in whose figures no time counts; they may be of another machine.
    """

    benchmark: str
    scale: str
    pieces: tuple[str, ...]
    goals: Mapping[str, tuple[str, float]]
    notes: tuple[str, ...] = ()
    figures: Callable[[Mapping[str, Piece]], Mapping[str, float]] = _own_figures
    spans_sources: bool = False
    untimed: Collection[str] = ()

    def differences(self, piece: Piece, origin: Origin) -> list[str]:
        """Return the reasons why ``piece`` cannot be in a result of ``origin``, one phrase each."""
        found = origin_of(piece)
        if self.spans_sources:
            found = replace(found, commit=origin.commit, source=origin.source)
        if piece.name in self.untimed:
            found = replace(found, machine=origin.machine)
        return found.differences(origin)

    @property
    def stem(self) -> str:
        return f"{self.benchmark}-{self.scale}"


def piece_name(model: str, stage: str) -> str:
    """Return the name of the piece for a stage of a model, by which :func:`run_chosen` chooses."""
    return f"{model} {stage}"


def piece_options(
    description: str | None, models: Mapping[str, Sequence[str]], stages: Sequence[str], arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Return the options of a benchmark whose pieces are stages of models.

    Args:
        models: Names of the models of every scale.

    Raises:
        SystemExit: The options are not valid, or the scale needs a GPU and there is none.
    """
    parser = option_parser(description, models, threads=True)
    parser.add_argument("--models", nargs="+", help="of these models alone")
    parser.add_argument("--stages", nargs="+", choices=stages, default=stages, help="these stages alone")
    options = parser.parse_args(arguments)
    known = models[options.scale]
    options.models = options.models or known
    if unknown := sorted(set(options.models) - set(known)):
        parser.error(
            f"--models: expected some of {', '.join(known)} at --scale {options.scale}, found {', '.join(unknown)}"
        )
    return options


def run_chosen(study: Study, actions: Mapping[str, Action], options: argparse.Namespace) -> int:
    """Call :func:`run_pieces` for the models and stages of ``options``, and print a table of each kind of row."""
    if options.scale == "gpu" and not torch.cuda.is_available():
        raise SystemExit(
            f"--scale {options.scale}: expected an NVIDIA GPU, found none that torch {torch.__version__} can use; run "
            "it where torch.cuda.is_available() is true, or choose --scale cpu"
        )
    torch.set_num_threads(options.threads)
    names = {piece_name(model, stage) for model in options.models for stage in options.stages}
    chosen = {name: action for name, action in actions.items() if name in names}
    if not chosen:
        raise SystemExit(f"expected some of the pieces {', '.join(actions)}, found {', '.join(sorted(names))}")
    code = run_pieces(study, chosen, options.out)
    rows = [row for piece in read_pieces(study, options.out) if piece.name in chosen for row in piece.rows]
    for table in dict.fromkeys(row["table"] for row in rows):
        of_table = [row for row in rows if row["table"] == table]
        columns = list(dict.fromkeys(key for row in of_table for key in row if key != "table"))
        print(f"{table}\n{format_table(columns, ([row.get(column, '') for column in columns] for row in of_table))}\n")
    return code


def run_pieces(study: Study, actions: Mapping[str, Action], folder: Path) -> int:
    """Measure the pieces of ``actions`` one after the other, and write them and the result to ``folder``.

    Pieces of the same origin that are already there are included; others are named and left out.

    Returns:
        Exit code: 0 if all pieces of ``actions`` are sound.
    """
    origin, measured = Origin.here(), []
    for name, action in actions.items():
        piece = Piece(name=name, command=command_line(), origin=origin)
        flush = _writer(study, piece, folder)
        flush()  # earlier findings of this piece are void
        print(f"--- {study.stem}: {name}", flush=True)
        try:
            action(piece, flush)
            piece.is_finished = True
        except GateFailedError as error:
            piece.failures.extend(error.failures)
            piece.figures.clear()
            piece.rows.clear()
        except Exception as error:
            traceback.print_exc()
            piece.errors.append(f"{name}: {describe_error(error)}")
        flush()
        _result_in(study, folder, origin).write(folder)
        measured.append(piece)
        for sentence in (*piece.failures, *piece.errors):
            print(f"FAILED {sentence}", flush=True)
        _free_memory()
    for piece in read_pieces(study, folder):
        if differences := study.differences(piece, origin):
            print(f"left out, because it is of another run: {piece.name}: {'; '.join(differences)}")
    publish(_result_in(study, folder, origin), folder)
    return 0 if all(piece.is_sound for piece in measured) else 1


def describe_error(error: Exception) -> str:
    """Return a description in one line: out of memory, or the type and the first line of the message."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{f': {lines[0]}' if lines else ''}"


def assemble(study: Study, pieces: Iterable[Piece]) -> Result:
    """Return the result of pieces of one origin: the figures of pieces whose gate passed; the notes name what is
    missing."""
    by_name = {piece.name: piece for piece in pieces}
    ordered = {name: by_name[name] for name in study.pieces if name in by_name}
    if not ordered:
        raise ValueError(f"Expected a piece of {study.stem}, one of {', '.join(study.pieces)}; found none.")
    origins = [piece.origin for piece in ordered.values() if piece.origin is not None]
    first = next((origin for origin in origins if origin.commit != UNKNOWN), origins[0])
    measured = [piece for piece in ordered.values() if piece.origin is not None]
    assert not any(study.differences(piece, first) for piece in measured), "pieces of one origin"
    if study.spans_sources:
        timed = [piece for piece in measured if piece.name not in study.untimed] or measured
        first = max(reversed(timed), key=lambda piece: piece.date).origin or first
        for piece in ordered.values():
            piece.rows = [{**row, "commit": origin_of(piece).commit} for row in piece.rows]
    for piece in measured:
        cpu = origin_of(piece).machine.get("cpu")
        if cpu != first.machine.get("cpu"):
            piece.rows = [{**row, "cpu": cpu} for row in piece.rows]
    # Layers and steps of a model share one gate, whose faults are listed once.
    failures = list(dict.fromkeys(sentence for piece in ordered.values() for sentence in piece.failures))
    errors = dict.fromkeys(sentence for piece in ordered.values() for sentence in piece.errors)
    figures = study.figures(ordered)
    gate = "passed" if not failures else "partly passed" if figures else "failed"
    return Result(
        benchmark=study.benchmark,
        scale=study.scale,
        command=" && ".join(dict.fromkeys(piece.command for piece in ordered.values())),
        commit=first.commit,
        date=max(piece.date for piece in ordered.values()),
        machine=first.machine,
        versions=first.versions,
        gate=gate,
        figures=dict(figures),
        goals=dict(study.goals),
        rows=tuple(row for piece in ordered.values() for row in piece.rows),
        notes=(
            *(f"Without figures, its gate failed: {sentence}" for sentence in failures),
            *(f"Failed: {sentence}" for sentence in errors),
            *(
                f"Ended before it was whole: {piece.name}."
                for piece in ordered.values()
                if not (piece.is_finished or piece.errors or piece.failures)
            ),
            *(f"Not measured: {name}." for name in study.pieces if name not in ordered),
            *dict.fromkeys(note for piece in ordered.values() for note in piece.notes),
            *study.notes,
        ),
    )


def read_pieces(study: Study, folder: Path) -> list[Piece]:
    """Return the pieces in ``folder``, in the order of the study."""
    found = []
    for name in study.pieces:
        file = _file(study, name, folder)
        if file.exists():
            content = json.loads(file.read_text(encoding="utf-8"))
            found.append(Piece(**(content | {"origin": Origin(**content["origin"])})))
    return found


def _result_in(study: Study, folder: Path, origin: Origin) -> Result:
    return assemble(study, (piece for piece in read_pieces(study, folder) if not study.differences(piece, origin)))


def _writer(study: Study, piece: Piece, folder: Path) -> Flush:
    def flush() -> None:
        piece.date = datetime.now(UTC).isoformat(timespec="seconds")
        write_piece(study, piece, folder)

    return flush


def write_piece(study: Study, piece: Piece, folder: Path) -> None:
    """Write the findings of a piece so far."""
    write_file(_file(study, piece.name, folder), strict_json(asdict(piece)))


def _file(study: Study, name: str, folder: Path) -> Path:
    return folder / f"{study.stem}.pieces" / f"{name.replace(' ', '-')}.json"


def origin_of(piece: Piece) -> Origin:
    """Return the origin of a piece."""
    assert piece.origin is not None
    return piece.origin


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    sys.stdout.flush()
