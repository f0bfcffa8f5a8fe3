"""Two finished runs side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alto.records import TaskOutcome
from alto.results.frames import import_pandas
from alto.runs import RunHistory
from alto.spec.metric import loss_scale

if TYPE_CHECKING:
    import pandas
    from rich.console import RenderableType

__all__ = ["RunComparison", "compare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Two finished runs side by side, the one that was asked first.

    Attributes:
        run_dirs: Their folders.
        facts: By name, the values of both: what was trained on, losses and metrics of the best adapters, jobs, samples,
            seconds. Losses can be compared where ``same_validation`` and ``same_loss`` are true.
        settings: Settings of the best jobs that differ, by key, with the values of both; None where a job has none.
        same_data: Whether both have the same training and validation tokens; None where a journal does not tell.
        same_validation: Whether both have the same validation tokens; None where a journal does not tell.
        same_loss: Whether the losses of both best jobs are of one method with equal settings, such as ``beta``.
    """

    run_dirs: tuple[str, str]
    facts: Mapping[str, tuple[Any, Any]]
    settings: Mapping[str, tuple[Any, Any]]
    same_data: bool | None
    same_validation: bool | None
    same_loss: bool

    def to_frame(self) -> pandas.DataFrame:
        """Facts and differing settings as rows, the runs as columns.

        Raises:
            UnsupportedError: pandas is not installed.
        """
        rows = {**self.facts, **self.settings}
        return import_pandas().DataFrame.from_dict(rows, orient="index", columns=list(self.run_dirs))

    def write_html(self, path: str | Path) -> Path:
        """Write the comparison as one HTML page that needs nothing else, and return its path: facts, settings that
        differ, the validation curves of both best jobs, and their samples where both runs have the same prompts.

        Raises:
            RunNotFoundError, RunError: The journal of a run is gone, or damaged.
            RunWriteError: The file cannot be written.
        """
        from alto.export import write_comparison

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
        from alto.export import comparison_table

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

        # In a notebook a console would show itself too.
        console = Console(record=True, width=120, file=StringIO(), force_jupyter=False)
        console.print(self)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def compare(
    outcome: TaskOutcome, history: RunHistory, other_outcome: TaskOutcome, other_history: RunHistory
) -> RunComparison:
    """Compare two finished runs.

    Args:
        outcome, history: Of the first.
        other_outcome, other_history: Of the second.
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
    # A journal of an earlier version has one digest of all rows, test rows included.
    same, has_test_rows = _same(one, other, "fingerprint"), any(_data_of(run).get("test_rows") for run in (one, other))
    return None if same is False and has_test_rows else same


def _same_validation(one: RunHistory, other: RunHistory) -> bool | None:
    same = _same(one, other, "validation_fingerprint")
    return True if same is None and _same_data(one, other) else same


def _same(one: RunHistory, other: RunHistory, fingerprint: str) -> bool | None:
    """Whether both journals have the same ``fingerprint``; None where one has none."""
    found = [_data_of(run).get(fingerprint) for run in (one, other)]
    return found[0] == found[1] if all(isinstance(digest, str) for digest in found) else None


def _data_of(history: RunHistory) -> Mapping[str, Any]:
    return {} if history.started is None else history.started.data
