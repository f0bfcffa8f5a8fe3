"""A recording: the loss curves of a task whose jobs were all trained to their end."""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alto.base import read_bytes, strict_json
from alto.early_exit.journal import Curves, curves_of, loss_of, start_of
from alto.errors import RunError, RunNotFoundError
from alto.records import SplitLoss, StartValue
from alto.runs.events import JobDescription, JournalEntry
from alto.spec import JOB_FIELDS, JobConfig

FORMAT = "alto-recording"
VERSION = 1
_MAX_BYTES = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedJob:
    """The complete curves of one job.

    Attributes:
        evaluations: ``(step, validation_loss)``, steps rising.
        scores: Value of the task's metric at each evaluation; empty if the task selects by the loss.
        score_rows: Value of the task's metric on every validation row, for each evaluation; empty if unknown.
        metrics: Name to the values of the method's metrics other than the loss, one for each evaluation; empty if there
            are none or they were not recorded.
        start: Evaluation before the first step; None if it was not recorded.
        loss_rows: Loss of every validation row, in thousandths of its unit, by step: before the first step, at rungs
            and after the last step. Empty if it was not recorded.
        tests: Evaluations on the test rows, by step: before the first step, and at every evaluation that was the job's
            best so far. Losses of rows are in thousandths. Empty if there were no test rows.
        configuration: See :class:`alto.runs.events.JobDescription`.

    Raises:
        RunError: The job was not trained to its end (only a non-finite loss may end it before its last step), or some
            of its evaluations have no score or lack a metric that others have.
    """

    job: str
    config: Mapping[str, Any]
    total_steps: int
    rows_per_step: int
    train_losses: tuple[float, ...]
    evaluations: tuple[tuple[int, float], ...]
    scores: tuple[float, ...] = ()
    score_rows: tuple[tuple[float, ...], ...] = ()
    metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    start: StartValue | None = None
    loss_rows: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    tests: Mapping[int, SplitLoss] = field(default_factory=dict)
    configuration: str | None = None

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.evaluations]
        if steps != sorted(set(steps)) or not all(0 < step <= len(self.train_losses) for step in steps):
            raise RunError(
                f"Recording, job {self.job}: expected evaluations at rising steps with a training loss for each step,"
                f" found {len(self.train_losses)} losses and evaluations at {steps}. Record the run again."
            )
        if self.scores and len(self.scores) != len(steps):
            raise RunError(
                f"Recording, job {self.job}: expected a score for each of {len(steps)} evaluations or none at all,"
                f" found {len(self.scores)}. Record the run again."
            )
        if short := [name for name, values in self.metrics.items() if len(values) != len(steps)]:
            raise RunError(
                f"Recording, job {self.job}: expected {', '.join(short)} for each of {len(steps)} evaluations, found"
                f" {', '.join(str(len(self.metrics[name])) for name in short)} values. Record the run again."
            )
        reached_end = len(self.train_losses) == self.total_steps and bool(steps) and steps[-1] == self.total_steps
        losses = (*self.train_losses, *(loss for _, loss in self.evaluations))
        if not reached_end and all(math.isfinite(loss) for loss in losses):
            raise RunError(
                f"Recording, job {self.job}: expected every step up to {self.total_steps} and an evaluation at the"
                f" last, found {len(self.train_losses)} steps and the last evaluation at {steps[-1] if steps else 0}."
                " Record a run with early_exit.enabled: false, up to its end."
            )

    @property
    def scored_evaluations(self) -> tuple[tuple[int, float, float, tuple[float, ...]], ...]:
        """``(step, validation_loss, score, score_rows)`` of every evaluation, as a selection observes it."""
        scores = self.scores or (0.0,) * len(self.evaluations)
        rows = self.score_rows or ((),) * len(self.evaluations)
        return tuple(
            (*evaluation, score, of) for evaluation, score, of in zip(self.evaluations, scores, rows, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The curves of a task whose jobs were all trained to their end, so that any policy can be replayed on them.

    Attributes:
        task: Description of the task for the reader (model, dataset, commit, …), in any form.
    """

    task: Mapping[str, Any]
    num_train: int
    jobs: tuple[RecordedJob, ...]

    @property
    def earliest_rung(self) -> float:
        """The share of the steps before which jobs cannot be compared; see :meth:`EarlyExit.resolved`."""
        # A recording does not name the method, so its settings are left out.
        configs = (
            JobConfig(**{key: value for key, value in job.config.items() if key in JOB_FIELDS}) for job in self.jobs
        )
        return max(config.earliest_rung(job.total_steps) for config, job in zip(configs, self.jobs, strict=True))

    def samples_after(self, job: RecordedJob, step: int) -> int:
        """Return how many rows ``job`` has trained after ``step`` steps; the last step of an epoch may be short."""
        steps_per_epoch = math.ceil(self.num_train / job.rows_per_step)
        epochs, steps = divmod(step, steps_per_epoch)
        return epochs * self.num_train + min(steps * job.rows_per_step, self.num_train)

    @classmethod
    def from_journal(cls, entries: Iterable[JournalEntry]) -> Recording:
        """Make a recording of the journal of a run without early exit.

        Raises:
            RunError: No task was started, evaluations used only a part of the validation rows, a job was not trained to
                its end, or a job's budget disagrees with its steps.
        """
        entries = list(entries)
        started, curves = start_of(entries), curves_of(entries)
        if started.evaluation_order:
            raise RunError(
                "Journal: expected evaluations on all validation rows, found some on a part of them. Train the task "
                "with early_exit: {evaluation_share: all}, or early_exit: false."
            )
        recording = cls(
            task={"name": started.task, "num_validation": started.num_validation},
            num_train=started.num_train,
            jobs=tuple(_job_from_curves(planned, curves[planned.job]) for planned in started.jobs),
        )
        for job, planned in zip(recording.jobs, started.jobs, strict=True):
            _check_budget(planned, recording.samples_after(job, job.total_steps))
        return recording

    def write(self, path: str | Path) -> None:
        """Write the recording to ``path`` (``.json.gz`` or ``.json``); equal content gives equal bytes.

        Losses keep six significant digits, scores and metrics all their digits. NaN and infinities are written as the
        strings ``nan``, ``inf`` and ``-inf``, because strict JSON has no such numbers.
        """
        document = {
            "format": FORMAT,
            "version": VERSION,
            "task": dict(self.task),
            "num_train": self.num_train,
            "jobs": [_job_to_json(job) for job in self.jobs],
        }
        text = json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n"
        data = text.encode()
        Path(path).write_bytes(_gzipped(data) if _is_gzip(path) else data)

    @classmethod
    def read(cls, path: str | Path) -> Recording:
        """Read a recording that `write` wrote.

        Raises:
            RunNotFoundError: There is no such file.
            RunError: The file is not a recording, or is of a newer version, or has a job that was not trained to its
                end.
        """
        document = _document_at(Path(path))
        try:
            return cls(
                task=document["task"],
                num_train=document["num_train"],
                jobs=tuple(_job_from(job) for job in document["jobs"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"{path}: expected a recording of version {VERSION}, found a document that lacks or misspells {error}."
                " Record the run again."
            ) from error


def _job_from_curves(planned: JobDescription, curves: Curves) -> RecordedJob:
    job, config = planned.job, planned.config
    steps = sorted(curves.train)
    if steps != list(range(1, len(steps) + 1)):
        raise RunError(
            f"Journal, job {job}: expected the training loss of every step, found gaps."
            " Give the whole journal of a run."
        )
    return RecordedJob(
        job=job,
        config=config,
        total_steps=planned.total_steps,
        rows_per_step=config["per_device_train_batch_size"]
        * config.get("gradient_accumulation_steps", 1)
        // config.get("num_generations", 1),
        train_losses=tuple(curves.train[step] for step in steps),
        evaluations=tuple(sorted(curves.validation.items())),
        scores=tuple(curves.scores[step] for step in sorted(curves.scores)) if any(curves.scores.values()) else (),
        score_rows=tuple(curves.score_rows[step] for step in sorted(curves.score_rows))
        if any(curves.score_rows.values())
        else (),
        metrics=_metrics_by_name(curves.metrics),
        start=curves.start,
        loss_rows=dict(sorted(curves.loss_rows.items())),
        tests=dict(sorted(curves.tests.items())),
        configuration=planned.configuration,
    )


def _metrics_by_name(metrics: Mapping[int, Mapping[str, float]]) -> dict[str, tuple[float, ...]]:
    """Return, for each metric that all steps have, its values in the order of the steps."""
    by_step = [metrics[step] for step in sorted(metrics)]
    names = [name for name in by_step[0] if all(name in of_step for of_step in by_step)] if by_step else []
    return {name: tuple(of_step[name] for of_step in by_step) for name in names}


def _check_budget(planned: JobDescription, num_samples: int) -> None:
    if num_samples != planned.samples_budgeted:
        raise RunError(
            f"Journal, job {planned.job}: expected a budget of {planned.samples_budgeted} rows, found {num_samples}"
            f" from its {planned.total_steps} steps, so a recording would misstate savings."
            " Each step must hold per_device_train_batch_size × gradient_accumulation_steps rows; the last step of an"
            " epoch holds the remaining rows."
        )


def _job_from(fields: Mapping[str, Any]) -> RecordedJob:
    return RecordedJob(
        job=fields["job"],
        config=fields["config"],
        total_steps=fields["total_steps"],
        rows_per_step=fields["rows_per_step"],
        train_losses=tuple(loss_of(loss) for loss in fields["train_losses"]),
        evaluations=tuple((step, loss_of(loss)) for step, loss in fields["evaluations"]),
        scores=tuple(fields.get("gains", ())),
        score_rows=tuple(map(tuple, fields.get("gain_rows", ()))),
        metrics={name: tuple(map(loss_of, values)) for name, values in fields.get("metrics", {}).items()},
        start=_start_from(fields.get("start")),
        loss_rows={int(step): _rows_from(rows) for step, rows in fields.get("loss_rows", {}).items()},
        tests={int(step): _test_from(value) for step, value in fields.get("tests", {}).items()},
        configuration=fields.get("configuration"),
    )


def _start_from(value: Sequence[Any] | None) -> StartValue | None:
    if value is None:
        return None
    loss, score, *rows = value
    return StartValue(validation_loss=loss_of(loss), score=float(score), score_rows=tuple(map(float, rows)))


def _job_to_json(job: RecordedJob) -> dict[str, Any]:
    start, metrics = job.start, job.metrics.items()
    optional = {
        "gains": list(job.scores),
        "gain_rows": [list(rows) for rows in job.score_rows],
        "metrics": {
            name: [value if math.isfinite(value) else str(value) for value in values] for name, values in metrics
        },
        "start": None if start is None else [_to_json(start.validation_loss), start.score, *start.score_rows],
        "loss_rows": {str(step): list(map(_thousandths, rows)) for step, rows in job.loss_rows.items()},
        "tests": {str(step): [_to_json(test.loss), *map(_thousandths, test.rows)] for step, test in job.tests.items()},
        "configuration": job.configuration,
    }
    return {
        "job": job.job,
        "config": dict(job.config),
        "total_steps": job.total_steps,
        "rows_per_step": job.rows_per_step,
        "train_losses": [_to_json(loss) for loss in job.train_losses],
        "evaluations": [[step, _to_json(loss)] for step, loss in job.evaluations],
        **{key: value for key, value in optional.items() if value},
    }


def _thousandths(value: float) -> int | str:
    return round(1000 * value) if math.isfinite(value) else str(value)


def _rows_from(values: Iterable[int | str]) -> tuple[float, ...]:
    return tuple(loss_of(value) / 1000 for value in values)


def _test_from(value: Sequence[Any]) -> SplitLoss:
    loss, *rows = value
    return SplitLoss(loss=loss_of(loss), rows=_rows_from(rows))


def _document_at(path: Path) -> Mapping[str, Any]:
    try:
        data = read_bytes(path, _MAX_BYTES)
    except FileNotFoundError as error:
        raise RunNotFoundError(f"Expected a recording at {path}, found no file. Check the path.") from error
    except OSError as error:
        raise RunError(f"Expected a readable recording at {path}, found: {error.strerror}. Check it.") from error
    try:
        document = strict_json(gzip.decompress(data) if _is_gzip(path) else data)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise RunError(
            f"{path}: expected a recording (.json or .json.gz), found {error}. Check the file and its name."
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RunError(
            f'{path}: expected a document of format "{FORMAT}", found a different format. Give the path of a recording.'
        )
    if document.get("version") != VERSION:
        raise RunError(
            f"{path}: expected a recording of version {VERSION}, found {document.get('version')}."
            " Read it with the version of ALTO that wrote it, or update ALTO."
        )
    return document


def _to_json(loss: float) -> float | str:
    return float(f"{loss:.6g}") if math.isfinite(loss) else str(loss)


def _is_gzip(path: str | Path) -> bool:
    return Path(path).suffix == ".gz"


def _gzipped(data: bytes) -> bytes:
    buffer = io.BytesIO()
    # Without a file name and a time in the header, equal content gives equal bytes.
    with gzip.GzipFile(filename="", fileobj=buffer, mode="wb", mtime=0) as file:
        file.write(data)
    return buffer.getvalue()
