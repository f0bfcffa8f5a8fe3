"""A sweep in the form that every system gets, and the quality of its adapters by PEFT."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from alto import Engine, Task, TaskResult
from alto.backbone import load_backbone, resolve_model
from alto.data.source import carve_rows
from alto.spec import Job, load_task
from benchmarks.baselines.best import BestAdapter
from benchmarks.baselines.job import BaselineJob, JobSettings, Prepared, prepare
from benchmarks.baselines.pairs import prepare_pairs, tokenize_pairs
from benchmarks.baselines.start import first_adapter
from benchmarks.baselines.trl_pairs import train_on_pairs
from benchmarks.baselines.trl_sequential import train_one
from benchmarks.common import ROOT
from benchmarks.dpo import program as dpo
from benchmarks.dpo.judge import Judge
from benchmarks.end_to_end.gate import adapter_loss
from benchmarks.end_to_end.plans import Size, make_task, splits_of
from benchmarks.end_to_end.systems import Sweep
from benchmarks.rows import write_rows

__all__ = ["TOLERANCES", "Answers", "Pairs", "Setting", "judged", "quickstart", "winner_failures"]

TOLERANCES = {"float32": 1e-3, "bfloat16": 1e-2}
"""Tolerance of a :class:`Setting` by the precision of its base model."""


class Setting(Protocol):
    """A sweep, and the quality of its adapters by PEFT alone.

    Attributes:
        task: The sweep, with evaluations at every tenth of a job's steps.
        num_train: Number of training rows.
        tolerance: Relative tolerance between a loss that a system reports and the loss that PEFT finds with the same
            adapter.
        prepare_s: Seconds in which the peers have loaded the model and tokenised the rows.
    """

    task: Task
    num_train: int
    tolerance: float

    @property
    def prepare_s(self) -> float: ...

    def train_with_trl(self, job: Job, best: BestAdapter, share: float) -> BaselineJob:
        """Train the first ``share`` of ``job``: :func:`trl_config`. ``best`` keeps its best adapter, if TRL lets it."""
        ...

    def peft_losses(self, adapter: Path) -> tuple[float, float]:
        """Return validation and test loss of an adapter, as PEFT finds them."""
        ...

    def test_loss(self, run_dir: str) -> float | None:
        """Return the test loss of a run's best adapter as ALTO finds it; None if ALTO has no such number."""
        ...


class Answers:
    """A sweep on questions and answers: a :class:`Setting`.

    Args:
        folder: Folder for the rows and for the files of the systems.
    """

    def __init__(self, size: Size, model: str, data: Path, folder: Path) -> None:
        self._size, self._base, self._folder = size, resolve_model(model), folder
        self._splits = splits_of(size, data)
        self.task = make_task(size, model, self._splits, folder / "sweep")
        self.num_train, self.tolerance = size.train, TOLERANCES[size.dtype]

    @cached_property
    def sweep(self) -> Sweep:
        prepared = self._prepare(*self._splits[:2])
        return Sweep(task=self.task, prepared=prepared, size=self._size, folder=self._folder)

    @property
    def prepare_s(self) -> float:
        return self.sweep.prepared.duration_s

    def train_with_trl(self, job: Job, best: BestAdapter, share: float) -> BaselineJob:
        config, steps = trl_config(job, self.num_train, share)
        return train_one(self.sweep.prepared, config, eval_at_steps=steps, on_evaluation=best.keep)

    def peft_losses(self, adapter: Path) -> tuple[float, float]:
        train, _, test = self._splits
        tested = self._prepare(train[:1], test)
        prepared = self.sweep.prepared
        return (
            adapter_loss(prepared, adapter, prepared.validation),
            adapter_loss(tested, adapter, tested.validation),
        )

    def _prepare(self, train: Sequence[dict[str, str]], validation: Sequence[dict[str, str]]) -> Prepared:
        size = self._size
        return prepare(self._base, train, validation, max_length=size.max_length, dtype=size.dtype)

    def test_loss(self, run_dir: str) -> float | None:
        rows = str(self._folder / "sweep" / "test.jsonl")
        [found] = Engine().evaluate(run_dir, dataset=rows, metric="loss").adapters
        return found.evaluation.loss


class Pairs:
    """A sweep on preference pairs: a :class:`Setting` whose losses are DPO's.

    Args:
        folder: Folder for the pairs.
    """

    def __init__(self, size: dpo.Size, model: str, data: Path, folder: Path) -> None:
        self._size, self._model, self._folder = size, model, folder
        self._splits = carve_rows(dpo.read_pairs(data), (size.train, size.validation, size.heldout), dpo.DATA_SEED)
        folder.mkdir(parents=True, exist_ok=True)
        for name, pairs in zip(("train", "validation"), self._splits, strict=False):
            write_rows(folder / f"{name}.jsonl", pairs)
        self.task = dpo.make_task(size, model, folder, size.seeds[0])
        self.num_train, self.tolerance = size.train, TOLERANCES["float32"]

    @cached_property
    def _prepared(self) -> Any:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        base = resolve_model(self._model)
        return prepare_pairs(base, *self._splits[:2], folder, max_length=self._size.max_length)

    @property
    def prepare_s(self) -> float:
        return float(self._prepared.duration_s)

    def train_with_trl(self, job: Job, best: BestAdapter, share: float) -> BaselineJob:
        config, steps = trl_config(job, self.num_train, share)
        start = first_adapter(load_backbone(self.task.base_model), job.config)
        return train_on_pairs(self._prepared, config, start=start, eval_at_steps=steps)

    def peft_losses(self, adapter: Path) -> tuple[float, float]:
        prepared = self._prepared
        heldout = tokenize_pairs(prepared.tokenizer, self._splits[2], max_length=self._size.max_length)
        validation, test = (
            Judge(prepared, pairs, dpo.BETA).worth(str(adapter)).loss
            for pairs in (prepared.validation.to_list(), heldout)
        )
        return validation, test

    def test_loss(self, run_dir: str) -> float | None:
        return None  # alto eval measures preferences of pairs, but no loss


def trl_config(job: Job, num_train: int, share: float) -> tuple[dict[str, Any], list[int]]:
    """Return the configuration with which TRL trains the first ``share`` of a job, and the steps at which it evaluates.

    These are the ends of epochs; for a part of a job, its last step: one evaluation, which is repeated in every epoch.
    """
    config = job.config.model_dump()
    config["num_train_epochs"] *= share
    settings = JobSettings.of(config)
    last = settings.total_steps(num_train)
    an_epoch = math.ceil(num_train / settings.per_device_train_batch_size)
    return config, [last] if share < 1 else list(range(an_epoch, last + 1, an_epoch))


def quickstart(num_train: int, num_validation: int, folder: Path) -> Task:
    """Return the quickstart's task on a number of rows of its data."""
    command = (sys.executable, str(ROOT / "examples" / "make_word_problems.py"), "--output", str(folder))
    sizes = ("--train", str(num_train), "--validation", str(num_validation))
    subprocess.run([*command, *sizes], check=True, stdout=subprocess.DEVNULL)
    files = {"dataset": "train", "validation_dataset": "validation"}
    return load_task(
        ROOT / "examples" / "quickstart.yaml",
        [f"{key}={folder / split}.jsonl" for key, split in files.items()],
    )


def winner_failures(task: Task, result: TaskResult) -> list[str]:
    """Return the faults of the winner of a sweep; empty if it is one of its configurations, with a finite loss."""
    asked = {job.id: job.config.model_dump(mode="json") for job in task.jobs}
    won = [job.config for job in result.job_results if job.job == result.best_job]
    failures = []
    if won != [asked.get(result.best_job)]:
        failures.append(f"expected the winner among the {len(asked)} configurations, found {result.best_job}: {won}")
    if not math.isfinite(result.best_validation_loss):
        failures.append(f"expected a finite validation loss, found {result.best_validation_loss}")
    return failures


def judged(
    setting: Setting, adapter: Path, validation_loss: float, *, test_loss: float | None = None
) -> tuple[float, list[str]]:
    """Return the test loss of an adapter, as PEFT finds it, and the faults.

    Args:
        validation_loss: Validation loss that the system reports.
        test_loss: Test loss that the system finds; None if it has none.
    """
    found, tolerance = setting.peft_losses(adapter), setting.tolerance
    failures = [
        f"{adapter}: expected a {split} loss of {by_peft} within {tolerance:g}, as PEFT finds it, found {reported}"
        for split, by_peft, reported in zip(("validation", "test"), found, (validation_loss, test_loss), strict=True)
        if reported is not None and not math.isclose(by_peft, reported, rel_tol=tolerance)
    ]
    if not all(map(math.isfinite, found)):
        failures.append(f"{adapter}: expected finite losses, found {found}")
    return found[1], failures
