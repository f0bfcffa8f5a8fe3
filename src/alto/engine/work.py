"""The hosts that executor processes run; launches name them as ``module:class``."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

import torch

from alto.base import replace_file
from alto.cluster import HostedRun, RunEnd
from alto.engine.resident_base import ResidentBase
from alto.engine.runner import OpenRun, TaskRunner
from alto.errors import RunBusyError
from alto.executor import Executor, Ranks, SharedBank, TaskContext
from alto.runs import Journal, JournalEntry, RunDir, load_run_task
from alto.runs.events import MeasuringBegun
from alto.scheduler import task_weights

TRAIN = "alto.engine.work:Training"
PLAN = "alto.engine.work:Planning"
PLAN_ANEW = "alto.engine.work:PlanningAnew"
PLAN_FILE = "plan.json"

_BASE = ResidentBase()
"""The base model of this process, shared by all its work."""


class Training:
    """Trains runs to their results; runs that are attached at the same time train together on one base model."""

    def __init__(self) -> None:
        self.is_usable = True
        self._executor: Executor | None = None
        self._runs: dict[int, _AttachedRun] = {}
        self._ended: dict[int, RunEnd] = {}

    def attach(self, run: HostedRun) -> None:
        """Start or resume a run in addition to the others.

        Raises:
            RunBusyError: The run cannot share the bank of the others; it must be started again alone.
            AltoError: See :meth:`alto.engine.runner.TaskRunner.opened`.
        """
        folder = RunDir.open(run.ticket.run_dir)
        runner = _runner(lambda: self._is_interrupted(run), folder, check=folder.check_lock)
        attached = _AttachedRun(run)
        with attached.closing_on_error():
            opened = attached.open(runner, self._bank_of)
            if opened.is_finished:
                self._ended[run.number] = attached.close(None)
                return
            executor = self._executor or Executor(opened.session.bank)
            executor.attach(str(run.number), opened.session)
        self._executor = executor
        self._runs[run.number] = attached
        self._set_weights()

    def turn(self) -> Mapping[int, RunEnd]:
        """Run one turn of the executor (:meth:`alto.executor.Executor.turn`); return the runs that have ended."""
        ended, self._ended = self._ended, {}
        if self._executor is None:
            return ended
        try:
            errors: Mapping[str, BaseException | None] = self._executor.turn()
        except BaseException as error:  # not caused by a single run: all can be resumed from their checkpoints
            self.is_usable = False
            errors = dict.fromkeys(map(str, self._runs), error)
        for name, found in errors.items():
            ended[int(name)] = self._runs.pop(int(name)).close(found)
        if not self._runs:
            self._executor = None
        if errors:
            self._set_weights()
        return ended

    def _is_interrupted(self, run: HostedRun) -> bool:
        """Return whether ``run`` must stop. Also call the other runs, as a heartbeat, because they wait while this
        process works on one run alone. An example is the scoring of finalists."""
        for other in self._runs.values():
            if other.run is not run:
                with contextlib.suppress(Exception):  # asked again at its own turn
                    other.run.is_interrupted()
        return run.is_interrupted()

    def _bank_of(self, context: TaskContext) -> SharedBank | None:
        """Return the bank of the other runs; None if this run is the first."""
        if self._executor is None:
            return None
        for key in ("adapter_dtype", "optim_state_dtype"):
            expected, found = getattr(self._executor.bank, key), getattr(context.task, key)
            if expected != found:
                raise RunBusyError(
                    f"{key}: expected {expected or 'none'}, as in the other tasks of this process, found "
                    f"{found or 'none'}; the task is started again in a separate process"
                )
        return self._executor.bank

    def _set_weights(self) -> None:
        """Divide slots and tokens among the runs: first by tenant, then by priority."""
        if self._executor is not None:
            tickets = {str(number): found.run.ticket for number, found in self._runs.items()}
            owners = {name: (ticket.tenant, ticket.priority) for name, ticket in tickets.items()}
            self._executor.weigh(task_weights(owners))


class _AttachedRun:
    """A run in training, with the resources opened for it."""

    def __init__(self, run: HostedRun) -> None:
        self.run = run
        self._stack = contextlib.ExitStack()
        self._opened: OpenRun | None = None

    def open(self, runner: TaskRunner, bank_of: Callable[[TaskContext], SharedBank | None]) -> OpenRun:
        """Open the run; its base model stays loaded until the run is closed."""
        self._opened = self._stack.enter_context(
            runner.opened(
                RunDir.open(self.run.ticket.run_dir),
                trust_remote_code=self.run.ticket.trust_remote_code,
                bank_of=bank_of,
            )
        )
        self._stack.enter_context(_BASE.used())
        return self._opened

    @contextlib.contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """Close the run if the block raises an error; raise it again with the message meant for the user."""
        try:
            yield
        except BaseException as error:
            found = self.close(error).error
            assert found is not None
            raise found from (None if found is error else error)

    def close(self, error: BaseException | None) -> RunEnd:
        """Close the run after its end, or after ``error``; return its end. An error has the message meant for the
        user."""
        if isinstance(error, Exception) and self._opened is not None and not self._opened.is_finished:
            error = self._opened.session.explained(error)
        try:
            self._stack.__exit__(type(error) if error is not None else None, error, None)
        except BaseException as found:
            return RunEnd(error=found)
        if error is not None:
            return RunEnd(error=error)
        assert self._opened is not None
        return RunEnd(notices=self._opened.result.notices)


class Planning:
    """Measures the task of a run and writes the measurement to the run's folder; handles one task after the other."""

    refresh = False
    is_usable = True

    def __init__(self) -> None:
        self._measured: dict[int, RunEnd] = {}

    def attach(self, run: HostedRun) -> None:
        """Measure the task of a run; errors as in :meth:`alto.engine.runner.TaskRunner.plan`."""
        folder = RunDir.open(run.ticket.run_dir)
        runner = _runner(run.is_interrupted, folder)
        task = load_run_task(folder, trust_remote_code=run.ticket.trust_remote_code)
        try:
            found = runner.plan(task, refresh=self.refresh)
        finally:
            _BASE.clean()
        if runner.ranks.is_first:
            replace_file(folder.root / PLAN_FILE, json.dumps(asdict(found)))
        self._measured[run.number] = RunEnd()

    def turn(self) -> Mapping[int, RunEnd]:
        """Return the runs whose tasks were measured."""
        measured, self._measured = self._measured, {}
        return measured


class PlanningAnew(Planning):
    """Like `Planning`, but measures again even if a measurement is cached."""

    refresh = True


def _runner(is_interrupted: Callable[[], bool], run: RunDir, *, check: Callable[[], None] = lambda: None) -> TaskRunner:
    """Return a runner for the ranks of this executor; a single rank keeps its base model loaded.

    While the task is measured, the first rank writes that to the journal of ``run`` for those who watch it; the first
    training event overwrites it.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = Ranks.join(device)

    def note_measuring(entry: JournalEntry) -> None:
        if isinstance(entry.event, MeasuringBegun) and ranks.is_first:
            with Journal(run.journal_file, check=check) as journal:
                journal.append(entry.event)

    return TaskRunner(
        observers=[note_measuring],
        is_interrupted=is_interrupted,
        ranks=ranks,
        resident_base=_BASE if ranks.is_alone else None,
    )
