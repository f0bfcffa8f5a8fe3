"""Publication of a finished run: its model, its file of loss curves, and the end of its job."""

from __future__ import annotations

import csv
import hashlib
import io
import math
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from alto.results import TaskResult, load_run
from alto.runs.progress import trained_tokens
from alto.service.context import Service
from alto.service.ids import new_id, now
from alto.service.models import fine_tuned_name
from alto.service.openai.files import RESULTS, artefact_of
from alto.service.openai.translation import multiplier_of
from alto.service.savings import savings_of
from alto.service.store.events import add_event
from alto.service.store.tables import FileRow, JobRow, ModelRow

__all__ = ["Publication", "publish", "write_result"]

_COLUMNS = ("job", "step", "progress", "train_loss", "valid_loss", "test_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Stored results of a finished run, which its job does not show yet.

    Attributes:
        model: The model that the job returns.
        curves: The file of loss curves.
        result: Value of the job's ``result``.
        message: A sentence for users.
        data: The same for programs.
    """

    model: ModelRow
    curves: FileRow
    result: dict[str, Any]
    message: str
    data: dict[str, Any]


def publish(service: Service, job: JobRow) -> Publication:
    """Store the adapter and the loss curves of the finished run of ``job`` among the artefacts.

    Raises:
        AltoError: The run has no result.
        OSError: The artefacts cannot be written.
    """
    result = load_run(service.run_of(job))
    adapter = f"models/{job.tenant}/{job.id}"
    service.artefacts.write_folder(adapter, service.run_of(job) / "best")
    text = _curves(result).encode()
    curves = FileRow(
        id=new_id("file"),
        tenant=job.tenant,
        filename=f"{job.id}-results.csv",
        purpose=RESULTS,
        num_bytes=len(text),
        sha256=hashlib.sha256(text).hexdigest(),
        created_at=now(),
        status="processed",
    )
    service.artefacts.write(artefact_of(curves), io.BytesIO(text))
    name = fine_tuned_name(job.model, job.tenant, job.suffix, job.id)
    model = ModelRow(
        id=name, tenant=job.tenant, job=job.id, base_model=job.model, adapter=adapter, created_at=now(), serving="none"
    )
    best = next(found for found in result.job_results if found.job == result.best_job)
    history = result.history
    saved = savings_of(history, "succeeded").share
    facts = {
        "job": result.best_job,
        "best_step": best.best_step,
        "best_valid_loss": _finite(result.best_validation_loss),
        "test_loss": _finite(best.test_loss),
        "configurations": len(result.job_results),
        "samples_trained": history.samples_trained,
        "samples_budgeted": history.samples_budgeted,
        "saved_share": round(saved, 4),
    }
    message = (
        f"Best of {len(result.job_results)} configurations: {result.best_job}, validation loss "
        f"{result.best_validation_loss:.4f}; early exit saved {saved:.0%} of the training"
    )
    return Publication(
        model=model,
        curves=curves,
        result={
            **facts,
            "trained_tokens": trained_tokens(history),
            "result_files": [curves.id],
            "hyperparameters": _chosen(best.config),
        },
        message=message,
        data=facts,
    )


def write_result(session: Session, row: JobRow, found: Publication) -> None:
    """End a job as succeeded, with its published results; ``row`` must be locked."""
    session.add(found.model)
    session.add(found.curves)
    row.status, row.finished_at, row.estimated_finish = "succeeded", now(), None
    row.fine_tuned_model, row.result = found.model.id, found.result
    add_event(session, row, found.message, data=found.data)
    add_event(session, row, f"New fine-tuned model created: {found.model.id}")
    add_event(session, row, "The job has successfully completed")


def _chosen(config: Any) -> dict[str, Any]:
    """Return the best configuration's hyperparameters under OpenAI's names, with ALTO's learning rate and rank."""
    found = {
        "n_epochs": config.get("num_train_epochs"),
        "batch_size": config.get("per_device_train_batch_size"),
        "learning_rate_multiplier": multiplier_of(config["learning_rate"]),
        "beta": config.get("beta"),
    }
    return {key: value for key, value in found.items() if value is not None} | {
        "learning_rate": config["learning_rate"],
        "r": config.get("r"),
    }


def _curves(result: TaskResult) -> str:
    """Return all evaluations as CSV, one line per evaluation."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(_COLUMNS)
    for job in result.history.jobs.values():
        for point in job.evaluations:
            test = job.test_losses.get(point.step)
            writer.writerow(
                [
                    job.job,
                    point.step,
                    round(point.step / point.total_steps, 6),
                    _text(point.train_ema),
                    _text(point.validation_loss),
                    _text(test),
                ]
            )
    return text.getvalue()


def _text(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.7g}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
