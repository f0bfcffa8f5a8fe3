"""Measures finished adapters and writes the scores beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from alto.data import read_heldout_rows
from alto.engine.existing_runs import check_trained_on
from alto.evaluation import EvaluationSettings, OnProgress, add_evaluation, check_metrics, find_target, measure
from alto.executor.profiling import USUAL_TOKENS_PER_PASS
from alto.export import write_report
from alto.records import EvaluationResult

__all__ = ["evaluate_adapters"]


def evaluate_adapters(
    targets: Sequence[Path],
    settings: EvaluationSettings,
    *,
    device: torch.device,
    jobs: Sequence[str],
    all_jobs: bool,
    dataset: str | None,
    base: str | None,
    trust_remote_code: bool,
    on_progress: OnProgress | None,
) -> EvaluationResult:
    """Measure adapters of one base model together on held-out rows on ``device``; other arguments and errors as in
    :meth:`alto.Engine.evaluate`."""
    target = find_target(
        targets, jobs=jobs, all_jobs=all_jobs, base=base, dataset=dataset, trust_remote_code=trust_remote_code
    )
    for adapter in target.adapters.values():
        check_metrics(adapter.folder)
    task = target.task
    if base is None:
        check_trained_on(target.run_dirs, target.base_model)
    rows = read_heldout_rows(task, dataset)
    result = measure(
        target.adapters,
        rows,
        settings,
        base=target.base_model,
        device=device,
        max_tokens_per_pass=task.max_tokens_per_pass or USUAL_TOKENS_PER_PASS[device.type],
        max_length=rows.max_length if target.run_dirs else None,
        scoring=task.scoring,
        on_progress=on_progress,
    )
    baseline_found = [] if result.baseline is None else [result.baseline]
    for found in result.adapters:
        for evaluation in (*baseline_found, found.evaluation):
            add_evaluation(Path(found.adapter_dir), evaluation)
    for run_dir in target.run_dirs:
        write_report(run_dir)
    return result
