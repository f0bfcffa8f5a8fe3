"""Resolves the adapters that a user names: a run, jobs of a run, or adapter folders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from alto.backbone import Backbone, load_tokenizer, resolve_model
from alto.data.rows import listed
from alto.errors import RunNotFoundError, SpecError
from alto.lora import HEAD, SavedAdapter, ServedAdapters, check_fit, is_adapter, read_saved_adapter, serving
from alto.records import LabelSet
from alto.runs import RunDir, load_run_task, read_history
from alto.spec import LABELS_NAME, TEMPLATE_NAME, BaseModelSpec, Task, labels_beside

BASE = "base"
"""Name of the base model without an adapter in results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTarget:
    """Adapters of one base model, and the settings needed to measure them.

    Attributes:
        adapters: Adapters by name: a job's id, ``best`` for the best one of a run, or the folder as it was given.
        base_model: Their base model, loaded as for training but not compiled.
        task: The task of the first run, or a new one for the named dataset; it defines how rows are read.
        run_dirs: Directories of the runs among the targets.
    """

    adapters: Mapping[str, SavedAdapter]
    base_model: BaseModelSpec
    task: Task
    run_dirs: tuple[Path, ...]


def find_target(
    targets: Sequence[Path],
    *,
    jobs: Sequence[str],
    all_jobs: bool,
    base: str | None,
    dataset: str | None,
    trust_remote_code: bool = False,
) -> EvaluationTarget:
    """Return the adapters that ``targets`` name: the best adapter of each run, or the adapter in each folder.

    Args:
        jobs: If a run is the only target, use the best adapters of these jobs instead.
        all_jobs: If a run is the only target, use the best adapters of all its jobs that have one.
        base: The base model; None uses the model that the adapters name.
        dataset: Path or name of the held-out rows; None uses the run's dataset.
        trust_remote_code: Whether the caller allows the base model's custom code to run.

    Raises:
        UntrustedCodeError: The task of a run needs custom code, which is not allowed.
        RunNotFoundError: There is no such adapter.
        RunError, UnsupportedError: See :func:`read_saved_adapter`.
        SpecError: A run's task cannot be read; the adapters have different base models or labels; or the base model,
            labels or rows are not named.
    """
    if not targets:
        raise SpecError("targets: expected at least one run or adapter, found none; name one")
    runs = [RunDir.open(target) for target in targets if (target / "task.yaml").is_file()]
    if jobs and all_jobs:
        raise SpecError(
            f"job: expected either names of jobs or all jobs, found both ({', '.join(jobs)} and all); leave one out"
        )
    if (jobs or all_jobs) and (len(targets) > 1 or not runs):
        found = "no task.yaml in it" if len(targets) == 1 else f"{len(targets)} folders"
        raise RunNotFoundError(
            f"job: expected one run directory to look for jobs in, found {found} ({', '.join(map(str, targets))}); "
            "give the run, or adapters without --job and --all-jobs"
        )
    if jobs or all_jobs:
        folders = best_of_jobs(runs[0], jobs)
    else:
        folders = {_name(target, targets): adapter_folder(target) for target in targets}
    if dataset is None and (len(targets) > 1 or not runs):
        raise SpecError(
            f"dataset: expected rows on which to evaluate {', '.join(map(str, targets))}, found no dataset and no "
            "single run that has rows; name them with --dataset"
        )
    adapters = {name: read_saved_adapter(folder) for name, folder in folders.items()}
    tasks = [load_run_task(run, trust_remote_code=trust_remote_code, is_trained=False) for run in runs]
    labels = _common_labels(adapters, {str(run.root): task.label_set for run, task in zip(runs, tasks, strict=True)})
    base_model = _base_model(adapters, base)
    if runs:
        task = _common_task(runs, tasks)
    else:
        assert dataset is not None
        task = Task(
            model=base_model,
            dataset=dataset,
            trust_remote_code=trust_remote_code,
            chat_template=chat_template_beside(
                folders, BaseModelSpec(id=base_model, trust_remote_code=trust_remote_code)
            ),
            method="sft" if labels is None else _method_of(labels),
        )
        task = task if labels is None else task.with_labels(labels)
    return EvaluationTarget(
        adapters=adapters,
        base_model=_as_evaluated(task.base_model, base_model),
        task=task,
        run_dirs=tuple(run.root for run in runs),
    )


def chat_template_beside(folders: Mapping[str, Path], base: BaseModelSpec) -> str | None:
    """Return the chat template in the adapters' folders, with which they were trained; None if there is none.

    Args:
        base: Their base model; an adapter without a template was trained with the template of this model.

    Raises:
        SpecError: The adapters have different chat templates.
    """
    files = {name: file for name, folder in folders.items() if (file := folder / TEMPLATE_NAME).is_file()}
    texts = {file.read_text(encoding="utf-8") for file in files.values()}
    if files and len(files) < len(folders):
        texts.add(load_tokenizer(base).chat_template)
    if len(texts) > 1:
        raise SpecError(
            f"targets: expected adapters with the same chat template, found different ones ({TEMPLATE_NAME} in "
            f"{', '.join(map(str, files.values()))}, none in {len(folders) - len(files)} others); evaluate the "
            "adapters of each template separately"
        )
    return next(iter(texts), None)


def _as_evaluated(base: BaseModelSpec, model: str) -> BaseModelSpec:
    """Return ``base`` with settings for evaluation, under the name or path ``model``."""
    return replace(base, id=model, torch_compile=False)


def _common_task(runs: Sequence[RunDir], tasks: Sequence[Task]) -> Task:
    """Return the task of the first run, after a check that all runs load the base model in the same way."""
    ways = {str(run.root): _as_evaluated(task.base_model, "") for run, task in zip(runs, tasks, strict=True)}
    if len(set(ways.values())) > 1:
        found = "; ".join(f"{name}: {_loading_keys(way)}" for name, way in ways.items())
        raise SpecError(
            f"targets: expected runs that load the base model in the same way, found {found}; evaluate the runs of "
            "each way separately"
        )
    return tasks[0]


def _method_of(labels: LabelSet) -> str:
    return "regression" if labels.problem_type == "regression" else "classification"


def _common_labels(adapters: Mapping[str, SavedAdapter], of_runs: Mapping[str, LabelSet | None]) -> LabelSet | None:
    """Return the labels that the heads of all adapters share; None if no adapter has a head.

    Args:
        of_runs: Labels of the adapters' runs, by run directory.

    Raises:
        SpecError: Only some adapters have a head, their labels differ, or the labels of an adapter are unknown.
        RunError: A file of labels is damaged.
    """
    with_head = [adapter for adapter in adapters.values() if adapter.has_head]
    if not with_head:
        return None
    without = next((adapter for adapter in adapters.values() if not adapter.has_head), None)
    if without is not None:
        raise SpecError(
            f"targets: expected adapters that either all have a classification head or all have none, found "
            f"{with_head[0].folder} with a head and {without.folder} without one; evaluate them separately"
        )
    found = {adapter.folder: _labels_of(adapter, of_runs) for adapter in with_head}
    if len(set(found.values())) > 1:
        named = "; ".join(
            f"{folder}: {labels.problem_type}, {listed(labels.names)}" for folder, labels in found.items()
        )
        raise SpecError(
            f"targets: expected adapters whose heads have the same labels, found {named}; evaluate them separately"
        )
    return next(iter(found.values()))


def _labels_of(adapter: SavedAdapter, of_runs: Mapping[str, LabelSet | None]) -> LabelSet:
    """Return the labels of an adapter with a head: the labels of its run, or the labels in its folder."""
    inside = (labels for run, labels in of_runs.items() if adapter.folder.is_relative_to(Path(run)))
    labels = next(inside, None) or labels_beside(adapter.folder)
    count = len(adapter.weights.extras[HEAD])
    if labels is None or labels.num_labels != count:
        found = "none" if labels is None else f"{labels.num_labels} names"
        raise SpecError(
            f"labels: expected names for all {count} outputs of the head in {adapter.folder / LABELS_NAME}, found "
            f"{found}; put them there, for example "
            '{"problem_type": "single_label_classification", "id2label": {"0": "no", "1": "yes"}}'
        )
    return labels


def _loading_keys(base: BaseModelSpec) -> str:
    shown = {key: value for key, value in base.task_keys().items() if key not in ("model", "torch_compile")}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def _name(target: Path, targets: Sequence[Path]) -> str:
    if len(targets) == 1 and (target / "task.yaml").is_file():
        return "best"
    return str(target) if str(target) != BASE else f"./{target}"  # BASE is the name of the base model without adapter


def adapter_folder(target: Path) -> Path:
    """Return the folder of the best adapter if ``target`` is a run, else ``target`` itself.

    Raises:
        RunNotFoundError: There is no adapter.
    """
    if (target / "task.yaml").is_file():
        run = RunDir.open(target)
        if not run.best.is_dir():
            raise RunNotFoundError(
                f"expected the best adapter of the run in {run.best}, found none: the run is not finished, or no job "
                f"gave a result; resume it, or name a job with --job (jobs with a best adapter: "
                f"{_listed(_best_adapters(run))})"
            )
        return run.best
    if not is_adapter(target):
        raise RunNotFoundError(
            f"expected a run (task.yaml) or an adapter in PEFT's format (adapter_config.json) in {target}, found "
            f"{'neither' if target.is_dir() else 'no such folder'}; check the path"
        )
    return target.resolve()


def best_of_jobs(run: RunDir, jobs: Sequence[str]) -> dict[str, Path]:
    """Return the folders of the best adapters of ``jobs``; without ``jobs``, of all jobs that have one.

    Raises:
        RunNotFoundError: A named job has no best adapter, no job has one, or some were removed.
    """
    bests = _best_adapters(run)
    removed = [job for job in _ended_with_best(run) if job not in bests and (job in jobs or not jobs)]
    if removed:
        named = ", ".join(removed[:5]) + (" and others" if len(removed) > 5 else "")
        raise RunNotFoundError(
            f"job: expected the best adapters of {named} in {run.root}, found that they were removed when the task "
            "ended or by alto prune; a new run keeps them with keep: all. Name other jobs with --job (jobs with a "
            f"best adapter): {_listed(bests)}"
        )
    for job in jobs:
        if job not in bests:
            raise RunNotFoundError(
                f"job: expected a job of {run.root} with a best adapter, found {job!r}; jobs with a best adapter: "
                f"{_listed(bests)}"
            )
    if not bests:
        raise RunNotFoundError(
            f"job: expected jobs of {run.root} with a best adapter, found no job that has been evaluated yet; resume "
            "the run"
        )
    return {job: bests[job] for job in (jobs or bests)}


def _ended_with_best(run: RunDir) -> list[str]:
    """Return the jobs of a finished run that had a best adapter when it ended; none if the journal is missing."""
    try:
        history = read_history(run.root)
    except RunNotFoundError:
        return []
    return [job.job for job in history.jobs.values() if job.best_step] if history.result is not None else []


def _best_adapters(run: RunDir) -> dict[str, Path]:
    jobs = sorted(folder.parent.name for folder in run.root.glob("jobs/*/best"))
    return {job: run.job(job, "best") for job in jobs}


def _listed(names: Mapping[str, Path]) -> str:
    return ", ".join(names) or "none"


def _base_model(adapters: Mapping[str, SavedAdapter], base: str | None) -> str:
    if base is not None:
        return base
    named: dict[str, str] = {}
    for adapter in adapters.values():
        if not adapter.base_model:
            raise SpecError(
                f"base: expected {adapter.config_file} to name the base model, found that it does "
                "not; name it with --base"
            )
        named.setdefault(resolve_model(adapter.base_model), adapter.base_model)
    if len(named) > 1:
        raise SpecError(
            f"base: expected adapters of one base model, found {', '.join(named.values())}; evaluate the "
            "adapters of each separately, or name the base model of all of them with --base"
        )
    return next(iter(named.values()))


@contextlib.contextmanager
def loaded_adapters(backbone: Backbone, adapters: Sequence[SavedAdapter | None], base: str) -> Iterator[ServedAdapters]:
    """Load ``adapters`` onto ``backbone`` inside the context, one per slot; None means the base model alone.

    Args:
        base: Name of the base model in error messages.

    Raises:
        TargetModuleError: An adapter does not fit the model.
    """
    for adapter in adapters:
        if adapter is not None:
            check_fit(
                backbone.model,
                adapter,
                base,
                remedy="name the model it was trained on with --base",
                otherwise=", or evaluate it with PEFT",
            )
    weights = [None if adapter is None else (adapter.weights, adapter.scales) for adapter in adapters]
    with serving(backbone.model, weights, backbone.run_once, backbone.rows_in_pass) as served:
        yield served
