"""The result of a task, returned by the engine or read from a run directory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from alto.backbone import classifier_of, load_network
from alto.base import resume_command
from alto.errors import NoResultError, SpecError, UnsupportedError
from alto.records import AdapterCheck, FinalistScore, JobResult, Lead, TaskOutcome
from alto.results.best_config import BestConfig, best_config
from alto.results.comparison import (
    RunComparison,
    compare,
    configuration_frame,
    curve_frame,
    job_frame,
    loss_frame,
    sample_frame,
)
from alto.runs import RunDir, RunHistory, load_run_task, read_history, task_outcome
from alto.spec import Task

if TYPE_CHECKING:
    import pandas
    from peft import PeftModel
    from rich.console import RenderableType
    from transformers import PreTrainedModel


def load_adapter(folder: Path, task: Task, model: PreTrainedModel | None, *, device: str | None) -> PeftModel:
    """Load the adapter in ``folder`` onto its base model, in evaluation mode; see :meth:`alto.TaskResult.load_best`."""
    try:
        from peft import PeftModel
    except ImportError:
        raise UnsupportedError(
            "load_best: expected peft, found that it is not installed; pip install peft, or serve the adapter in "
            f"{folder} with another program that reads PEFT's format"
        ) from None
    if model is None:
        place = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
        model = load_network(task.base_model, device=place)
        labels = task.label_set
        model = model if labels is None else classifier_of(model, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads attributes that transformers has renamed
        return PeftModel.from_pretrained(model, str(folder)).eval()


@dataclass(frozen=True, repr=False)
class TaskResult:
    """The result of one task: its best adapter, every job, and its run directory.

    Values that are not in :attr:`outcome` are read from the run directory when they are accessed. A result prints its
    table of jobs; in a notebook, it also shows its curves.

    Attributes:
        outcome: The facts, as plain values.
    """

    outcome: TaskOutcome

    @property
    def task(self) -> str:
        """Name of the task."""
        return self.outcome.task

    @property
    def run_dir(self) -> str:
        """Folder of the run."""
        return self.outcome.run_dir

    @property
    def adapter_dir(self) -> str:
        """Folder of the best adapter, in PEFT's format."""
        return self.outcome.adapter_dir

    @property
    def best_job(self) -> str:
        """Id of the chosen job."""
        return self.outcome.best_job

    @property
    def best_validation_loss(self) -> float:
        """Validation loss of the chosen adapter; infinity for a refit, which has no validation."""
        return self.outcome.best_validation_loss

    @property
    def refit_of(self) -> str:
        """For a refit, the run whose winner was trained again on all rows, without validation; else empty."""
        return self.outcome.refit_of

    @property
    def metric(self) -> str:
        """The metric by which the adapter was selected: ``loss``, or a metric of the task's method."""
        return self.outcome.metric

    @property
    def best_metrics(self) -> Mapping[str, float]:
        """Metrics of the method at the best job's best evaluation."""
        return self.outcome.best_metrics

    @property
    def time_s(self) -> Mapping[str, float]:
        """Seconds spent on ``training``, ``evaluation``, ``saving`` and ``measuring``."""
        return self.outcome.time_s

    @property
    def training_all_s(self) -> float | None:
        """Seconds that training every job to its end would take: ``duration_s``, and the time of the rows not trained
        at the pace of this run, without evaluations; None if unknown."""
        return self.outcome.training_all_s

    @property
    def test_loss(self) -> float | None:
        """Loss of the best adapter on the test rows, which are not used for selection; None without test rows."""
        return self.outcome.test_loss

    @property
    def test_metrics(self) -> Mapping[str, float]:
        """Metrics of the method on the test rows; empty without test rows."""
        return self.outcome.test_metrics

    @property
    def num_known_test(self) -> int:
        """Number of test rows that are also training or validation rows."""
        return self.outcome.num_known_test

    @property
    def job_results(self) -> tuple[JobResult, ...]:
        """Results of all jobs, in the order of the task; :attr:`jobs` is the same as a table."""
        return self.outcome.jobs

    @property
    def duration_s(self) -> float:
        """Seconds that the task ran."""
        return self.outcome.duration_s

    @property
    def samples_trained(self) -> int:
        """Rows that all jobs saw in training, counting repeats over epochs."""
        return self.outcome.samples_trained

    @property
    def samples_budgeted(self) -> int:
        """Rows that all jobs would have seen without early exit."""
        return self.outcome.samples_budgeted

    @property
    def samples_saved(self) -> float:
        """Share of the budgeted rows that early exit did not train, in [0, 1]."""
        return self.outcome.samples_saved

    @property
    def samples_cut_off(self) -> float:
        """Share of the budgeted rows that were not trained because ``search.budget`` ended their jobs, in [0, 1]."""
        return self.outcome.samples_cut_off

    @property
    def finalists(self) -> tuple[FinalistScore, ...]:
        """Scores of the finalists' answers if ``select_by`` is not ``metric``, best by the metric first; empty if it is
        ``metric``, or if the scorer failed."""
        return self.outcome.finalists

    @property
    def scorer(self) -> str:
        """The scorer of the finalists, also if it failed; empty without one."""
        return self.outcome.scorer

    @property
    def scorer_failure(self) -> str:
        """Why the scorer failed, so that the metric chose; empty if it did not fail."""
        return self.outcome.scorer_failure

    @property
    def lead(self) -> Lead | None:
        """Lead of the best job over the next best on the validation rows, with a 95 % interval; None if there is no
        other job, or if the values of single rows are unknown."""
        return self.outcome.lead

    @property
    def notes(self) -> tuple[str, ...]:
        """Notices about how the best adapter was chosen, as sentences."""
        from alto.views import choice_notes

        return choice_notes(self.history)

    @property
    def notices(self) -> tuple[str, ...]:
        """Problems that do not affect the result, such as a missing report, with their remedies, as sentences."""
        return self.outcome.notices

    @property
    def adapter_check(self) -> AdapterCheck | None:
        """Whether PEFT loads the best adapter as it was trained; None if the run has no such check."""
        return self.outcome.adapter_check

    @cached_property
    def history(self) -> RunHistory:
        """The history of the run, read from its journal."""
        return read_history(self.run_dir)

    @property
    def jobs(self) -> pandas.DataFrame:
        """One row per job, best first, by job id: how it ended, its losses and metrics, and its configuration.

        Raises:
            UnsupportedError: pandas is not installed.
        """
        return job_frame(self.history)

    @property
    def configurations(self) -> pandas.DataFrame:
        """One row per configuration, by the id of its best job, if jobs repeat configurations with other seeds; else
        empty. The columns are ``mean`` and ``sd`` (standard deviation) of the validation loss, or of the task's metric,
        over the configuration's jobs, their number, and the settings.

        Raises:
            UnsupportedError: pandas is not installed.
        """
        return configuration_frame(self.history)

    @property
    def curves(self) -> pandas.DataFrame:
        """One row per evaluation: ``job``, ``step``, ``progress`` (share of the job's own steps), smoothed training
        loss, validation loss, test loss if it was measured, and metrics. Step 0 is the state before training: the
        frozen base model, or ``init_adapter``.

        Raises:
            UnsupportedError: pandas is not installed.
        """
        return curve_frame(self.history)

    @property
    def training_losses(self) -> pandas.DataFrame:
        """Training loss of every step (rows, from 1) of every job (columns); NaN after a job's last step.

        Raises:
            UnsupportedError: pandas is not installed.
        """
        return loss_frame(self.history)

    @property
    def samples(self) -> pandas.DataFrame:
        """One row per prompt of the first validation rows (``num_samples`` of the task): ``prompt``, ``reference`` (the
        row's own reply), and greedy generations in the column ``base`` and in one column each, named by job id, for the
        best and the next best job. Empty if the task requests no samples, or if the generation failed
        (``history.sampling_failure``).

        Raises:
            UnsupportedError: pandas is not installed.
        """
        return sample_frame(self.history)

    @property
    def best_config(self) -> BestConfig:
        """The best job's configuration for PEFT and TRL: ``lora, training, not_carried = result.best_config``.

        Raises:
            UnsupportedError: peft or trl is not installed, or neither has a trainer for the task's method.
        """
        return best_config(self.history, Path(self.adapter_dir))

    def load_best(
        self, model: PreTrainedModel | None = None, *, device: str | None = None, trust_remote_code: bool = False
    ) -> PeftModel:
        """Load the best adapter onto its base model with PEFT, ready to generate.

        Args:
            model: The base model, which PEFT changes in place; None loads the task's base model, in its precision.
            device: Device of the loaded model, such as ``cuda:0``; None takes the first GPU, or the CPU if there is
                none. Not allowed with ``model``.
            trust_remote_code: Whether to allow Python code that comes with the base model, if the run's task needs it.

        Raises:
            SpecError: Both ``model`` and ``device`` are given.
            UnsupportedError: peft is not installed.
            UntrustedCodeError: The task needs code of the base model, and it is not allowed.
            ModelError: The base model is no longer there, or cannot be loaded.
        """

        if model is not None and device is not None:
            raise SpecError(
                f"load_best: expected a model, or the device to load a model to, found both (device={device!r}); "
                "move the model with model.to(device), and leave out device"
            )
        task = load_run_task(RunDir.open(self.run_dir), trust_remote_code=trust_remote_code, is_trained=False)
        return load_adapter(Path(self.adapter_dir), task, model, device=device)

    def compare(self, other: TaskResult | str | Path) -> RunComparison:
        """Compare this result with another one, such as the result of an earlier run.

        Args:
            other: A result, or the folder of a finished run.

        Raises:
            RunNotFoundError, NoResultError: See :func:`load_run`.
        """
        other = other if isinstance(other, TaskResult) else load_run(other)
        return compare(self.outcome, self.history, other.outcome, other.history)

    def __repr__(self) -> str:
        validated = "" if self.refit_of else f", best_validation_loss={self.best_validation_loss:.6g}"
        return (
            f"TaskResult(task={self.task!r}, best_job={self.best_job!r}{validated}, "
            f"jobs={len(self.job_results)}, run_dir={self.run_dir!r})"
        )

    def __str__(self) -> str:
        from rich.console import Console

        with (console := Console(no_color=True, highlight=False)).capture() as text:
            console.print(self)
        return "\n".join(line.rstrip() for line in text.get().rstrip().split("\n"))

    def __rich__(self) -> RenderableType:
        from alto.views import final_summary

        return final_summary(self.history, self.run_dir)

    def _repr_html_(self) -> str:
        from alto.report import result_html

        return result_html(self.history, self.run_dir)


def load_run(run: str | Path) -> TaskResult:
    """Load the result of a finished run from its folder.

    Args:
        run: The run directory, such as ``runs/train-20261123-101500``.

    Raises:
        RunNotFoundError: There is no run in that folder.
        NoResultError: The run has not finished, has no usable adapter, or its best adapter was not exported.
        RunError: The journal is damaged.
    """
    run_dir = RunDir.open(run)
    outcome = task_outcome(read_history(run_dir.root), run_dir)
    if not run_dir.best.is_dir():
        raise NoResultError(
            f"expected the best adapter of a finished run in {run_dir.best}, found no such folder; export it with: "
            f"{resume_command(run_dir.root)}"
        )
    return TaskResult(outcome)
