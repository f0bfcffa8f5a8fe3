"""The way of a user of Ray Tune: ASHA stops the trials of a grid, each of which trains one job with PEFT.

Choices in Ray's favour: processes are used again for further trials, base model and tokenised rows come from its object
store, and starting and stopping Ray itself is not timed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from peft import PeftModel
from ray import tune
from ray.tune.schedulers import ASHAScheduler

from benchmarks.baselines.bare_peft import bare_peft_one
from benchmarks.baselines.best import BestAdapter
from benchmarks.baselines.job import Evaluation, JobSettings, Prepared

__all__ = ["EARLY_SHARES", "RayOutcome", "ray_asha"]

EARLY_SHARES = (0.025,)
"""First milestone of ASHA, as a share of a job's steps; each further milestone is four times as far, at tenths."""

REDUCTION_FACTOR = 4
"""Ray's default: the best quarter of the trials at a milestone continues, and the next milestone is four times as
far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOutcome:
    """The result of Ray Tune.

    Attributes:
        loss: Lowest validation loss of all trials.
        adapter: Folder of the adapter with this loss.
        samples: Rows trained, counting repeats.
        duration_s: Seconds from the first process of trials, including its imports, to the last result.
    """

    loss: float
    adapter: Path
    samples: int
    duration_s: float


def ray_asha(
    prepared: Prepared,
    configs: Sequence[Mapping[str, Any]],
    *,
    eval_at_steps: Sequence[Sequence[int]],
    concurrent_trials: int,
    folder: Path,
) -> RayOutcome:
    """Train ``configs`` as a grid.

    Args:
        eval_at_steps: For every configuration, the steps after which it is validated and may be stopped.
        concurrent_trials: Number of trials at a time; the cores, or the GPU, are divided among them.
        folder: Folder for Ray's results and the adapters.
    """
    gpus = 1 if torch.cuda.is_available() else 0
    threads = max(1, torch.get_num_threads() // concurrent_trials)
    ray.init(
        address="local",  # its own, whatever else runs on the machine
        num_cpus=concurrent_trials,
        num_gpus=gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},
    )
    try:
        trainable = tune.with_resources(
            tune.with_parameters(
                _train,
                prepared=prepared,
                configs=list(configs),
                eval_at_steps=list(eval_at_steps),
                folder=str(folder / "adapters"),
                threads=threads,
            ),
            {"cpu": 1, "gpu": gpus / concurrent_trials},
        )
        tuner = tune.Tuner(
            trainable,
            param_space={"number": tune.grid_search(list(range(len(configs))))},
            tune_config=tune.TuneConfig(
                metric="loss",
                mode="min",
                scheduler=ASHAScheduler(
                    time_attr="percent",
                    max_t=100,
                    grace_period=100 * EARLY_SHARES[0],
                    reduction_factor=REDUCTION_FACTOR,
                ),
                max_concurrent_trials=concurrent_trials,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(storage_path=str(folder / "ray"), name="asha", verbose=0),
        )
        began = time.perf_counter()
        results = tuner.fit()
        duration_s = time.perf_counter() - began
    finally:
        ray.shutdown()
    if results.errors:
        raise RuntimeError(f"expected no trial to fail, found {len(results.errors)}: {results.errors[0]}")
    best = min((result.metrics for result in results if result.metrics), key=lambda metrics: float(metrics["best"]))
    return RayOutcome(
        loss=float(best["best"]),
        adapter=folder / "adapters" / str(best["config"]["number"]),
        samples=sum(int(result.metrics["samples"]) for result in results if result.metrics),
        duration_s=duration_s,
    )


def _train(
    config: Mapping[str, Any],
    *,
    prepared: Prepared,
    configs: Sequence[Mapping[str, Any]],
    eval_at_steps: Sequence[Sequence[int]],
    folder: str,
    threads: int,
) -> None:
    """Run a trial: one job, which reports after each evaluation and may be ended there by the scheduler."""
    torch.set_num_threads(threads)
    number = int(config["number"])
    settings = JobSettings.of(configs[number])
    total_steps = settings.total_steps(len(prepared.train))
    best = BestAdapter(Path(folder) / str(number))

    def report(model: PeftModel, evaluation: Evaluation) -> bool:
        best.keep(model, evaluation)
        samples = min(
            evaluation.step * settings.per_device_train_batch_size,
            int(settings.num_train_epochs * len(prepared.train)),
        )
        percent = 100 * evaluation.step / total_steps
        tune.report({"loss": evaluation.loss, "percent": percent, "best": best.loss, "samples": samples})
        return False

    bare_peft_one(prepared, configs[number], eval_at_steps=eval_at_steps[number], on_evaluation=report)
