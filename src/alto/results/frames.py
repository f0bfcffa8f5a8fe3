"""Tables of a run as pandas data frames."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from alto.errors import UnsupportedError
from alto.runs import JobHistory, RunHistory
from alto.runs.configurations import repeated_configurations

if TYPE_CHECKING:
    import pandas

__all__ = ["configuration_frame", "curve_frame", "import_pandas", "job_frame", "loss_frame", "sample_frame"]


def import_pandas() -> Any:
    """Import and return pandas.

    Raises:
        UnsupportedError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise UnsupportedError(
            'a table of results: expected pandas, found that it is not installed; pip install "alto-lora[data]", or '
            "use result.job_results, which needs no package"
        ) from None
    return pandas


def job_frame(history: RunHistory) -> pandas.DataFrame:
    """Return one row per job, the chosen job first, the others by their best evaluation; indexed by job id."""
    rows = [_job_row(job) for job in history.ranked()]
    return import_pandas().DataFrame(rows).set_index("job")


def _job_row(job: JobHistory) -> dict[str, Any]:
    facts = {
        "job": job.job,
        "best_validation_loss": job.best_validation_loss,
        **_tested(job, job.best_step),
        **job.best_metrics,
        "best_step": job.best_step,
        "steps": job.step,
        "total_steps": job.total_steps,
        "exit_reason": None if job.exit_reason is None else str(job.exit_reason),
        "samples_trained": job.samples_trained,
        "samples_budgeted": job.samples_budgeted,
    }
    return {**facts, **{key: value for key, value in job.config.items() if key not in facts}}


def _tested(job: JobHistory, step: int) -> dict[str, float]:
    """Return loss and metrics on the test rows after ``step``; empty if they were not measured."""
    if step not in job.test_losses:
        return {}
    metrics = {f"test_{name}": value for name, value in job.test_metrics.get(step, {}).items()}
    return {"test_loss": job.test_losses[step], **metrics}


def configuration_frame(history: RunHistory) -> pandas.DataFrame:
    """Return one row per repeated configuration, that of the chosen job first; indexed by the id of its best job."""
    pandas = import_pandas()
    rows = [
        {
            "best_job": one.jobs[0].job,
            "mean": one.mean,
            "sd": one.deviation,
            "num_jobs": len(one.jobs),
            **{key: value for key, value in one.jobs[0].config.items() if key != "seed"},
        }
        for one in repeated_configurations(history)
    ]
    return (
        pandas.DataFrame(rows).set_index("best_job") if rows else pandas.DataFrame(columns=["mean", "sd", "num_jobs"])
    )


def curve_frame(history: RunHistory) -> pandas.DataFrame:
    """Return one row per evaluation, in the order of jobs and steps; step 0 is the state before training."""
    rows = list(itertools.chain.from_iterable(map(_curve_rows, history.jobs.values())))
    columns = ["job", "step", "progress", "train_loss", "validation_loss"]
    return import_pandas().DataFrame(rows, columns=None if rows else columns)


def _curve_rows(job: JobHistory) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    if job.start is not None:
        rows.append({"job": job.job, "step": 0, "progress": 0.0, "validation_loss": job.start.validation_loss})
    for point, metrics in zip(job.evaluations, job.metrics, strict=True):
        rows.append(
            {
                "job": job.job,
                "step": point.step,
                "progress": point.progress,
                "train_loss": point.train_ema,
                "validation_loss": point.validation_loss,
                **_tested(job, point.step),
                **metrics,
            }
        )
    return rows


def loss_frame(history: RunHistory) -> pandas.DataFrame:
    """Return training losses, with one row per step, from 1, and one column per job; NaN after a job's last step."""
    pandas = import_pandas()
    columns = {job.job: pandas.Series(job.train_losses, dtype=float) for job in history.jobs.values()}
    frame = pandas.DataFrame(columns)
    frame.index = pandas.RangeIndex(1, len(frame) + 1, name="step")
    return frame


def sample_frame(history: RunHistory) -> pandas.DataFrame:
    """Return one row per prompt of the samples: the row's own reply and the generations of the base model and of the
    best adapters; the adapters' columns are job ids, the winner first."""
    rows = [
        {"prompt": one.prompt, "reference": one.reference, "base": one.base, **one.adapters} for one in history.samples
    ]
    return import_pandas().DataFrame(rows, columns=None if rows else ["prompt", "reference", "base"])
