"""Measures finished adapters, and notes the numbers beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch

from alto.backbone import base_fingerprint
from alto.data import read_heldout_rows
from alto.errors import RunNotFoundError
from alto.evaluation import EvaluationSettings, OnProgress, add_evaluation, check_metrics, find_target, measure
from alto.executor import ResumeState, check_base
from alto.executor.profiling import USUAL_TOKENS_PER_PASS
from alto.export import write_report
from alto.records import EvaluationResult
from alto.runs import RunDir, read_intact_events
from alto.spec import BaseModelSpec

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
    """Measure adapters of one base on held-out rows, all at once; arguments and errors as of
    :meth:`alto.Engine.evaluate`.

    Args:
        device: Device of the base model.
    """
    target = find_target(
        targets, jobs=jobs, all_jobs=all_jobs, base=base, dataset=dataset, trust_remote_code=trust_remote_code
    )
    for adapter in target.adapters.values():
        check_metrics(adapter.folder)
    task = target.task
    if base is None:
        _check_trained_on(target.run_dirs, target.base_model)
    rows = read_heldout_rows(task, dataset)
    result = measure(
        target.adapters,
        rows,
        settings,
        base=target.base_model,
        device=device,
        max_tokens_per_pass=task.max_tokens_per_pass or USUAL_TOKENS_PER_PASS[device.type],
        max_length=rows.max_length if target.run_dirs else None,
        on_progress=on_progress,
    )
    baseline_found = [] if result.baseline is None else [result.baseline]
    for found in result.adapters:
        for evaluation in (*baseline_found, found.evaluation):
            add_evaluation(Path(found.adapter_dir), evaluation)
    for run_dir in target.run_dirs:
        write_report(run_dir)
    return result


def _check_trained_on(run_dirs: Sequence[Path], base: BaseModelSpec) -> None:
    """Check that ``base`` is the model that the adapters of runs were trained on."""
    if not run_dirs:
        return
    found = base_fingerprint(base)
    for run_dir in run_dirs:
        with contextlib.suppress(RunNotFoundError):  # without the journal there is no fingerprint to compare with
            resume_state = ResumeState(lines=read_intact_events(RunDir(run_dir).journal_file))
            remedy = f"put it back as it was, or name the base model that {run_dir} is meant for with --base"
            check_base(resume_state, found, model=base.id, remedy=remedy)
