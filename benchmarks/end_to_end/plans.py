"""The sweep: the paper's grid, on three datasets."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alto import Task
from alto.data.source import carve_rows
from alto.errors import DataFormatError
from benchmarks.common import DATA_DIR, GSM8K, option_parser, readable_model
from benchmarks.rows import read_rows, write_rows

__all__ = [
    "DATASETS",
    "DATA_SEED",
    "EVAL_STEPS",
    "LEARNING_RATE_FACTOR",
    "PAPER_LEARNING_RATES",
    "SIZES",
    "Size",
    "chosen",
    "make_task",
    "parser_of",
    "questions_of",
    "splits_of",
]

PAPER_LEARNING_RATES = (5e-5, 1e-4, 2e-4, 3e-4, 5e-4)
LEARNING_RATE_FACTOR = 10
"""Factor on learning rates: a base of a million parameters needs larger steps than one of billions."""

EVAL_STEPS = 0.1
"""Share of a job's steps between two evaluations; the rungs of the default policy are additional."""

DATA_SEED = 42

DATASETS: Mapping[str, Path] = {
    "gsm8k": GSM8K,
    "cot_flan": DATA_DIR / "cot_flan" / "train.jsonl.gz",
    "instruct_gpteacher": DATA_DIR / "instruct_gpteacher" / "train.jsonl.gz",
}
"""The datasets: word problems, explained answers of six kinds, instructions."""

_KEYS = (("question", "answer"), ("prompt", "response"), ("prompt", "completion"), ("instruction", "output"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of the sweep at one scale.

    Attributes:
        model: Default base model.
        datasets: Names in ``DATASETS``.
        train, validation, test: Numbers of rows to train on, to choose by, and to judge the chosen adapter on.
        learning_rate_factor: Factor on the paper's learning rates.
        dtype: Precision of the base model; adapters and their optimizers are as in each system.
        concurrent_trials: Number of trials that Ray Tune runs at a time: one per core, or as many as fit into a GPU.
        at_once: Resident jobs of ``loop`` and ``lorafusion``.
        batched_baselines: The ones of ``loop`` and ``lorafusion`` that can be timed on such a machine.
    """

    model: str = "alto-tiny"
    datasets: tuple[str, ...] = tuple(DATASETS)
    train: int
    validation: int
    test: int
    epochs: int
    max_length: int
    learning_rates: tuple[float, ...] = PAPER_LEARNING_RATES
    learning_rate_factor: float = LEARNING_RATE_FACTOR
    ranks: tuple[int, ...] = (16, 32, 64)
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    dtype: str = "float32"
    concurrent_trials: int = 2
    at_once: int = 16
    batched_baselines: tuple[str, ...] = ("loop",)


SIZES: Mapping[str, Size] = {
    "smoke": Size(
        datasets=("gsm8k",),
        train=18,
        validation=4,
        test=6,
        epochs=1,
        max_length=256,
        learning_rates=(2e-4,),
        ranks=(16,),
        batch_sizes=(2, 8),
        concurrent_trials=1,
        at_once=2,
    ),
    "cpu": Size(train=60, validation=12, test=128, epochs=2, max_length=256),
    "gpu": Size(
        model="Qwen/Qwen3-8B",
        train=1024,
        validation=128,
        test=512,
        epochs=3,
        max_length=1024,
        learning_rate_factor=1,
        dtype="bfloat16",
        concurrent_trials=1,
        at_once=32,
        batched_baselines=("loop", "lorafusion"),
    ),
}


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return the options of benchmarks that sweep the grid on the datasets."""
    parser = option_parser(description, SIZES, threads=True)
    parser.add_argument("--model", type=readable_model, help="base model: a folder, a hub id or alto-tiny")
    parser.add_argument("--dataset", type=Path, help="a file of rows, in place of the three")
    return parser


def chosen(options: argparse.Namespace) -> tuple[Size, str, Mapping[str, Path]]:
    """Return the choices of such options: the size, the base model, and the datasets by name."""
    size = SIZES[options.scale]
    datasets = {options.dataset.stem: options.dataset} if options.dataset else {n: DATASETS[n] for n in size.datasets}
    return size, options.model or size.model, datasets


def splits_of(size: Size, dataset: Path, seed: int = DATA_SEED) -> list[list[dict[str, str]]]:
    """Return training, validation and test rows."""
    return [list(rows) for rows in carve_rows(questions_of(dataset), (size.train, size.validation, size.test), seed)]


def make_task(size: Size, model: str, splits: Sequence[Sequence[Mapping[str, str]]], folder: Path, **more: Any) -> Task:
    """Return the sweep as a task whose rows are in files in ``folder``, so that every system reads the same.

    Args:
        more: Other settings of the task, in place of those set here; None removes one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        name: write_rows(folder / f"{name}.jsonl", rows)
        for name, rows in zip(("train", "validation", "test"), splits, strict=True)
    }
    settings = {
        "name": folder.name,
        "model": model,
        "dataset": files["train"],
        "validation_dataset": files["validation"],
        "max_length": size.max_length,
        "num_train_epochs": size.epochs,
        "eval_steps": EVAL_STEPS,
        "lora_alpha": "2*r",
        "dtype": size.dtype,
        "search_space": {
            "learning_rate": [size.learning_rate_factor * rate for rate in size.learning_rates],
            "r": list(size.ranks),
            "per_device_train_batch_size": list(size.batch_sizes),
        },
    }
    return Task(**{key: value for key, value in (settings | more).items() if value is not None})


def questions_of(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file of JSON lines as questions and answers.

    Raises:
        DataFormatError: A row has none of the known pairs of keys.
    """
    return [_question_and_answer(row, path) for row in read_rows(path)]


def _question_and_answer(row: Mapping[str, Any], path: Path) -> dict[str, str]:
    for question, answer in _KEYS:
        if isinstance(row.get(question), str) and isinstance(row.get(answer), str):
            return {"question": row[question], "answer": row[answer]}
    known = ", ".join("/".join(keys) for keys in _KEYS)
    raise DataFormatError(f"{path}: expected rows with one of {known}, found {', '.join(row)}; rename the columns")
