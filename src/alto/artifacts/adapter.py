"""Exports the task's best adapter as one folder: PEFT's files, metrics and a model card."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alto.artifacts.card import ModelUse, TokenizerPlace, adapter_tags, card_header
from alto.base import read_json, replace_file, sync_folder, writing
from alto.errors import RunNotFoundError
from alto.records import JobResult, TaskOutcome
from alto.runs import METRICS_NAME
from alto.spec import LABELS_NAME, LOSS, TEMPLATE_NAME, is_object_name
from alto.views.metrics import format_metric, loss_unit, metric_name
from alto.views.wording import describe_adapter_check, describe_test_rows, format_loss

_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""The end of an error's text in which the package tokenizers hides an error of the system."""


def export_best(
    result: TaskOutcome,
    best_of_job: Path,
    base_model_of: Callable[[Path], str],
    *,
    model: str,
    dataset: str,
    method: str,
    use: ModelUse,
    tokenizer: Any,
    chat_template: str | None = None,
) -> tuple[str, ...]:
    """Copy the winner's best adapter into the run's ``best/`` and describe it there.

    Args:
        best_of_job: The winner's own ``best/`` folder, in PEFT's format.
        base_model_of: Reads the name of the base model from an adapter's folder.
        model, dataset, method: Names from the task, for the card.
        use: How the winner is loaded and prompted, for the card; its labels are written to ``labels.json``.
        tokenizer: Tokenizer of the base model with the task's chat template, saved beside the adapter.
        chat_template: Text of the template that the task sets, written to the adapter's folder; None without one.

    Raises:
        RunNotFoundError: The winner's folder is gone.
        RunWriteError: The disk is full or cannot be written.

    Returns:
        Notices as sentences.
    """
    folder = Path(result.adapter_dir)
    fresh = folder.with_name(f"{folder.name}.new")
    # From the form of the rows, an export of only this folder knows how the model is prompted.
    rows = {key: use.rows[key] for key in ("form", "of_messages") if key in use.rows}
    metrics = _metrics(result) | ({"rows": rows} if rows else {})
    if not best_of_job.is_dir():
        raise RunNotFoundError(
            f"the best adapter of {result.best_job} is missing: {best_of_job} does not exist. Restore the folder, or "
            "start a new run"
        )
    try:
        with writing(Path(result.run_dir), folder):
            shutil.rmtree(fresh, ignore_errors=True)
            shutil.copytree(best_of_job, fresh, ignore=shutil.ignore_patterns("state.json"))
            base_model, notices = base_model_of(fresh), _save_tokenizer(tokenizer, fresh)
            place: TokenizerPlace = "base" if notices else "folder"
            card = _Card(
                model=model, dataset=dataset, method=method, use=use, chat_template=chat_template, tokenizer_in=place
            )
            replace_file(fresh / METRICS_NAME, json.dumps(metrics, indent=2) + "\n")
            replace_file(fresh / "README.md", card.text(result, base_model))
            if use.labels is not None:
                replace_file(fresh / LABELS_NAME, json.dumps(use.labels.to_config(), indent=2) + "\n")
            if chat_template is not None:
                replace_file(fresh / TEMPLATE_NAME, chat_template)
            shutil.rmtree(folder, ignore_errors=True)
            fresh.rename(folder)
            sync_folder(folder.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return notices


def _save_tokenizer(tokenizer: Any, folder: Path) -> tuple[str, ...]:
    """Save a tokenizer beside an adapter; return a notice if it cannot be saved, so that the result is not lost."""
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # a tokenizer's own code may raise anything
        if number := _OS_ERROR.search(str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        for file in folder.glob("tokenizer*"):
            file.unlink()
        return (f"The best adapter has no tokenizer: {type(tokenizer).__name__} cannot be saved ({error!s:.200}).",)
    return ()


def is_outdated(result: TaskOutcome) -> bool:
    """Return whether the run's ``best/`` belongs to an earlier result than ``result``: a finished run may have trained
    additional jobs. False if its ``metrics.json`` cannot be read."""
    try:
        facts = read_json(Path(result.adapter_dir) / METRICS_NAME)
    except (OSError, ValueError):
        return False
    found, best = facts if isinstance(facts, dict) else {}, _best(result)
    present = {"job": best.job, "step": best.best_step, "num_jobs": len(result.jobs)}
    return any(found.get(key, value) != value for key, value in present.items())


def _metrics(result: TaskOutcome) -> dict[str, Any]:
    best = _best(result)
    return {
        "task": result.task,
        "job": best.job,
        "config": dict(best.config),
        "metric": result.metric,
        **({"refit_of": result.refit_of} if result.refit_of else {"validation_loss": best.best_validation_loss}),
        **({} if best.test_loss is None else {"test_loss": _strict(best.test_loss)}),
        **({"test_metrics": _strict_values(best.test_metrics)} if best.test_metrics else {}),
        "metrics": _strict_values(best.best_metrics),
        "step": best.best_step,
        "total_steps": best.total_steps,
        "num_jobs": len(result.jobs),
        "samples_trained": result.samples_trained,
        "samples_budgeted": result.samples_budgeted,
        "samples_saved": round(result.samples_saved, 6),
        "samples_cut_off": round(result.samples_cut_off, 6),
        "duration_s": round(result.duration_s, 3),
        **_finalists(result),
        **({} if result.adapter_check is None else {"peft_check": asdict(result.adapter_check)}),
    }


def _strict_values(metrics: Mapping[str, float]) -> dict[str, float | str]:
    return {name: _strict(value) for name, value in metrics.items()}


def _strict(value: float) -> float | str:
    """Convert NaN and infinity to text, because strict JSON has neither."""
    return value if math.isfinite(value) else str(value)


def _finalists(result: TaskOutcome) -> dict[str, Any]:
    """Return the scores of the finalists and of the winner if answers chose it, or why they did not; else empty."""
    if result.scorer_failure:
        return {"scorer": result.scorer, "scorer_failure": result.scorer_failure}
    if not result.finalists:
        return {}
    of_winner = next(score for score in result.finalists if score.job == result.best_job)
    accuracy = {} if of_winner.num_correct is None else {"eval_accuracy": of_winner.exact_match}
    return {
        "scorer": result.scorer,
        "score": of_winner.score,
        **accuracy,
        "finalists": [score.summary() for score in result.finalists],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    """Facts about a task for its model card; see :func:`export_best`."""

    model: str
    dataset: str
    method: str
    use: ModelUse
    chat_template: str | None
    tokenizer_in: TokenizerPlace

    def text(self, result: TaskOutcome, base_model: str) -> str:
        """Return the card of the best adapter of ``result``."""
        best = _best(result)
        tables = {
            "measured on the validation rows": _written(best.best_metrics),
            "measured on the test rows": _written(best.test_metrics),
            "setting": best.config,
        }
        shown = "\n".join(_table(heading, rows) for heading, rows in tables.items() if rows)
        origin, template = self._origin(result), ""
        if self.chat_template is not None:
            template = f"""
It was trained with the chat template in `{TEMPLATE_NAME}`, not with the template of the base model.
"""
        named = "" if is_object_name(base_model) else base_model
        header = card_header(named, library="peft", pipeline=self.use.pipeline, tags=adapter_tags(named))
        return f"""{header}
# {result.task}
{_warning(result)}
LoRA adapter for `{self.model}`, tuned on `{self.dataset}` by [ALTO](https://pypi.org/project/alto-lora/): {origin}.

{self.use.adapter_code(base_model, self.tokenizer_in)}{template}
{shown}"""

    def _origin(self, result: TaskOutcome) -> str:
        """Describe how the adapter was chosen, and its losses."""
        best = _best(result)
        chosen_by = "" if result.metric == LOSS else f" by {metric_name(result.metric)}"
        tested = (
            ""
            if best.test_loss is None
            else f"; {format_loss(best.test_loss)} on {describe_test_rows(result.num_known_test)}"
        )
        if result.refit_of:
            return (
                f"the refit of\n`{Path(result.refit_of).name}`, whose winner was trained on all rows for "
                f"{best.best_step} steps, without validation{tested}"
            )
        loss = f"{format_loss(best.best_validation_loss)} ({loss_unit(self.method)})"
        return f"""the best of
{len(result.jobs)} configurations{chosen_by}, validation loss {loss}
at step {best.best_step} of {best.total_steps}{tested}"""


def _warning(result: TaskOutcome) -> str:
    check = result.adapter_check
    if check is None or check.status != "different":
        return ""
    return f"\n> **Warning.** {describe_adapter_check(check)}.\n"


def _best(result: TaskOutcome) -> JobResult:
    return next(job for job in result.jobs if job.job == result.best_job)


def _written(metrics: Mapping[str, float]) -> dict[str, str]:
    return {metric_name(name): format_metric(name, value) for name, value in metrics.items()}


def _table(heading: str, rows: Mapping[str, Any]) -> str:
    lines = "".join(f"| {key} | {value} |\n" for key, value in rows.items())
    return f"| {heading} | value |\n|---|---|\n{lines}"
