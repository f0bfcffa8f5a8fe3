"""Checks of runs on disk before anything is done with them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alto.backbone import base_fingerprint
from alto.errors import RunNotFoundError
from alto.executor import ResumeState, check_base
from alto.runs import Mailbox, RunDir, read_intact_events
from alto.spec import BaseModelSpec
from alto.spec.refit import Refit

__all__ = ["check_refitted", "check_trained_on", "is_finished"]


def check_trained_on(run_dirs: Sequence[Path], base: BaseModelSpec) -> None:
    """Check that the adapters of ``run_dirs`` were trained on ``base``.

    Raises:
        RunChangedError: A run was trained on another model.
        ModelError: The base model cannot be read.
    """
    if not run_dirs:
        return
    found = base_fingerprint(base)
    for run_dir in run_dirs:
        remedy = f"put it back as it was, or name the base model that {run_dir} is meant for with --base"
        _check(run_dir, found, base, remedy)


def check_refitted(refit: Refit, found: Mapping[str, Any], base: BaseModelSpec) -> None:
    """Check that a refit trains the base model that its winner was trained on.

    Args:
        refit: Names the run of the winner.
        found: Fingerprint of ``base``, from :func:`alto.backbone.base_fingerprint`.
        base: The base model of the refit.

    Raises:
        RunChangedError: The winner was trained on another base model.
    """
    remedy = (
        f"put it back as it was, or tune again on the present model: the winner of {refit.run} was trained on a "
        "different one"
    )
    _check(Path(refit.run), found, base, remedy)


def _check(run_dir: Path, found: Mapping[str, Any], base: BaseModelSpec, remedy: str) -> None:
    with contextlib.suppress(RunNotFoundError):  # without the journal there is no fingerprint to compare with
        resume_state = ResumeState(lines=read_intact_events(RunDir(run_dir).journal_file))
        check_base(resume_state, found, model=base.id, remedy=remedy)


def is_finished(run_dir: RunDir) -> bool:
    """Return whether the run has its result and no waiting command would train more."""
    try:
        lines = read_intact_events(run_dir.journal_file)
        return ResumeState(lines=lines, extends_run=Mailbox(run_dir).extends_run).is_finished
    except RunNotFoundError:
        return False
