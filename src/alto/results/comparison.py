"""Compares two finished runs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alto.errors import UnsupportedError
from alto.records import TaskOutcome
from alto.runs import JobHistory, RunHistory
from alto.runs.lead import repeated_configurations
from alto.spec import loss_scale
from alto.version import install_command

if TYPE_CHECKING:
    import pandas
    from rich.console import RenderableType


def import_pandas() -> Any:
    """Import and return pandas.

    Raises:
        UnsupportedError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise UnsupportedError(
            f"a table of results: expected pandas, found that it is not installed; {install_command('data')}, or "
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """A comparison of two finished runs; the result whose ``compare`` was called comes first.

    Attributes:
        run_dirs: Folders of the runs.
        facts: Values of both runs by name: model, dataset, losses and metrics of the best adapters, number of jobs,
            samples, seconds. Losses are comparable if ``same_validation`` and ``same_loss`` are true.
        settings: Values of both best jobs, by key, for settings that differ; None for a missing value.
        same_data: Whether both have the same training and validation tokens; None if a journal does not record them.
        same_validation: Whether both have the same validation tokens; None if a journal does not record them.
        same_loss: Whether both best jobs have the same method and equal settings of the loss, such as ``beta``.
    """

    run_dirs: tuple[str, str]
    facts: Mapping[str, tuple[Any, Any]]
    settings: Mapping[str, tuple[Any, Any]]
    same_data: bool | None
    same_validation: bool | None
    same_loss: bool

    def to_frame(self) -> pandas.DataFrame:
        """Return a table with facts and differing settings as rows, and the runs as columns.

        Raises:
            UnsupportedError: pandas is not installed.
        """
        rows = {**self.facts, **self.settings}
        return import_pandas().DataFrame.from_dict(rows, orient="index", columns=list(self.run_dirs))

    def write_html(self, path: str | Path) -> Path:
        """Write the comparison as one self-contained HTML page, and return its path.

        It shows facts, differing settings, the validation curves of both best jobs, and their samples for the prompts
        that both runs have.

        Raises:
            RunNotFoundError, RunError: The journal of a run is gone, or damaged.
            RunWriteError: The file cannot be written.
        """
        from alto.report import write_comparison

        return write_comparison(
            Path(path),
            self.run_dirs,
            self.facts,
            self.settings,
            same_data=self.same_data,
            same_validation=self.same_validation,
            same_loss=self.same_loss,
        )

    def __rich__(self) -> RenderableType:
        from alto.report import comparison_table

        return comparison_table(
            self.run_dirs,
            self.facts,
            self.settings,
            same_data=self.same_data,
            same_validation=self.same_validation,
            same_loss=self.same_loss,
        )

    def _repr_html_(self) -> str:
        from rich.console import Console

        # Without force_jupyter=False, the console itself would also print in a notebook.
        console = Console(record=True, width=120, file=StringIO(), force_jupyter=False)
        console.print(self)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def compare(
    outcome: TaskOutcome, history: RunHistory, other_outcome: TaskOutcome, other_history: RunHistory
) -> RunComparison:
    """Compare two finished runs.

    Args:
        outcome, history: The first run.
        other_outcome, other_history: The second run.
    """
    one, other = _facts(outcome, history), _facts(other_outcome, other_history)
    configs = [_best_config(outcome), _best_config(other_outcome)]
    keys = dict.fromkeys(key for config in configs for key in config)
    both = {key: (configs[0].get(key), configs[1].get(key)) for key in keys}
    losses = [
        (found.method, loss_scale(config)) for found, config in zip((history, other_history), configs, strict=True)
    ]
    return RunComparison(
        run_dirs=(outcome.run_dir, other_outcome.run_dir),
        facts={name: (one.get(name), other.get(name)) for name in dict.fromkeys((*one, *other))},
        settings={key: values for key, values in both.items() if values[0] != values[1]},
        same_data=_same_data(history, other_history),
        same_validation=_same_validation(history, other_history),
        same_loss=losses[0] == losses[1],
    )


def _facts(outcome: TaskOutcome, history: RunHistory) -> dict[str, Any]:
    started = history.started
    about = {} if started is None else {"model": started.model, "dataset": started.dataset, "method": started.method}
    test = {} if outcome.test_loss is None else {"test loss": outcome.test_loss}
    return {
        **about,
        "best job": outcome.best_job,
        **({"refit of": outcome.refit_of} if outcome.refit_of else {"validation loss": outcome.best_validation_loss}),
        **test,
        **{name.replace("_", " "): value for name, value in outcome.best_metrics.items()},
        **{f"test {name.replace('_', ' ')}": value for name, value in outcome.test_metrics.items()},
        "jobs": len(outcome.jobs),
        "samples trained": outcome.samples_trained,
        "samples saved": outcome.samples_saved,
        "seconds": outcome.duration_s,
    }


def _best_config(outcome: TaskOutcome) -> Mapping[str, Any]:
    return next(job.config for job in outcome.jobs if job.job == outcome.best_job)


def _same_data(one: RunHistory, other: RunHistory) -> bool | None:
    same = _same(one, other, "train_validation_fingerprint")
    if same is not None:
        return same
    # Journals of earlier versions have one digest of all rows, including test rows.
    same, has_test_rows = _same(one, other, "fingerprint"), any(_data_of(run).get("test_rows") for run in (one, other))
    return None if same is False and has_test_rows else same


def _same_validation(one: RunHistory, other: RunHistory) -> bool | None:
    same = _same(one, other, "validation_fingerprint")
    return True if same is None and _same_data(one, other) else same


def _same(one: RunHistory, other: RunHistory, fingerprint: str) -> bool | None:
    """Return whether both journals have the same ``fingerprint``; None if one has none."""
    found = [_data_of(run).get(fingerprint) for run in (one, other)]
    return found[0] == found[1] if all(isinstance(digest, str) for digest in found) else None


def _data_of(history: RunHistory) -> Mapping[str, Any]:
    return {} if history.started is None else history.started.data
