"""Runs one task on this process's device: reads it, trains or resumes it, and exports its best adapter.

With several ranks, each rank runs the same task; the first rank writes the files.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from alto.artifacts import ModelUse, export_best, is_outdated
from alto.backbone import (
    SHIPPED_MODELS,
    Backbone,
    base_fingerprint,
    limits_of,
    load_tokenizer,
    loading_class,
    resolve_model,
)
from alto.base import cache_home, note_resumption
from alto.data import read_task_rows
from alto.engine.existing_runs import check_refitted
from alto.engine.objects import borrowing
from alto.engine.resident_base import ResidentBase
from alto.engine.start import read_start, with_start, with_targets, with_usual_rate
from alto.errors import AltoError, RunWriteError
from alto.evaluation import FinalistJudge, PeftCheck, Rewards, Sampler
from alto.executor import (
    Hooks,
    Ranks,
    ResumeState,
    RunInputs,
    SharedBank,
    TaskContext,
    TaskSession,
    check_base,
    check_precision,
    load_base,
    model_notes,
    recover,
    resolve_early_exit,
    run_alone,
)
from alto.executor.profiling import pack, plan, using_threads
from alto.lora import adapter_base_model
from alto.objectives import find_objective
from alto.records import TaskOutcome, TaskPlan
from alto.report import write_report
from alto.runs import (
    Journal,
    JournalEntry,
    Observer,
    RunDir,
    SilentJournal,
    load_run_task,
    read_history,
    remove_states,
    task_outcome,
)
from alto.runs.events import NO_SEQ, BaseDescription, MeasuringBegun, TaskStarted
from alto.search import check_installed
from alto.spec import BaseObjects, MixtureSource, Task, quantisation_keys, read_run_task
from alto.trackers import Tracker, chosen_trackers, tracking
from alto.version import install_command, version_of

_UNCHECKED = "The best adapter will not be loaded into PEFT to check it: peft is not installed; {install}."

_UNKNOWN_BASE = (
    "The journal of the run does not record its base model, because version 0.1 wrote it; {model} is assumed to be "
    "unchanged since."
)


class TaskRunner:
    """Runs tasks one after the other on the current CUDA device, or on the CPU if there is none.

    Args:
        observers, is_interrupted: See :class:`alto.Engine`.
        ranks: The ranks that train a task together, this process among them.
        resident_base: Keeps the base model for later tasks; None loads it for each task.
        objects: The base model of resumed runs, if it is given as an object; None loads the one that a run names.
    """

    def __init__(
        self,
        *,
        observers: Sequence[Observer] = (),
        is_interrupted: Callable[[], bool] | None = None,
        ranks: Ranks | None = None,
        resident_base: ResidentBase | None = None,
        objects: BaseObjects | None = None,
    ) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._observers = tuple(observers)
        self._is_interrupted = is_interrupted or (lambda: False)
        self.ranks = ranks or Ranks()
        self._resident_base = resident_base
        self._objects = objects

    def begin(self, task: Task, output_dir: Path) -> TaskOutcome:
        """Train ``task`` in a new run directory."""
        with borrowing(task, self.device) as found:
            prepared = self._packed(self._prepare(portable(found), ResumeState()))
            run_dir = RunDir.create(output_dir, prepared.context.task)
            with run_dir.locked(), self._session(prepared, run_dir, ResumeState()) as run:
                run_alone(run.session)
            return run.result

    def resume(self, run_dir: RunDir, *, trust_remote_code: bool) -> TaskOutcome:
        """Train a run from its last checkpoint, or from its beginning if there is none.

        Args:
            trust_remote_code: Whether the caller allows code of the base model if the run's task asks for it.
        """
        with self.opened(run_dir, trust_remote_code=trust_remote_code) as run:
            if not run.is_finished:
                run_alone(run.session)
        return run.result

    @contextlib.contextmanager
    def opened(
        self,
        run_dir: RunDir,
        *,
        trust_remote_code: bool,
        bank_of: Callable[[TaskContext], SharedBank | None] | None = None,
    ) -> Iterator[OpenRun]:
        """Yield a run at its last checkpoint, or at its beginning, to be trained inside the block; leaving the block
        exports its result.

        Args:
            trust_remote_code: Whether the caller allows code of the base model if the run's task asks for it.
            bank_of: Returns the bank that the task shares with other tasks, or None for a bank of its own.
        """
        with run_dir.locked() if self.ranks.is_first else contextlib.nullcontext():
            resume_state = self.ranks.broadcast(recover(run_dir) if self.ranks.is_first else ResumeState(), ResumeState)
            if resume_state.is_finished:
                run = OpenRun()
                yield run
                task = read_run_task(run_dir.task_file)
                run.finish(
                    self._exported(task if task.base_model.is_loadable else self._with_model_object(task), run_dir)
                )
                return
            named = load_run_task(run_dir, trust_remote_code=trust_remote_code)
            with borrowing(self._with_model_object(named), self.device, is_named=named.base_model.is_loadable) as task:
                prepared = self._prepare(task, resume_state)
                if resume_state.lines and resume_state.base is None:
                    resume_state = replace(
                        resume_state, notes=(*resume_state.notes, _UNKNOWN_BASE.format(model=task.model))
                    )
                bank = bank_of(prepared.context) if bank_of is not None else None
                if not resume_state.lines:
                    try:
                        prepared = self._packed(prepared)
                    finally:
                        if bank is not None:
                            bank.reinject()  # measuring injected a bank of its own
                    if self.ranks.is_first:
                        run_dir.resolve(prepared.context.task)
                with self._session(prepared, run_dir, resume_state, bank) as run:
                    yield run

    def _with_model_object(self, task: Task) -> Task:
        """Return the task of a run with the base model object that the caller gave for it."""
        return task if self._objects is None else task.replace(model=self._objects)

    def plan(self, task: Task, *, refresh: bool = False) -> TaskPlan:
        """Plan the memory and time of ``task``."""
        with borrowing(task, self.device) as named:
            task = portable(named)
            context = self._prepare(task).context
            if context.rewards is not None:
                context.rewards.close()
            about_model = model_notes(context.backbone.model, [job.config for job in context.jobs], task.method)
            found = plan(context, on_measuring=self._announcement(task), refresh=refresh)
            about_start = () if context.start is None else context.start.notes
            about_check = () if version_of("peft") else (_UNCHECKED.format(install=install_command("peft")),)
            notes = (*about_start, *task.notes, *context.data.notes, *about_model, *found.notes, *about_check)
            return replace(found, notes=notes)

    def _prepare(self, task: Task, resume_state: ResumeState | None = None) -> _Prepared:
        """Read and check a task before its run directory is made, or before it is resumed.

        Args:
            task: A task with absolute paths, from :func:`portable`.
            resume_state: State from which the run is resumed, empty for a new run; None if there will be no run.
        """
        if task.search.algorithm == "tpe":
            check_installed()
        trackers = chosen_trackers(task) if self.ranks.is_first else {}
        objective = find_objective(task.method)
        rows = read_task_rows(task)  # before a model is downloaded
        if rows.labels is not None:
            task = task.with_labels(rows.labels.labels)
        load = self._resident_base.load if self._resident_base is not None else load_base
        backbone = load(
            task.base_model, self.device, self.ranks, gradient_checkpointing=task.gradient_checkpointing is True
        )
        begins = resume_state is None or not resume_state.lines
        task = with_usual_rate(task, backbone.model.config, begins=begins)
        base = None if resume_state is None else self._checked_base(task, backbone, resume_state)
        data = rows.encode(backbone.tokenizer, limits_of(backbone.model.config))
        data = data if task.refit is None else data.with_all_rows()
        for split in data.splits:
            objective.check(split, [job.config for job in task.jobs])
        scoring = task.select_by
        judge = None if scoring == "metric" else FinalistJudge(rows.validation, backbone, task.model, scoring)
        requested = task.early_exit if begins else None
        task = resolve_early_exit(task, data, begins=begins)
        start = read_start(task, backbone)
        context = TaskContext.of(task, backbone, data, self.ranks, start=start, requested_early_exit=requested)
        sampler = None
        if task.num_samples:
            num_tokens = task.sample_max_new_tokens
            sampler = Sampler(rows.validation, backbone, num_samples=task.num_samples, max_new_tokens=num_tokens)
        if task.reward_funcs:  # last, because functions start processes
            context = replace(context, rewards=Rewards(task.reward_funcs, task.reward_weights))
        return _Prepared(trackers=trackers, context=context, judge=judge, sampler=sampler, base=base)

    def _checked_base(self, task: Task, backbone: Backbone, resume_state: ResumeState) -> BaseDescription:
        """Return the fingerprint and precision of the base model, checked against those that the run started with."""
        found = base_fingerprint(task.base_model) if self.ranks.is_first else {}
        fingerprint = self.ranks.broadcast(found, dict[str, Any])
        precision = {
            "dtype": str(backbone.dtype).removeprefix("torch."),
            **quantisation_keys(task.base_model.quantisation),
            "adapter_dtype": task.adapter_dtype,
            "optim_state_dtype": task.optim_state_dtype,
        }
        base = BaseDescription(**(fingerprint | precision))
        remedy = "put it back as it was, or start a new run with: alto tune"
        check_base(resume_state, fingerprint, model=task.model, remedy=remedy)
        if task.refit is not None and not resume_state.lines:
            check_refitted(task.refit, fingerprint, task.base_model)
        check_precision(resume_state, base)
        return base

    def _packed(self, prepared: _Prepared) -> _Prepared:
        """Return ``prepared`` with every packing limit set."""
        context, forecast = pack(prepared.context, on_measuring=self._announcement(prepared.context.task))
        return replace(prepared, context=context, forecast=forecast)

    def _announcement(self, task: Task) -> Callable[[float], None]:
        """Return a function that reports to observers how long the measurement of ``task`` will still take."""
        numbers = itertools.count()

        def announce(remaining_s: float) -> None:
            event = MeasuringBegun(
                task=task.name,
                model=task.model,
                remaining_s=remaining_s,
                is_update=next(numbers) > 0,
                kept_in=str(cache_home()),
            )
            for observer in self._observers:
                observer(JournalEntry(seq=NO_SEQ, time=time.time(), event=event))

        return announce

    @contextlib.contextmanager
    def _session(
        self, prepared: _Prepared, run_dir: RunDir, resume_state: ResumeState, bank: SharedBank | None = None
    ) -> Iterator[OpenRun]:
        """Yield a task with its journal and trackers; leaving the block exports its result, or writes its report after
        an error."""
        context, task = prepared.context, prepared.context.task
        with tracking(prepared.trackers, run_dir.root) as tracker_observers:
            observers = (*self._observers, *tracker_observers)
            for entry in resume_state.entries:
                for observer in observers:
                    observer(replace(entry, is_replayed=True))
            try:
                with (
                    using_threads(_num_threads(prepared, resume_state) if bank is None else None),
                    self._journal(run_dir, observers, resume_state) as journal,
                ):
                    start = RunInputs(
                        run_dir=run_dir,
                        resume_state=resume_state,
                        forecast=prepared.forecast,
                        base=prepared.base,
                    )
                    run = OpenRun(TaskSession(context, journal, start, self._hooks(prepared), bank))
                    yield run
            except BaseException as error:
                note_resumption(error, run_dir.root)
                # Errors in writing the report must not hide the error that ended the run.
                with contextlib.suppress(AltoError, OSError):
                    if self.ranks.is_first:
                        run_dir.check_lock()
                        write_report(run_dir.root)
                raise
            finally:
                if context.rewards is not None:
                    context.rewards.close()
            if self.ranks.is_first:  # files of an earlier attempt do not belong to this result
                run_dir.check_lock()
                shutil.rmtree(run_dir.best, ignore_errors=True)
                with contextlib.suppress(OSError):
                    run_dir.report_file.unlink()
            run.finish(self._exported(task, run_dir))  # before waiting for trackers, which may hang

    def _hooks(self, prepared: _Prepared) -> Hooks:
        return Hooks(
            is_interrupted=self._is_interrupted,
            judge=prepared.judge,
            generate=prepared.sampler,
            check=PeftCheck(prepared.context.backbone, num_ranks=self.ranks.size),
        )

    def _journal(self, run_dir: RunDir, observers: Sequence[Observer], resume_state: ResumeState) -> Journal:
        if not self.ranks.is_first:
            return SilentJournal()
        return Journal(run_dir.journal_file, observers, past=resume_state.entries, check=run_dir.check_lock)

    def _exported(self, task: Task, run_dir: RunDir) -> TaskOutcome:
        """Export the result of a finished run if needed, and write its report; only the first rank writes."""
        result = self._export(task, run_dir) if self.ranks.is_first else None
        result = self.ranks.broadcast(result, TaskOutcome | None)
        assert result is not None
        return result

    def _export(self, task: Task, run_dir: RunDir) -> TaskOutcome:
        history = read_history(run_dir.root)
        result = task_outcome(history, run_dir)
        run_dir.check_lock()
        notices: tuple[str, ...] = ()
        if not run_dir.best.is_dir() or is_outdated(result):
            tokenizer = load_tokenizer(task.base_model)
            notices = export_best(
                result,
                run_dir.job(result.best_job, "best"),
                adapter_base_model,
                model=task.model,
                dataset=task.dataset_name,
                method=task.method,
                use=ModelUse(
                    model_class=loading_class(task.base_model),
                    has_template=bool(tokenizer.chat_template),
                    labels=task.label_set,
                    rows={} if history.started is None else history.started.data,
                    trust_remote_code=task.base_model.trust_remote_code,
                ),
                tokenizer=tokenizer,
                chat_template=task.base_model.chat_template,
            )
        if "keep" in task.model_fields_set:  # a run that ended before the key existed keeps what it has
            remove_states(run_dir, history, task.keep)
        return replace(result, notices=(*notices, *_reported(run_dir)))


def _reported(run_dir: RunDir) -> tuple[str, ...]:
    """Write the report of a finished run; return a notice if that fails, so that the result is not lost."""
    try:
        write_report(run_dir.root)
    except Exception as error:
        why = str(error) if isinstance(error, AltoError) else f"{type(error).__name__}: {error}"
        remedy = "" if isinstance(error, RunWriteError) else f"; create it later with: alto report {run_dir.root}"
        return (f"There is no report: {why}{remedy}",)
    return ()


class OpenRun:
    """A run in training.

    Args:
        session: Session of the task; None if the run had finished before.
    """

    def __init__(self, session: TaskSession | None = None) -> None:
        self._session = session
        self._result: TaskOutcome | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the result was complete before; there is no session then."""
        return self._session is None

    @property
    def session(self) -> TaskSession:
        """The session of the task."""
        assert self._session is not None, "it is finished"
        return self._session

    @property
    def result(self) -> TaskOutcome:
        """The result; available once the run has ended."""
        assert self._result is not None, "it has not ended"
        return self._result

    def finish(self, result: TaskOutcome) -> None:
        """Store the result."""
        self._result = result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A task that is ready to run.

    Attributes:
        judge: None if the winner is chosen by the metric alone.
        sampler: None if the task asks for no samples.
        base: None if there will be no run.
        forecast: None if nothing was measured.
    """

    trackers: Mapping[str, Tracker]
    context: TaskContext
    judge: FinalistJudge | None
    sampler: Sampler | None
    base: BaseDescription | None
    forecast: TaskPlan | None = None


def _num_threads(prepared: _Prepared, resume_state: ResumeState) -> int | None:
    """Return the number of CPU threads: of the resumed run, or the fastest in the measurement. None keeps the present
    number."""
    for entry in resume_state.entries:
        if isinstance(entry.event, TaskStarted):
            return entry.event.num_threads
    return None if prepared.forecast is None else prepared.forecast.throughput.num_threads


def portable(task: Task) -> Task:
    """Return the task with absolute paths, so that a process in any folder can resume it, with the shape of the initial
    adapter that it names, and with PEFT's default modules if it asks for them."""
    task = with_targets(with_start(task))
    found: dict[str, Any] = _absolute_files(task, "dataset", "validation_dataset", "test_dataset")
    if task.sources:
        found["dataset"] = [
            source.replace(**_absolute_files(source, "path", "validation_dataset")) for source in task.sources
        ]
    if Path(task.model).expanduser().is_dir() and task.model not in SHIPPED_MODELS:
        found["model"] = resolve_model(task.model)
    if task.chat_template is not None:
        found["chat_template"] = task.base_model.chat_template  # the text: the file may change
    return task.replace(**found)


def checked_task(task: Task) -> Task:
    """Return the portable form of ``task`` after reading and checking its rows.

    Raises:
        AltoError: The rows have an error.
    """
    found = portable(task)
    read_task_rows(found)
    return found


def _absolute_files(owner: Task | MixtureSource, *keys: str) -> dict[str, Any]:
    """Return the absolute paths of the local files that ``keys`` of ``owner`` name, by key."""
    paths = {key: Path(path).expanduser() for key in keys if isinstance(path := getattr(owner, key), str)}
    return {key: str(path.resolve()) for key, path in paths.items() if path.is_file()}
