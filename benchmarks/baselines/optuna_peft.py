"""The way of a user of Optuna: a sampler and a pruner control PEFT, one job at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from peft import PeftModel

from benchmarks.baselines.bare_peft import bare_peft_one
from benchmarks.baselines.job import Evaluation, JobSettings, Prepared

__all__ = ["EARLY_SHARES", "PRUNERS", "optuna_search"]

PRUNERS: Mapping[str, Callable[[], optuna.pruners.BasePruner]] = {
    "hyperband": lambda: optuna.pruners.HyperbandPruner(min_resource=1, max_resource=100, reduction_factor=3),
    "median": optuna.pruners.MedianPruner,
}
"""Pruners by name. Resources are percent of a job's steps; all other settings are Optuna's defaults."""

EARLY_SHARES = (0.01, 0.03)
"""Hyperband's first rungs, as shares of a job's steps; the others lie near tenths."""


def optuna_search(
    prepared: Prepared,
    space: Callable[[optuna.Trial], Mapping[str, Any]],
    *,
    sampler: optuna.samplers.BaseSampler,
    pruner: str,
    eval_at_steps: Callable[[JobSettings], Sequence[int]],
    on_evaluation: Callable[[PeftModel, Evaluation], bool],
    is_over: Callable[[int], bool] = lambda trials: False,
) -> int:
    """Search until the sampler has no more configurations, or ``is_over`` returns true.

    Args:
        prepared: Base model and rows.
        space: Function that returns the configuration of a trial.
        sampler: Chooses the configurations.
        pruner: Name in ``PRUNERS``.
        eval_at_steps: Steps after which a job is validated, and may be pruned.
        on_evaluation: Called after every evaluation; the trial ends if it returns true.
        is_over: Function of the number of earlier trials that returns whether no more trial begins.

    Returns:
        Rows that were trained, counting repeats.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samples = 0

    def objective(trial: optuna.Trial) -> float:
        nonlocal samples
        config = space(trial)
        settings = JobSettings.of(config)
        total_steps = settings.total_steps(len(prepared.train))

        def report(model: PeftModel, evaluation: Evaluation) -> bool:
            is_ended = on_evaluation(model, evaluation)
            trial.report(evaluation.loss, max(1, round(100 * evaluation.step / total_steps)))
            return trial.should_prune() or is_ended

        job = bare_peft_one(prepared, config, eval_at_steps=eval_at_steps(settings), on_evaluation=report)
        samples += job.samples
        if job.evaluations[-1].step < total_steps:
            raise optuna.TrialPruned
        return job.evaluations[-1].loss

    def stop(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if is_over(len(study.trials)):
            study.stop()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # Hyperband assigns trials to brackets by the study's name, which would be random if none were given.
        study = optuna.create_study(study_name="sweep", sampler=sampler, pruner=PRUNERS[pruner]())
        study.optimize(objective, callbacks=[stop])
    return samples
