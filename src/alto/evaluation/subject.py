"""What a user points at: a run, one job of a run, or the folder of an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from alto.errors import RunNotFoundError, SpecError
from alto.evaluation.adapter import SavedAdapter, read_saved_adapter
from alto.runs import RunDir
from alto.spec import Task, load_task

__all__ = ["Subject", "find_subject"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An adapter and what is needed to measure it.

    Attributes:
        base_model: What it is put on.
        task: How its rows and its base are read: its run's task, or one that says no more than where they are.
        run_dir: The run through which it was found, if any.
    """

    adapter: SavedAdapter
    base_model: str
    task: Task
    run_dir: Path | None


def find_subject(target: Path, *, job: str | None, base: str | None, dataset: str | None) -> Subject:
    """The adapter that ``target`` means: a run's best, the best of its job ``job``, or what lies in ``target`` itself.

    Args:
        base: The base model; None takes the one that the adapter names.
        dataset: Where the rows are; a run's task knows without it.

    Raises:
        RunNotFoundError: There is no such adapter.
        RunError, UnsupportedError: See :func:`read_saved_adapter`.
        SpecError: The run's task cannot be read, or no base model or rows are named anywhere.
    """
    if (target / "task.yaml").is_file():
        run = RunDir.open(target)
        adapter, task = read_saved_adapter(_best(run, job)), load_task(run.task_file)
        return Subject(adapter=adapter, base_model=_base_model(adapter, base), task=task, run_dir=run.root)
    if job is not None:
        raise RunNotFoundError(
            f"job: expected a run directory to look for {job!r} in, found no task.yaml in {target}; give the run, or "
            "the adapter's folder without --job"
        )
    if not (target / "adapter_config.json").is_file():
        raise RunNotFoundError(
            f"expected a run (task.yaml) or an adapter in PEFT's format (adapter_config.json) in {target}, found "
            f"{'neither' if target.is_dir() else 'no such folder'}; check the path"
        )
    adapter = read_saved_adapter(target.resolve())
    if dataset is None:
        raise SpecError(
            f"dataset: expected rows to evaluate the adapter in {target} on, found none named, and no run that would "
            "know them; name them with --dataset"
        )
    base_model = _base_model(adapter, base)
    return Subject(adapter=adapter, base_model=base_model, task=Task(model=base_model, dataset=dataset), run_dir=None)


def _base_model(adapter: SavedAdapter, base: str | None) -> str:
    model = base or adapter.base_model
    if not model:
        raise SpecError(
            f"base: expected {adapter.folder / 'adapter_config.json'} to name the base model, found that it does not; "
            "name it with --base"
        )
    return model


def _best(run: RunDir, job: str | None) -> Path:
    jobs = sorted(folder.parent.name for folder in run.root.glob("jobs/*/best"))
    having = f"jobs that have one: {', '.join(jobs) or 'none'}"
    if job is None and not run.best.is_dir():
        raise RunNotFoundError(
            f"expected the best adapter of the run in {run.best}, found none: the run is not finished, or no job "
            f"gave a result; resume it, or name a job with --job ({having})"
        )
    if job is not None and job not in jobs:
        raise RunNotFoundError(f"job: expected a job of {run.root} with a best adapter, found {job!r}; {having}")
    return run.best if job is None else run.job(job, "best")
