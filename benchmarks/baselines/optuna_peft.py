"""What a user of Optuna does: its TPE sampler and Hyperband pruner drive PEFT, one job at a time."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from peft import PeftModel

from benchmarks.baselines.bare_peft import bare_peft_one, evaluate
from benchmarks.baselines.job import Evaluation, JobSettings, Prepared

__all__ = ["Best", "optuna_search"]

REPORTED = (1, 3, 9, 27, 54, 81, 100)
"""Percent of a job's steps at which it is validated and may be pruned."""

Best = tuple[float, float, float]
"""Seconds since the beginning, validation loss, test loss."""


def optuna_search(
    prepared: Prepared,
    test: Sequence[Mapping[str, list[int]]],
    space: Callable[[optuna.Trial], Mapping[str, Any]],
    *,
    duration_s: float,
    trials: int | None,
    seed: int,
) -> list[Best]:
    """Search for ``duration_s`` seconds, loading included.

    Args:
        prepared: Base model and rows.
        test: Test rows, on which each new best adapter is judged; that time does not count.
        space: The configuration of a trial.
        duration_s: Limit.
        trials: Most trials; None sets no limit.
        seed: Of the sampler.

    Returns:
        The best adapter so far, each time that there was a better one by the validation rows.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    began = time.perf_counter() - prepared.duration_s
    found: list[Best] = []
    unpaid_s = 0.0

    def elapsed_s() -> float:
        return time.perf_counter() - began - unpaid_s

    def objective(trial: optuna.Trial) -> float:
        nonlocal unpaid_s
        config = space(trial)
        total_steps = JobSettings.of(config).total_steps(len(prepared.train))
        percent_at = {max(1, math.ceil(percent * total_steps / 100)): percent for percent in REPORTED}

        def on_evaluation(model: PeftModel, evaluation: Evaluation) -> bool:
            nonlocal unpaid_s
            if math.isfinite(evaluation.loss) and (not found or evaluation.loss < found[-1][1]):
                at = elapsed_s()
                judged = time.perf_counter()
                tested = evaluate(model, test, 8, prepared.tokenizer.pad_token_id)
                unpaid_s += time.perf_counter() - judged
                found.append((at, evaluation.loss, tested))
            trial.report(evaluation.loss, percent_at[evaluation.step])
            return trial.should_prune() or elapsed_s() >= duration_s

        job = bare_peft_one(prepared, config, eval_at_steps=sorted(percent_at), on_evaluation=on_evaluation)
        if job.evaluations[-1].step < total_steps:
            raise optuna.TrialPruned
        return job.evaluations[-1].loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True),
            pruner=optuna.pruners.HyperbandPruner(min_resource=1, max_resource=100, reduction_factor=3),
        )
    while elapsed_s() < duration_s and (trials is None or len(study.trials) < trials):
        study.optimize(objective, n_trials=1)
    return found
