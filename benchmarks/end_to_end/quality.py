"""Compares the best adapter of a sweep with recommended settings, on test rows that were not used for the choice.

``unsloth`` are the first settings that Unsloth's guide recommends. ``unsloth_scaled`` multiplies their learning rate by
the factor of the grid, because 2e-4 is meant for bases of billions of parameters. ``lora_without_regret`` are the
settings that Thinking Machines' article of that name and its cookbook recommend. ``found`` is the best of the paper's
grid by ALTO's default policy. All train for the same number of epochs on the same rows, and for each the evaluation
counts that is best on the validation rows.

    python -m benchmarks.paper quality --scale cpu
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from alto import Engine
from alto.backbone import resolve_model
from benchmarks.baselines.job import prepare
from benchmarks.common import publish_figures
from benchmarks.end_to_end.gate import adapter_loss, tolerance_of
from benchmarks.end_to_end.plans import Size, chosen, make_task, parser_of, splits_of
from benchmarks.parts import Part, forget_parts, measured_rows

__all__ = ["GOALS", "main", "recommended"]

GOALS = {"found_over_recommended_worst": ("<=", 1.0)}
SEEDS = {"smoke": (1,), "cpu": (1, 2, 3), "gpu": (1, 2, 3)}

_EXPONENTS = {"qwen": 0.0775, "llama": 0.781}
"""Exponent of the hidden size in the cookbook's learning rate, by family; the article has no others."""

Row = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser_of(__doc__).parse_args(arguments)
    torch.set_num_threads(options.threads)
    size, model, datasets = chosen(options)
    parts = {
        f"quality-{options.scale}-{name}-{seed}": Part(
            measure=partial(measure, name, size, model, file, seed), inputs=(resolve_model(model), file)
        )
        for name, file in datasets.items()
        for seed in SEEDS[options.scale]
    }
    rows, failures = measured_rows(options.out, parts)
    code = publish_figures(
        options,
        "quality",
        gate_failures=failures,
        figures=lambda: figures(rows),
        goals=GOALS,
        rows=rows,
        notes=[
            f"{model}; {', '.join(datasets)}: {size.train} rows to train on, {size.validation} to choose by, "
            f"{size.test} to judge by, {size.epochs} epochs, {len(SEEDS[options.scale])} seeds, of rows and of jobs. "
            "Figures are ratios of test losses: means over the seeds, the median over the datasets, or the worst.",
            "Both recommendations leave the optimizer's 8-bit state out here, which saves memory; the article leaves "
            "the batch size open but says that small ones are better: 4.",
        ],
    )
    if code == 0:
        forget_parts(options.out, parts)
    return code


def recommended(model: str, factor: float) -> dict[str, dict[str, Any]]:
    """Return settings by name: canonical keys of a job.

    Args:
        factor: Factor on the learning rate of ``unsloth_scaled``.
    """
    unsloth = {
        "learning_rate": 2e-4,
        "r": 16,
        "lora_alpha": 16,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "weight_decay": 0.01,
        "warmup_steps": 5,
        "lr_scheduler_type": "linear",
    }
    found = {
        "unsloth": unsloth,
        "lora_without_regret": {
            "learning_rate": cookbook_learning_rate(model),
            "r": 32,
            "lora_alpha": 32,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 1,
            "weight_decay": 0.0,
            "warmup_steps": 0,
            "lr_scheduler_type": "constant",
        },
    }
    if factor != 1:
        found["unsloth_scaled"] = unsloth | {"learning_rate": factor * 2e-4}
    return found


def cookbook_learning_rate(model: str) -> float:
    """Return ten times the 5e-5 of full fine-tuning, times ``(2000 / hidden size) ** exponent``."""
    config = AutoConfig.from_pretrained(resolve_model(model))
    family = next((name for name in _EXPONENTS if name in config.model_type), "llama")
    return float(10 * 5e-5 * (2000 / config.get_text_config().hidden_size) ** _EXPONENTS[family])


def measure(name: str, size: Size, model: str, dataset: Path, seed: int, folder: Path) -> tuple[list[Row], list[str]]:
    """Return the best of every way, on one dataset and seed; and the faults: the test losses that ALTO reports for its
    exported adapters must be those that PEFT finds."""
    splits = splits_of(size, dataset, seed)
    more = {"test_dataset": str(folder / name / "test.jsonl"), "seed": seed, "data_seed": seed, "report_to": "none"}
    settings = recommended(model, size.learning_rate_factor)
    tasks = {"found": make_task(size, model, splits, folder / name, **more)}
    for way, config in settings.items():
        own = more | config | {"search_space": None, "early_exit": False}
        tasks[way] = make_task(size, model, splits, folder / name, **own)
    tested = prepare(resolve_model(model), splits[0][:1], splits[2], max_length=size.max_length, dtype=size.dtype)
    rows, failures = list[Row](), list[str]()
    for way, task in tasks.items():
        result = Engine(output_dir=folder / "runs").tune(task)
        loss = adapter_loss(tested, Path(result.adapter_dir), tested.validation)
        if result.test_loss is None or not math.isclose(loss, result.test_loss, rel_tol=tolerance_of(tested)):
            failures.append(f"{way}: expected a test loss of {loss} as PEFT finds it, found {result.test_loss}")
        [config] = [job.config for job in result.job_results if job.job == result.best_job]
        keys = ("learning_rate", "r", "lora_alpha", "per_device_train_batch_size")
        rows.append(
            {
                "dataset": name,
                "seed": seed,
                "way": way,
                "validation_loss": result.best_validation_loss,
                "test_loss": loss,
                **{key: config[key] for key in keys},
            }
        )
    for row in rows:
        print(f"{name}, seed {seed}, {row['way']}: test loss {row['test_loss']:.4f}", flush=True)
    return rows, failures


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the test loss of the best adapter that was found, divided by that of each recommendation."""
    losses: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        losses.setdefault(row["dataset"], {}).setdefault(row["way"], []).append(row["test_loss"])
    means = {dataset: {way: statistics.fmean(each) for way, each in ways.items()} for dataset, ways in losses.items()}
    ways = [way for way in next(iter(means.values())) if way != "found"]
    ratios = {way: [found["found"] / found[way] for found in means.values()] for way in ways}
    best = [found["found"] / min(found[way] for way in ways) for found in means.values()]
    return {
        "found_over_recommended_worst": max(best),
        "found_over_recommended": statistics.median(best),
        **{f"found_over_{way}": statistics.median(each) for way, each in ratios.items()},
    }
