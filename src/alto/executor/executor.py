"""The training loop for the tasks that share a base model: it steps the jobs of all tasks together, each task as if it
were alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ParamSpec

import torch

from alto.errors import DeviceMemoryError
from alto.executor.context import JobState
from alto.executor.micro_batches import JobFailedError
from alto.executor.session import TaskSession
from alto.executor.shared_bank import SharedBank
from alto.scheduler import TokenShares, slot_shares

P = ParamSpec("P")


def run_alone(session: TaskSession) -> None:
    """Train one task by itself until no job is left; the result is in the journal.

    Args:
        session: A session built with a bank that no other task uses.

    Raises:
        NoResultError: No job was ever evaluated with a finite loss.
        TaskInterruptedError: The run was stopped, and everything is on disk.
        RunBusyError: The lock was removed, so another process may work on the run.
        DeviceMemoryError: Memory is too small to continue; the run can be resumed from its last checkpoint.
        RunWriteError: The run directory can no longer be written.
    """
    executor = Executor(session.bank)
    try:
        executor.attach("", session)
        while executor.sessions:
            for error in executor.turn().values():
                if error is not None:
                    raise error
    except Exception as error:
        explained = session.explained(error)
        if explained is error:
            raise
        raise explained from error


class Executor:
    """Runs task sessions whose jobs share a bank.

    An error in the work of one session ends only that session. With several ranks there is only one session.

    Attributes:
        sessions: Sessions by name, in the order in which they were attached.
    """

    def __init__(self, bank: SharedBank) -> None:
        self.bank = bank
        self.sessions: dict[str, TaskSession] = {}
        self._weights: dict[str, float] = {}
        self._shares = TokenShares()
        self._ended: dict[str, Exception | None] = {}

    def attach(self, name: str, session: TaskSession, *, weight: float = 1.0) -> None:
        """Let the jobs of another task train from the next turn on.

        Args:
            session: A session built with this executor's bank.
            weight: Its share of slots and tokens relative to other sessions; positive.

        Raises:
            Exception: The session could not begin; it is not attached.
        """
        assert name not in self.sessions, f"{name!r} is attached"
        try:
            session.begin()
        except Exception:
            session.detach()
            raise
        self.sessions[name] = session
        self._weights[name] = weight

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Set the weight of every session; see :meth:`attach`."""
        assert weights.keys() == self.sessions.keys()
        self._weights = dict(weights)

    def turn(self) -> dict[str, Exception | None]:
        """Run one training step and its bookkeeping.

        Returns:
            The sessions that have ended, with the error that ended them; None for a task that has its result.

        Raises:
            DeviceMemoryError: Memory is too small to continue; every session is saved.
            Exception: An error that belongs to no single session. All sessions can be resumed from their last
                checkpoints.
        """
        self._ended = {}
        self._apply_commands_and_decide_rungs()
        self._conclude_finished()
        self._admit_jobs()
        self._step_and_evaluate()
        self._save_if_due()
        return self._ended

    # -- one turn ------------------------------------------------------------------------------------------------

    def _apply_commands_and_decide_rungs(self) -> None:
        for name, session in list(self.sessions.items()):
            self._run_isolated(name, session.decide)

    def _conclude_finished(self) -> None:
        for name, session in list(self.sessions.items()):
            if session.is_finished:
                self._run_isolated(name, self._conclude, name, session)
            else:
                self._run_isolated(name, session.check_jobs)  # a new clone may have needed a larger bank

    def _conclude(self, name: str, session: TaskSession) -> None:
        try:
            session.conclude()
        finally:
            if len(self.sessions) > 1:
                self.bank.reinject()  # the finished adapters were injected into the same base model
        self._end(name, None)

    def _save_if_due(self) -> None:
        for name, session in list(self.sessions.items()):
            self._run_isolated(name, session.save_if_due)

    def _admit_jobs(self) -> None:
        """Divide the slots among the sessions. Sessions with too many slots free theirs first."""
        shares: Mapping[str, int | None] = dict.fromkeys(self.sessions)
        if len(self.sessions) > 1:
            wanted = {name: len(session.state.selection.training) for name, session in self.sessions.items()}
            shares = slot_shares(wanted, self._weights, self.bank.num_slots)
        slots = {name: session.state.slots() for name, session in self.sessions.items()}
        for name in sorted(self.sessions, key=lambda name: len(slots[name]) <= (shares[name] or 0)):
            session = self.sessions[name]
            taken = frozenset(
                slot for other, mine in self.sessions.items() if other != name for slot in mine.state.slots()
            )
            self._run_isolated(name, session.admit_jobs, shares[name], taken)

    def _choose(self, ready: Mapping[str, Sequence[JobState]]) -> Mapping[str, Sequence[JobState]]:
        """Return the sessions that train in the next step, with their jobs."""
        if len(ready) < 2:
            return ready
        costs = {name: sum(job.step_tokens for job in active) for name, active in ready.items()}
        return {name: ready[name] for name in self._shares.choose(costs, self._weights)}

    def _step_and_evaluate(self) -> None:
        """Run one training step of the sessions whose turn it is, then evaluate the jobs that are due.

        The order matters. While the device computes the backward pass and the optimizer step, the host makes the next
        batches; only then are losses read, which waits for the device. The step is timed and counted before jobs are
        evaluated, and before an error of a single session ends it.
        """
        active_of = {name: session.state.active() for name, session in self.sessions.items()}
        ready = {name: active for name, active in active_of.items() if active}
        jobs_of = self._choose(ready)
        jobs = [job for active in jobs_of.values() for job in active]
        if not jobs:
            return
        trainer, began_s = self.bank.trainer, time.perf_counter()
        try:
            losses = trainer.backward(jobs)
        except Exception as error:
            self._handle(error, jobs_of)
            return
        no_memory: DeviceMemoryError | None = None
        failures: Mapping[str, Exception] = {}
        try:
            trainer.update(jobs)
        except DeviceMemoryError as error:
            if not trainer.passes.ranks.is_alone:
                raise
            no_memory = error
        else:
            failures = self._prepare_next(jobs_of)
        metrics = trainer.step_metrics(jobs)  # a collective of its own, before that of the losses
        measured = {
            id(job): (loss, of_job) for job, loss, of_job in zip(jobs, trainer.read(losses), metrics, strict=True)
        }
        duration_s, num_tokens = time.perf_counter() - began_s, sum(job.next_step_tokens for job in jobs)
        for name, active in jobs_of.items():
            part_s = duration_s * sum(job.next_step_tokens for job in active) / num_tokens
            self.sessions[name].timed(active, part_s, is_alone=len(self.sessions) == 1)
        stepped = {name: [job for job in active if trainer.has_stepped(job)] for name, active in jobs_of.items()}
        self._count(stepped, ready)
        for name, active in stepped.items():
            self._run_isolated(name, self.sessions[name].stepped, [(job, *measured[id(job)]) for job in active])
        if no_memory is not None:
            for name, session in list(self.sessions.items()):
                self._run_isolated(name, session.save)
            raise no_memory
        for name in failures.keys() & self.sessions.keys():  # only now, so that the finished step is counted
            self._end(name, failures[name])

    def _prepare_next(self, jobs_of: Mapping[str, Sequence[JobState]]) -> Mapping[str, Exception]:
        """Make the batches of the next step, and return the errors of the sessions whose batches cannot be made.

        Raises:
            Exception: An error that belongs to no single session.
        """
        trainer = self.bank.trainer
        try:
            trainer.prepare([job for active in jobs_of.values() for job in active])
        except Exception as error:
            if isinstance(error, torch.AcceleratorError):
                raise
            found: dict[str, Exception] = {}
            for name, active in jobs_of.items():
                try:
                    trainer.prepare(active)
                except Exception as own:
                    found[name] = own
            if not found:
                raise
            return found
        return {}

    def _count(self, stepped: Mapping[str, Sequence[JobState]], ready: Iterable[str]) -> None:
        """Count the tokens of a step that the jobs in ``stepped`` have taken, if several sessions were ``ready``."""
        names = list(ready)
        if len(names) < 2:
            return
        tokens = {name: sum(job.next_step_tokens for job in stepped.get(name, ())) for name in names}
        self._shares.trained(tokens, self._weights)
        for name in names:
            self.sessions[name].received = self._shares.received[name]

    def _handle(self, error: Exception, jobs_of: Mapping[str, Sequence[JobState]]) -> None:
        """End the session that caused an error of the step; all other sessions are as they were before the step.

        Raises:
            Exception: ``error``, if no session is the cause.
        """
        if isinstance(error, JobFailedError):
            owner = next(name for name, active in jobs_of.items() if any(job.slot == error.slot for job in active))
            self._run_isolated(owner, self.sessions[owner].fail_job, error)
            return
        if len(self.sessions) == 1 or isinstance(error, torch.AcceleratorError):  # then the device cannot be used again
            raise error
        trainer = self.bank.trainer
        for name, active in jobs_of.items():
            try:
                trainer.backward(active)
            except JobFailedError:
                pass  # the next step finds it again and ends the job
            except Exception as own:
                self._end(name, own)
            trainer.forget()
        if not self._ended.keys() & jobs_of.keys():
            raise error

    # -- the ends of sessions ------------------------------------------------------------------------------------

    def _run_isolated(self, name: str, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Do the work of one session; an error ends the session."""
        if name not in self.sessions:
            return
        try:
            work(*args, **kwargs)
        except Exception as error:
            if isinstance(error, torch.AcceleratorError):
                raise
            self._end(name, error)

    def _end(self, name: str, error: Exception | None) -> None:
        self._ended[name] = error
        self.sessions.pop(name).detach()
        self._shares.forget(name)
        del self._weights[name]
