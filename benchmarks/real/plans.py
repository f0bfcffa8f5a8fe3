"""The sweeps, and the systems that run them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.common import DATA_DIR, REAL_MODEL, option_parser, readable_model
from benchmarks.dpo import program as dpo
from benchmarks.end_to_end.plans import Size

__all__ = ["PEERS", "QUICKSTART", "SCALES", "Scale", "parse", "systems_of"]

QUICKSTART = "rows5000"
"""Name of the piece on the quickstart's model and sweep, with many validation rows."""

PEERS = ("ray_asha", "optuna_hyperband")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The measurements of a scale.

    Attributes:
        model: Default base model.
        sweeps: Sweeps by piece, in the order in which they are measured.
        quickstart_rows: Training and validation rows of the piece ``QUICKSTART``.
        repeats: Repetitions of ``alto``, by piece; 1 for pieces that are not named.
        trl_jobs: Number of jobs of every batch size that TRL trains, unless a number is given.
        trl_shares: Share of the steps of these jobs that TRL trains, by piece; all steps for pieces that are not named.
        all_ranks: Ranks of the jobs that ``all`` trains, by piece; every rank for pieces that are not named.
        is_timed: Whether times mean something: then every run of ALTO has a process of its own; otherwise only the runs
            of ``alto`` in the first sweep have one.
    """

    model: str
    sweeps: Mapping[str, Size | dpo.Size]
    quickstart_rows: tuple[int, int]
    repeats: Mapping[str, int]
    trl_jobs: int
    trl_shares: Mapping[str, float]
    all_ranks: Mapping[str, tuple[int, ...]]
    is_timed: bool


_SWEEP24 = Size(
    train=256,
    validation=64,
    test=96,
    epochs=2,
    max_length=512,
    learning_rates=(1e-4, 3e-4, 1e-3, 3e-3),
    learning_rate_factor=1,
    ranks=(8, 16, 32),
    batch_sizes=(2, 8),
)

SCALES: Mapping[str, Scale] = {
    "smoke": Scale(
        model="alto-tiny",
        sweeps={
            "sweep12": Size(
                train=16,
                validation=4,
                test=6,
                epochs=2,
                max_length=256,
                learning_rates=(1e-3, 3e-3),
                learning_rate_factor=1,
                ranks=(8,),
                batch_sizes=(2, 8),
                concurrent_trials=1,
            ),
            "sweep24": Size(
                train=16,
                validation=4,
                test=6,
                epochs=1,
                max_length=256,
                learning_rates=(1e-3,),
                learning_rate_factor=1,
                ranks=(8, 16),
                batch_sizes=(4,),
            ),
            "dpo": replace(dpo.SIZES["smoke"], seeds=(1,)),
        },
        quickstart_rows=(8, 4),
        repeats={"dpo": 2},
        trl_jobs=1,
        trl_shares={"sweep24": 0.5},
        all_ranks={"sweep24": (16,)},
        is_timed=False,
    ),
    "cpu": Scale(
        model=str(REAL_MODEL),
        sweeps={
            "sweep12": Size(
                train=64,
                validation=32,
                test=96,
                epochs=2,
                max_length=512,
                learning_rates=(3e-4, 1e-3, 3e-3),
                learning_rate_factor=1,
                ranks=(8, 32),
                batch_sizes=(2, 8),
                concurrent_trials=1,  # two trials need 16 GB, and a machine of 24 GB has less beside Ray
            ),
            "sweep24": _SWEEP24,
            "dpo": dpo.Size(
                train=128,
                validation=64,
                heldout=256,
                epochs=2,
                max_length=256,
                learning_rates=(1e-4, 1e-3),
                ranks=(8, 32),
                batch_sizes=(2, 8),
                seeds=(1,),
            ),
        },
        quickstart_rows=(400, 5000),
        repeats={"sweep12": 3, QUICKSTART: 3},
        trl_jobs=1,
        trl_shares={"sweep24": 0.25, "dpo": 0.25},
        all_ranks={"sweep24": (16,)},
        is_timed=True,
    ),
    "gpu": Scale(
        model=str(REAL_MODEL),
        sweeps={"sweep24": replace(_SWEEP24, dtype="bfloat16")},
        quickstart_rows=(400, 5000),
        repeats={"sweep24": 3, QUICKSTART: 3},
        trl_jobs=1,
        trl_shares={"sweep24": 0.25},
        all_ranks={},
        is_timed=True,
    ),
}


def parse(description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options.

    Raises:
        SystemExit: They are not valid, or there is no model.
    """
    systems = list(dict.fromkeys(system for of_piece in systems_of("cpu").values() for system in of_piece))
    parser = option_parser(description, SCALES, dataset=DATA_DIR, threads=True)
    parser.add_argument("--model", type=readable_model, help="base model: a folder, a hub id or alto-tiny")
    parser.add_argument("--pieces", nargs="+", choices=systems_of("cpu"), default=list(systems_of("cpu")))
    parser.add_argument("--systems", nargs="+", choices=systems, default=systems)
    parser.add_argument(
        "--trl-jobs", type=int, metavar="N", help="TRL trains N jobs of every batch size, which stand for all of them"
    )
    parser.add_argument("--repeats", type=int, metavar="N", help="measure alto so many times in every piece")
    options = parser.parse_args(arguments)
    scale = SCALES[options.scale]
    if options.model is None:
        if scale.model == str(REAL_MODEL) and not REAL_MODEL.exists():
            parser.error(f"expected a model at {REAL_MODEL}, found none; make it with: python -m tools.make_real_model")
        options.model = scale.model
    options.trl_jobs = scale.trl_jobs if options.trl_jobs is None else options.trl_jobs
    for name, number in (("--trl-jobs", options.trl_jobs), ("--repeats", options.repeats)):
        if number is not None and number < 1:
            parser.error(f"{name}: expected at least 1, found {number}")
    return options


def systems_of(scale: str) -> dict[str, tuple[str, ...]]:
    """Return the systems that are measured, by piece; for preference pairs and long sweeps, TRL is the only peer."""
    usual = ("alto", "paper", "trl", "all")
    found = {name: (*usual, *PEERS) if name == "sweep12" else usual for name in SCALES[scale].sweeps}
    return {**found, QUICKSTART: ("alto",)}
