"""Runs on disk: checks before anything is done with them, refits, evaluations, and the adapters to export."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from alto.artifacts import Rows, Winner
from alto.backbone import base_fingerprint, limits_of, load_config, load_tokenizer
from alto.base import read_json
from alto.data import HeldoutRows, LabelledText, digest_of, read_heldout_rows, read_task_rows
from alto.errors import ModelNotFoundError, RunError, RunNotFoundError, SpecError, UnsupportedError
from alto.evaluation import (
    EvaluationSettings,
    EvaluationTarget,
    OnProgress,
    Rewards,
    adapter_folder,
    add_evaluation,
    best_of_jobs,
    chat_template_beside,
    check_metrics,
    find_target,
    measure,
)
from alto.executor import ResumeState, check_base
from alto.executor.profiling import USUAL_TOKENS_PER_PASS
from alto.lora import SavedAdapter, read_saved_adapter
from alto.records import EvaluationResult
from alto.report import write_report
from alto.runs import (
    METRICS_NAME,
    JobHistory,
    Mailbox,
    QueueDir,
    RunDir,
    load_run_task,
    read_history,
    read_intact_events,
    task_outcome,
)
from alto.runs.events import TaskStarted, decode
from alto.spec import (
    JOB_FIELDS,
    BaseModelSpec,
    BaseObjects,
    GrpoSettings,
    Refit,
    Task,
    default_name,
    find_method,
    labels_beside,
    quantisation_keys,
    read_run_task,
)


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
        found: Fingerprint of ``base``, from :func:`alto.backbone.base_fingerprint`.

    Raises:
        RunChangedError: The winner was trained on another base model.
    """
    remedy = (
        f"put it back as it was, or tune again on the current model: the winner of {refit.run} was trained on a "
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


_SAME_KEYS = (
    "dataset",
    "validation_dataset",
    "test_dataset",
    "test_split",
    "method",
    "max_length",
    "train_on",
    "chat_template",
    "num_gpus",
    "adapter_dtype",
    "optim_state_dtype",
)
_PACKING = ("max_slots", "max_tokens_per_step", "max_tokens_per_pass", "gradient_checkpointing")
_UNLIMITED_TOKENS = 2**24
"""The largest allowed value, more than any step has. It means "no limit", so that no limit needs to be measured."""


def packed_as(task: Task, run: str | Path, device_name: str, num_ranks: int) -> Task:
    """Return ``task`` with every packing limit set as in ``run``.

    The jobs that share a forward pass determine the order in which sums are rounded, so two runs of a task are bitwise
    equal only if they are packed alike.

    Args:
        task: A task with absolute paths, from :func:`alto.engine.runner.portable`.

    Raises:
        RunNotFoundError: ``run`` is not a run directory.
        RunError: It is a run of another model, dataset or jobs, on another device or with another number of processes;
            or its journal has no packing, or a damaged one.
    """
    run_dir = RunDir.open(run)
    started = _started(run_dir)
    if started is None or started.packing is None:
        raise RunError(
            f"packing_from: expected a run whose journal has its packing, found {run_dir.root} without one; name a run "
            "of this version of ALTO that has begun to train, or set max_slots, max_tokens_per_step, "
            "max_tokens_per_pass and gradient_checkpointing in the task"
        )
    earlier = read_run_task(run_dir.task_file)
    packing, before = started.packing, _precision(earlier.base_model)
    for key, wanted in _precision(task.base_model).items():
        _check_same(run_dir, key, wanted, before[key])
    for key in _SAME_KEYS:
        _check_same(run_dir, key, getattr(task, key), getattr(earlier, key))
    _check_same_jobs(run_dir, task, earlier)
    _check_same(run_dir, "device", device_name, packing.get("device"))
    _check_same(run_dir, "number of processes", num_ranks, started.num_ranks)
    try:
        limits = {key: packing[key] for key in _PACKING}
        limits["max_tokens_per_step"] = limits["max_tokens_per_step"] or _UNLIMITED_TOKENS
        if None in limits.values():
            raise KeyError(next(key for key in _PACKING if limits[key] is None))
        return task.replace(**limits)
    except (KeyError, SpecError) as error:
        raise RunError(
            f"packing_from: expected the packing of {run_dir.root} as ALTO writes it into a journal, found invalid "
            f"content ({error!s:.200}); name a different run of the task"
        ) from error


def threads_of(run: str | Path) -> int | None:
    """Return the number of CPU threads with which ``run`` began; None if its journal has none."""
    started = _started(RunDir.open(run))
    return None if started is None else started.num_threads


def _started(run_dir: RunDir) -> TaskStarted | None:
    """Return the first event of a run; None if it has none or it cannot be read."""
    lines = read_intact_events(run_dir.journal_file)[:1]
    try:
        events = [decode(line).event for line in lines]
    except RunError:
        return None
    return next((event for event in events if isinstance(event, TaskStarted)), None)


def _precision(base: BaseModelSpec) -> dict[str, Any]:
    """Return the task keys that define base model and precision; keys on how it is read or compiled may differ."""
    return {"model": base.id, "dtype": base.dtype, **quantisation_keys(base.quantisation)}


def _check_same_jobs(run_dir: RunDir, task: Task, earlier: Task) -> None:
    wanted, found = ({job.id: job.config for job in each.jobs} for each in (task, earlier))
    other = next((job for job in [*wanted, *found] if wanted.get(job) != found.get(job)), None)
    if other is not None:
        raise RunError(
            f"packing_from: expected a run with the jobs of this task, found {run_dir.root} with a different {other}, "
            "which changes the rounding of jobs in the same micro-batch; name a run of the same task"
        )


def _check_same(run_dir: RunDir, key: str, wanted: Any, found: Any) -> None:
    if wanted != found:
        raise RunError(
            f"packing_from: expected a run with {key} {wanted!r}, as this task has, found {run_dir.root} with "
            f"{found!r}; name a run of the same task on the same kind of device"
        )


_MAX_NAME_CHARS = 100
_SUFFIX = "-refit"

_OF_A_SEARCH = (
    *("search", "search_space", "early_exit", "select_by", "num_finalists", "repeat_by", "metric", "name"),
    "refit",
)
"""Keys of a task that compare its jobs, and the task's name; a refit does not copy them."""


def refit_task(run_dir: RunDir, *, trust_remote_code: bool, objects: BaseObjects | None = None) -> Task:
    """Return the task of a refit of the finished run in ``run_dir``; see :meth:`alto.Engine.refit`.

    Args:
        objects: The base model, if it is given as an object; None loads the one that the run names.

    Raises:
        ModelNotFoundError: The run's base model has no name to load it by, and no object is given.
    """
    history = read_history(run_dir.root)
    outcome = task_outcome(history, run_dir)
    winner = history.jobs[outcome.best_job]
    _check_refit(winner, refit_of=outcome.refit_of)
    task = load_run_task(run_dir, trust_remote_code=trust_remote_code, is_trained=False)
    if task.reward_funcs:
        load_run_task(run_dir, trust_remote_code=trust_remote_code)  # a refit calls them too
    if objects is None and not task.base_model.is_loadable:
        raise ModelNotFoundError(
            f"refit: expected the base model of {run_dir.root} as an object, found none: {task.model} was given to "
            "alto.Task in the process of that run, and no name loads the same model; give it again: "
            "engine.refit(RUN, model=…, tokenizer=…)"
        )
    of_jobs = {*JOB_FIELDS, *find_method(task.method).fields}
    kept = {key: value for key, value in task.to_dict().items() if key not in (*of_jobs, *_OF_A_SEARCH)}
    found = Task(
        **kept,
        **_configuration(winner, task),
        name=task.name[: _MAX_NAME_CHARS - len(_SUFFIX)] + _SUFFIX,
        early_exit=False,
        refit={"run": str(run_dir.root), "job": winner.job, "steps": winner.best_step},
    )
    return found if objects is None else found.replace(model=objects)


def refit_folder(run_dir: RunDir) -> Path:
    """Return the folder for the new run: the run's parent folder, or the parent of its queue's folder."""
    queue = run_dir.root.parents[1]
    return queue.parent if QueueDir.exists(queue) else run_dir.root.parent


def _configuration(winner: JobHistory, task: Task) -> dict[str, Any]:
    """Return the winner's settings, including the length of its learning-rate schedule."""
    values = {**task.job_config(winner.config).to_dict(), "max_steps": winner.total_steps}
    if task.init_adapter is not None:
        del values["init_lora_weights"]  # has no effect with an initial adapter, and Task refuses it
    if not task.sources:
        values.pop("mixture_weights", None)
    return values


def _check_refit(winner: JobHistory, *, refit_of: str) -> None:
    """Raise UnsupportedError if the winner cannot be trained again from its configuration alone."""
    if refit_of:
        found = f"a run that is itself a refit of {refit_of} and has trained all rows; refit the original run"
    elif winner.forked_at:
        found = (
            f"{winner.job}, which continued {winner.origin} from step {winner.forked_at} with different settings "
            "(search: pbt); train the settings of your choice from the start, with: alto tune"
        )
    elif winner.starts_warm:
        found = (
            f"{winner.job}, which began with the best weights of {winner.origin}; clone it without --warm, or train on "
            "with init_adapter"
        )
    else:
        return
    raise UnsupportedError(f"refit: expected a winner that can be trained again from its configuration, found {found}")


def evaluate_adapters(
    targets: Sequence[Path],
    settings: EvaluationSettings,
    *,
    device: torch.device,
    jobs: Sequence[str],
    all_jobs: bool,
    dataset: str | None,
    base: str | None,
    trust_remote_code: bool,
    on_progress: OnProgress | None,
) -> EvaluationResult:
    """Measure adapters of one base model together on held-out rows on ``device``; other arguments and errors as in
    :meth:`alto.Engine.evaluate`."""
    target = find_target(
        targets, jobs=jobs, all_jobs=all_jobs, base=base, dataset=dataset, trust_remote_code=trust_remote_code
    )
    for adapter in target.adapters.values():
        check_metrics(adapter.folder)
    task = target.task
    if base is None:
        check_trained_on(target.run_dirs, target.base_model)
    is_rewarded = bool(target.run_dirs and task.reward_funcs) and settings.metric == "auto"
    if is_rewarded:
        settings = _for_rewards(settings, target, trust_remote_code=trust_remote_code)
    rows = read_heldout_rows(task, dataset, needs_labels=not settings.predictions)
    with contextlib.ExitStack() as stack:
        rewards = None
        if is_rewarded:  # last, because functions start processes
            rewards = stack.enter_context(contextlib.closing(Rewards(task.reward_funcs, task.reward_weights)))
        result = measure(
            target.adapters,
            rows,
            settings,
            base=target.base_model,
            device=device,
            max_tokens_per_pass=task.max_tokens_per_pass or USUAL_TOKENS_PER_PASS[device.type],
            max_length=rows.max_length if target.run_dirs else None,
            scoring=task.scoring,
            rewards=rewards,
            on_progress=on_progress,
        )
    if any(isinstance(row, LabelledText) and row.label is None for row in rows.rows):
        note = f"{rows.name}: the rows have no labels, so labels are predicted and nothing is measured."
        return replace(result, notes=(note,))
    result = replace(result, notes=_row_notes(rows, target.run_dirs, target.base_model))
    baseline_found = [] if result.baseline is None else [result.baseline]
    for evaluated in result.adapters:
        for evaluation in (*baseline_found, evaluated.evaluation):
            add_evaluation(Path(evaluated.adapter_dir), evaluation)
    for run_dir in target.run_dirs:
        write_report(run_dir)
    return result


def _for_rewards(
    settings: EvaluationSettings, target: EvaluationTarget, *, trust_remote_code: bool
) -> EvaluationSettings:
    """Return the settings for the rewards of a run: by default, answers are as long as its completions were.

    Raises:
        UntrustedCodeError: The rewards run code or send rows to a server, and the caller does not allow it.
        SpecError: vLLM is to generate the answers.
    """
    if settings.backend == "vllm":
        raise SpecError(
            "backend: expected alto for the rewards of a run, which may read end tokens, found vllm, which does not "
            "return them; leave backend out, or name a metric"
        )
    run = RunDir.open(target.run_dirs[0])
    load_run_task(run, trust_remote_code=trust_remote_code)  # asks for permission, as training does
    if settings.max_new_tokens is not None:
        return settings
    history = read_history(run.root)
    jobs = [history.jobs[name] for name in target.adapters if name in history.jobs]
    jobs = jobs or ([history.best] if history.best is not None else [])
    objectives = [target.task.job_config(job.config).objective for job in jobs]
    lengths = [one.max_completion_length for one in objectives if isinstance(one, GrpoSettings)]
    return replace(settings, max_new_tokens=max(lengths, default=None))


def _row_notes(rows: HeldoutRows, run_dirs: Sequence[Path], base: BaseModelSpec) -> tuple[str, ...]:
    """Return a notice if a run's held-out rows are not those that it began with; none if its journal does not say."""
    if rows.own is None:
        return ()
    (run_dir,), split = run_dirs, "test" if rows.own.test else "validation"
    with contextlib.suppress(RunNotFoundError):  # without the journal there is no fingerprint to compare with
        started = _started(RunDir(run_dir))
        before = None if started is None else started.data.get(f"{split}_fingerprint")
        if before is None:
            return ()
        found = rows.own.encode_held_out(load_tokenizer(base), limits_of(load_config(base)))
        if digest_of(found) != before:
            return (
                f"{rows.name}: expected the {split} rows that the run {run_dir} began with, found different rows or "
                "tokens; the adapter may have been trained on some of them. Put the files back as they were, or name "
                "other rows with --dataset.",
            )
    return ()


def find_winner(
    target: Path, *, job: str | None, base: str | None, trust_remote_code: bool, needs_rows: bool
) -> Winner:
    """Return the adapter that ``target`` names, with its base model.

    Args:
        target: A run directory (its best adapter is meant) or the folder of an adapter.
        job: Take the best adapter of this job of the run instead.
        base: The base model, if the name in the run or adapter does not find it.
        needs_rows: Whether to read the rows of the run's task to find out their columns and form.

    Raises:
        RunNotFoundError: There is no such adapter.
        RunError, UnsupportedError: See :func:`alto.lora.read_saved_adapter`.
        UntrustedCodeError: The run's task asks for code of the base model, and the caller does not allow it.
        RunChangedError: The run was trained on another base model, and ``base`` is not given.
        SpecError: Neither the adapter nor the caller names a base model.
        DataError: The rows of the task cannot be read.
    """
    if (target / "task.yaml").is_file():
        run = RunDir.open(target)
        folder = adapter_folder(target) if job is None else best_of_jobs(run, [job])[job]
        task = load_run_task(run, trust_remote_code=trust_remote_code, is_trained=False)
        return _of_run(run, task, read_saved_adapter(folder), job=job, base=base, needs_rows=needs_rows)
    if job is not None:
        raise RunNotFoundError(
            f"job: expected a run directory to look for the job {job} in, found no task.yaml in {target}; give the "
            "run, or the adapter without a job"
        )
    return _of_folder(read_saved_adapter(adapter_folder(target)), base=base, trust_remote_code=trust_remote_code)


def _of_run(
    run: RunDir, task: Task, adapter: SavedAdapter, *, job: str | None, base: str | None, needs_rows: bool
) -> Winner:
    spec = replace(task.base_model, id=base or task.model, torch_compile=False)
    if base is None:
        check_trained_on([run.root], spec)
    rows = None
    if needs_rows:
        layout = read_task_rows(task).layout
        rows = Rows(name=task.name, form=layout.form, columns=dict(layout.columns), of_messages=layout.of_messages)
    history = read_history(run.root)
    found = history.best if job is None else history.jobs.get(job)
    return Winner(
        name=task.name if job is None else f"{task.name}-{job}",
        adapter=adapter,
        base=spec,
        is_base_named=base is not None,
        named_labels=task.label_set if adapter.has_head else None,
        task=task,
        config=None if found is None else task.job_config(found.config),
        rows=rows,
        data={} if history.started is None else history.started.data,
    )


def _of_folder(adapter: SavedAdapter, *, base: str | None, trust_remote_code: bool) -> Winner:
    model = base or adapter.base_model
    if not model:
        raise SpecError(
            f"base: expected {adapter.config_file} to name the base model, found that it does not; name it with --base"
        )
    spec = BaseModelSpec(id=model, trust_remote_code=trust_remote_code)
    return Winner(
        name=default_name(adapter.folder),
        adapter=adapter,
        base=replace(spec, chat_template=chat_template_beside({"adapter": adapter.folder}, spec)),
        is_base_named=base is not None,
        named_labels=labels_beside(adapter.folder) if adapter.has_head else None,
        data=_rows_beside(adapter.folder),
    )


def _rows_beside(folder: Path) -> Mapping[str, Any]:
    """Return the form of the rows that an ALTO adapter was trained on; empty if its metrics file does not say."""
    try:
        found = read_json(folder / METRICS_NAME)
    except (OSError, ValueError):  # other programs write files of this name in their own formats
        return {}
    rows = found.get("rows") if isinstance(found, dict) else None
    return rows if isinstance(rows, dict) else {}
