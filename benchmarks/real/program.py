"""Compares sweeps of LoRA configurations on a real pretrained model with the tools that people use today.

Each piece is one sweep by one system. ``alto`` is ALTO with its defaults in a fresh process, and everything counts:
imports, set-up, measuring with an empty cache, evaluation, saving. ``paper`` is the same with the paper's Algorithm 1.
``trl`` is TRL and PEFT, one job at a time, evaluated after every epoch. ``ray_asha`` is Ray Tune with ASHA and
``optuna_hyperband`` is Optuna with Hyperband, both around a lean loop on PEFT. ``all`` is ALTO with every job trained
to its end, or every job of some ranks, which is recorded. Measurements of the same source are kept, so a killed command
continues where it stopped.

    python -m tools.make_real_model
    python -m benchmarks.paper real --scale cpu
    python -m benchmarks.paper real --scale cpu --pieces sweep12 --systems alto trl
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from alto import EarlyExit, Engine, Task
from alto.backbone import resolve_model
from alto.early_exit import Recording
from alto.results import load_run
from alto.runs import read_entries
from benchmarks.baselines.best import BestAdapter
from benchmarks.common import DATA_DIR, GSM8K, PREFERENCE_PAIRS, RESULTS_DIR, source_digest, spread
from benchmarks.end_to_end.plans import Size
from benchmarks.end_to_end.systems import best_loss, observed
from benchmarks.memory.program import in_child
from benchmarks.paper.recordings import RECORDINGS
from benchmarks.parts import Part, forget_parts, measured_rows
from benchmarks.pieces import Flush, GateFailedError, Piece, Study, piece_name, read_pieces, run_pieces
from benchmarks.real.child import answer
from benchmarks.real.plans import PEERS, QUICKSTART, SCALES, parse, systems_of
from benchmarks.real.settings import TOLERANCES, Answers, Pairs, Setting, judged, quickstart, winner_failures

__all__ = ["GOALS", "figures", "main"]

GOALS: Mapping[str, Mapping[str, tuple[str, float]]] = {
    "smoke": {},
    "cpu": {
        "sweep12_over_trl": (">=", 10.0),
        "sweep24_over_trl": (">=", 12.0),
        "dpo_over_trl": (">=", 3.0),
        "evaluation_share": ("<=", 0.20),
        "measuring_share": ("<=", 0.05),
        "over_ray_asha": (">=", 2.5),
        "over_optuna_hyperband": (">=", 2.5),
        "best_loss_ratio": ("<=", 1.005),
        "evaluation_share_5000_rows": ("<=", 0.25),
    },
    "gpu": {
        "sweep24_over_trl": (">=", 12.0),
        "sweep24_best_loss_ratio": ("<=", 1.005),
        "evaluation_share_5000_rows": ("<=", 0.25),
    },
}

CHILD = "benchmarks.real.child"

Row = Mapping[str, Any]
Measured = tuple[list[Row], list[str]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(__doc__, arguments)
    torch.set_num_threads(options.threads)
    measurements = {
        piece_name(name, system): Measurement(name, system, options)
        for name, systems in systems_of(options.scale).items()
        for system in systems
    }
    chosen = {
        name: measurement.run
        for name, measurement in measurements.items()
        if measurement.name in options.pieces and measurement.system in options.systems
    }
    if not chosen:
        raise SystemExit(
            f"expected some of the pieces {', '.join(measurements)}, found --pieces {' '.join(options.pieces)} "
            f"--systems {' '.join(options.systems)}"
        )
    study = Study(
        benchmark="real",
        scale=options.scale,
        pieces=tuple(measurements),
        goals=GOALS[options.scale],
        notes=tuple(notes(options)),
        figures=figures,
        spans_sources=True,
        untimed=[piece_name(name, system) for name in SCALES[options.scale].sweeps for system in ("all", "paper")],
    )
    for piece in read_pieces(study, options.out):
        if others := {row["model"] for row in piece.rows} - {measurements[piece.name].model}:
            raise SystemExit(
                f"expected pieces of {measurements[piece.name].model} in {options.out}, found {piece.name} of "
                f"{', '.join(others)}; name another folder with --out"
            )
    code = run_pieces(study, chosen, options.out)
    if code == 0 and len(chosen) == len(measurements):
        forget_parts(options.out, [part for measurement in measurements.values() for part in measurement.parts()])
    return code


class Measurement:
    """One piece: a sweep by one system, in parts that are not measured again after a kill.

    Args:
        name: Name of the sweep, or ``QUICKSTART``.
        options: Options from :func:`parse`.
    """

    def __init__(self, name: str, system: str, options: argparse.Namespace) -> None:
        self.name, self.system, self._options = name, system, options
        self._scale = SCALES[options.scale]
        self._base = "alto-tiny" if name == QUICKSTART else options.model
        self.model = Path(self._base).name

    def run(self, piece: Piece, flush: Flush) -> None:
        """Measure the piece.

        Raises:
            GateFailedError: The measurement may not be published.
        """
        rows, failures = measured_rows(self._options.out, self.parts())
        if self.system == "trl":
            share = self._num_of_batch_size / len(self._trl_numbers)
            rows = [{**row, "stands_for": share} for row in rows]
            if not any(math.isfinite(float(row["validation_loss"])) for row in rows):
                failures.append(f"{piece.name}: expected a job with a finite loss, found none")
        if failures:
            raise GateFailedError(failures)
        piece.rows.extend(rows)
        flush()

    def parts(self) -> dict[str, Part]:
        """Return the parts by name: every job that TRL trains, every repetition of ALTO, or a single part."""
        stem = f"real-{self._options.scale}-{self.name}-{self.system}"
        measured: dict[str, Callable[[Path], Measured]]
        if self.system == "trl":
            measured = {
                f"{stem}-{size}-{number}": partial(self._trl, size, number)
                for size in self._scale.sweeps[self.name].batch_sizes
                for number in self._trl_numbers
            }
        elif self.system == "alto":
            repeats = self._options.repeats or self._scale.repeats.get(self.name, 1)
            measured = {f"{stem}-{number}": partial(self._tuned, number) for number in range(1, repeats + 1)}
        elif self.system == "paper":
            measured = {stem: partial(self._tuned, 1)}
        else:
            measured = {stem: self._whole if self.system == "all" else self._peer}
        inputs: tuple[Path | str, ...] = (resolve_model(self._base), *([] if self._data is None else [self._data]))
        return {name: Part(measure=measure, inputs=inputs) for name, measure in measured.items()}

    @property
    def _data(self) -> Path | None:
        """Return the file of the rows; None for the quickstart, which makes its rows."""
        if self.name == QUICKSTART:
            return None
        default = PREFERENCE_PAIRS if self.name == "dpo" else GSM8K
        return self._options.dataset / default.relative_to(DATA_DIR)

    @property
    def _num_of_batch_size(self) -> int:
        size = self._scale.sweeps[self.name]
        return len(size.learning_rates) * len(size.ranks)

    @property
    def _trl_numbers(self) -> list[int]:
        """Return the numbers of the jobs of a batch size that TRL trains: evenly spread, including the first and the
        last."""
        last, count = self._num_of_batch_size - 1, min(self._options.trl_jobs, self._num_of_batch_size)
        return [round(number * last / max(1, count - 1)) for number in range(count)]

    def _setting(self, folder: Path) -> Setting:
        size, data = self._scale.sweeps[self.name], self._data
        assert data is not None
        if self.system == "all":
            size = replace(size, ranks=self._scale.all_ranks.get(self.name, size.ranks))
        if isinstance(size, Size):
            return Answers(size, self._base, data, folder)
        return Pairs(size, self._base, data, folder)

    def _row(self, **more: Any) -> Row:
        return {"table": "sweeps", "piece": self.name, "system": self.system, "model": self.model, **more}

    # -- ALTO ----------------------------------------------------------------------------------------------------

    def _tuned(self, number: int, folder: Path) -> Measured:
        """Measure the sweep by ALTO in a fresh process, which is timed as a whole."""
        if self.name == QUICKSTART:
            setting, task = None, quickstart(*self._scale.quickstart_rows, folder)
        else:
            setting = self._setting(folder)
            task = setting.task.replace(eval_steps=Task.model_fields["eval_steps"].default)
        if self.system == "paper":
            task = task.replace(early_exit=EarlyExit(policy="paper"))
        request = {
            "task": task.to_dict(),
            "output_dir": str(folder / "runs"),
            "threads": self._options.threads,
        }
        is_fresh = self._scale.is_timed or (self.name, self.system) == ("sweep12", "alto")
        with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, ALTO_CACHE=cache):
            began = time.perf_counter()
            found = in_child(request, CHILD) if is_fresh else answer(request)
            duration_s = time.perf_counter() - began
        result = load_run(found["run_dir"])
        failures = winner_failures(task, result)
        test_loss = None
        if setting is not None and not failures:
            adapter = Path(result.adapter_dir)
            test_loss, failures = judged(
                setting, adapter, result.best_validation_loss, test_loss=setting.test_loss(result.run_dir)
            )
        print(f"{self.name} {self.system}: {duration_s:.1f} s, best {result.best_validation_loss:.4f}", flush=True)
        row = self._row(
            number=number,
            duration_s=duration_s,
            evaluation_s=found["evaluation_s"],
            measuring_s=found["measuring_s"],
            validation_loss=result.best_validation_loss,
            test_loss=test_loss,
            winner=result.best_job,
            samples=result.samples_trained,
            samples_saved=result.samples_saved,
        )
        return [row], failures

    def _whole(self, folder: Path) -> Measured:
        """Train every job to its end, recorded. The run is kept until it is done, so a killed one is resumed."""
        pieces = self._options.out / f"real-{self._options.scale}.pieces"
        kept = pieces / f"{self.name}-all-{self.model}-{source_digest()[:12]}"
        setting = self._setting(kept)
        task = observed(setting.task)
        engine = Engine(output_dir=kept / "runs")
        begun = sorted((kept / "runs").glob("*/journal.jsonl"))
        with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, ALTO_CACHE=cache):
            result = engine.resume(begun[0].parent) if begun else engine.tune(task)
        failures = winner_failures(task, result)
        test_loss = None
        if not failures:
            adapter = Path(result.adapter_dir)
            test_loss, failures = judged(
                setting, adapter, result.best_validation_loss, test_loss=setting.test_loss(result.run_dir)
            )
        if not failures:
            recording = Recording.from_journal(read_entries(Path(result.run_dir) / "journal.jsonl"))
            about = {"base": self.model, "dataset": str(self._data.relative_to(self._options.dataset))}
            is_published = self._options.scale == "cpu" and self._options.out.resolve() == RESULTS_DIR
            target = (RECORDINGS if is_published else pieces) / f"real-{self.name}.json.gz"
            replace(recording, task={**recording.task, **about}).write(target)
            shutil.rmtree(kept)
        row = self._row(
            duration_s=result.duration_s,
            validation_loss=result.best_validation_loss,
            test_loss=test_loss,
            winner=result.best_job,
            samples=result.samples_trained,
        )
        return [row], failures

    # -- the others ----------------------------------------------------------------------------------------------

    def _trl(self, batch_size: int, number: int, folder: Path) -> Measured:
        """Train one job of a batch size with TRL."""
        setting = self._setting(folder)
        job = [job for job in setting.task.jobs if job.config.per_device_train_batch_size == batch_size][number]
        prepare_s = setting.prepare_s
        best = BestAdapter(folder / "best")
        share = self._scale.trl_shares.get(self.name, 1.0)
        found = setting.train_with_trl(job, best, share)
        evaluation_s = found.eval_s if share == 1 else found.eval_s * job.config.num_train_epochs
        duration_s = found.duration_s - found.train_s - found.eval_s + found.train_s / share + evaluation_s
        test_loss, failures = judged(setting, best.folder, best.loss) if best.folder.exists() else (None, [])
        print(f"{self.name} trl {job.id}: {found.duration_s:.1f} s, whole {duration_s:.1f} s", flush=True)
        row = self._row(
            job=job.id,
            prepare_s=prepare_s,
            share=share,
            measured_s=found.duration_s,
            duration_s=duration_s,
            evaluation_s=evaluation_s,
            validation_loss=best_loss(found),
            test_loss=test_loss,
            samples=found.samples,
        )
        return [row], failures

    def _peer(self, folder: Path) -> Measured:
        """Measure the sweep by Ray or Optuna."""
        setting = self._setting(folder)
        assert isinstance(setting, Answers)
        found = setting.sweep.systems()[self.system]()
        assert found.adapter is not None
        test_loss, failures = judged(setting, found.adapter, found.loss)
        print(f"{self.name} {self.system}: {found.duration_s:.1f} s, best {found.loss:.4f}", flush=True)
        row = self._row(
            duration_s=found.duration_s, validation_loss=found.loss, test_loss=test_loss, samples=found.samples
        )
        return [row], failures


def figures(pieces: Mapping[str, Piece]) -> dict[str, float]:
    """Return the figures of the pieces that were measured. Times of different sources are not compared."""
    by: dict[tuple[str, str], list[Row]] = {}
    sources: dict[tuple[str, str], str] = {}
    for piece in pieces.values():
        for row in piece.rows:
            by.setdefault((row["piece"], row["system"]), []).append(row)
            sources[row["piece"], row["system"]] = "" if piece.origin is None else piece.origin.source

    def median(name: str, key: str, system: str = "alto") -> float:
        return spread(row[key] for row in by[name, system]).median

    found = dict[str, float]()
    for name, system in by:
        if (name, "alto") not in by or system == "alto":
            continue
        if system == "all":
            ratio = median(name, "test_loss") / median(name, "test_loss", "all")
            found["best_loss_ratio" if name == "sweep12" else f"{name}_best_loss_ratio"] = ratio
            continue
        if sources[name, system] != sources[name, "alto"]:
            continue
        figure = f"over_{system}" if system in PEERS else f"{name}_over_{system}"
        duration_s = trl_duration_s(by[name, system]) if system == "trl" else median(name, "duration_s", system)
        found[figure] = duration_s / median(name, "duration_s")
        if system in PEERS:
            found[f"test_loss_over_{system}"] = median(name, "test_loss") / median(name, "test_loss", system)
    for name, suffix in (("sweep12", ""), (QUICKSTART, "_5000_rows")):
        if (name, "alto") in by:
            shares = (row["evaluation_s"] / row["duration_s"] for row in by[name, "alto"])
            found[f"evaluation_share{suffix}"] = spread(shares).median
    if ("sweep12", "alto") in by:
        shares = (row["measuring_s"] / row["duration_s"] for row in by["sweep12", "alto"])
        found["measuring_share"] = spread(shares).median
    for name, _ in (key for key in by if key[1] == "alto"):
        times = spread(row["duration_s"] for row in by[name, "alto"])
        found[f"{name}_s"] = times.median
        if times.count > 1:
            found[f"{name}_s_spread"] = times.relative
    return found


def trl_duration_s(rows: Sequence[Row]) -> float:
    """Return the seconds of a whole sweep by TRL: loading and tokenising once, and its jobs, each multiplied by the
    number of jobs that it represents."""
    prepare_s = spread(row["prepare_s"] for row in rows).median
    return prepare_s + sum(float(row["duration_s"]) * float(row["stands_for"]) for row in rows)


def notes(options: argparse.Namespace) -> list[str]:
    """Return a description of the run, in sentences."""
    scale = SCALES[options.scale]
    found, dtype = [], next(size.dtype for size in scale.sweeps.values() if isinstance(size, Size))
    for name, size in scale.sweeps.items():
        test = size.test if isinstance(size, Size) else size.heldout
        jobs = len(size.learning_rates) * len(size.ranks) * len(size.batch_sizes)
        what = "preference pairs" if name == "dpo" else "rows of GSM8K"
        measured = min(options.trl_jobs * len(size.batch_sizes), jobs)
        share = scale.trl_shares.get(name, 1.0)
        part = f"the first {share:.0%} of the steps of {measured}" if share < 1 else f"{measured}"
        found.append(
            f"{name}: {jobs} configurations on {size.train} {what}, {size.epochs} epochs; {size.validation} rows to "
            f"choose by, {test} that nothing is chosen by. TRL trains {part} of them, as many of every batch size; "
            "they stand for all."
        )
        if name in scale.all_ranks:
            ranks = ", ".join(map(str, scale.all_ranks[name]))
            found.append(f"Of {name}, the jobs of rank {ranks} are trained to their ends.")
    return [
        f"{Path(options.model).name}, {dtype}. alto and paper are timed from the start of a fresh process with an "
        "empty cache to its end, imports included; all others have their libraries imported.",
        *found,
        "In favour of the peers: rows tokenised and the model loaded once, validation rows sorted by length, no "
        "gradient checkpointing; Ray's and Optuna's trials use a lean loop instead of a trainer, and starting and "
        "stopping Ray is not timed. They are evaluated at every tenth of the steps and where they may stop, ALTO's "
        "jobs at its default of every twentieth, TRL's after every epoch.",
        "Test losses are PEFT's, of the adapter that each system chooses by the validation rows; ALTO's own are equal "
        f"within {TOLERANCES[dtype]:g}. Evaluation is the time in which ALTO's trainer evaluates jobs and the base; "
        "measuring includes evaluations that it times.",
        "Figures that end in _s are medians of repeated runs, in seconds; _spread is their range over the median.",
    ]
