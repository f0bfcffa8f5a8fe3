"""The coordinator: submits jobs from the database to the control plane and records their progress and results."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeAlias

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from alto.base import first_line
from alto.engine.control_plane import ControlPlane, SubmittedRun
from alto.engine.runner import portable
from alto.errors import AltoError, ClusterLostError, QueueCommandError
from alto.records import ExitReason
from alto.runs import RunDir, has_result, load_run_task
from alto.runs.progress import outlook
from alto.service.context import Service
from alto.service.coordinator.leadership import (
    LEASE_S,
    Leadership,
    LostLeadershipError,
    code_of,
    code_of_end,
    is_of_service,
    is_of_storage,
    missing_file,
)
from alto.service.coordinator.projection import Projection, publish, write_result
from alto.service.coordinator.run_folders import clear_ended_runs, make_run, settled_task, shown_error
from alto.service.errors import ApiError
from alto.service.ids import now
from alto.service.openai.files import artefact_of
from alto.service.store.jobs import ENDED, OPEN, add_event, in_turns, levels_of, lock_job, wanted_jobs
from alto.service.store.store import forget_old_replays
from alto.service.store.tables import FileRow, JobRow, PartRow, Tenant, UploadRow
from alto.service.vllm import registering
from alto.spec import Task

_LOG = logging.getLogger("alto.service.coordinator")


def remember_duration(service: Service, job: JobRow, remember: Callable[[Task, float], None]) -> None:
    """Store how long the finished run of ``job`` took, for drafts and for schedules. If that fails, only the estimate
    is missing later.

    Args:
        job: A job that has succeeded.
        remember: Method of the control plane that stores the duration of a task in seconds.
    """
    root = service.run_of(job)
    try:
        history = service.histories.read(root)
        # A user who stopped configurations made the run shorter than requested.
        if all(job.exit_reason != ExitReason.STOPPED for job in history.jobs.values()):
            remember(_requested_task(job, RunDir.open(root)), history.duration_s)
    except (AltoError, OSError) as error:
        _LOG.warning("the duration of job %s cannot be recorded", job.id, exc_info=error)


def _requested_task(job: JobRow, run: RunDir) -> Task:
    """Return a run's task as its user requested it. In the task file, the executor has replaced ``auto`` by values."""
    trained = load_run_task(run, trust_remote_code=True)
    files = {"dataset": trained.dataset, "validation_dataset": trained.validation_dataset}
    return portable(Task(**job.task, **files, name=job.id, tenant=job.tenant, report_to="none"))


def delete_expired(service: Service) -> None:
    """Delete expired request records, files and uploads; files that an open job needs stay until it ends."""
    with service.store.writing() as session:
        forget_old_replays(session)
        used = select(JobRow.training_file).where(JobRow.status.in_(OPEN))
        used_too = select(JobRow.validation_file).where(JobRow.status.in_(OPEN), JobRow.validation_file.is_not(None))
        expired = list(
            session.scalars(
                select(FileRow).where(
                    FileRow.expires_at <= now(),
                    FileRow.deleted_at.is_(None),
                    FileRow.id.not_in(used),
                    FileRow.id.not_in(used_too),
                )
            )
        )
        names = [artefact_of(row) for row in expired]
        for row in expired:
            row.deleted_at, row.filename, row.status_details = now(), "", None
        over = list(
            session.scalars(select(UploadRow).where(UploadRow.status == "pending", UploadRow.expires_at <= now()))
        )
        for upload in over:
            upload.status = "expired"
            parts = session.scalars(select(PartRow).where(PartRow.upload == upload.id))
            names += [f"parts/{upload.tenant}/{part.id}" for part in parts]
    for name in names:
        service.artefacts.delete(name)


TURN_S = 0.25
MOST_SUBMITTED = 64
"""Maximum number of jobs in the control plane, in addition to the limit of two per GPU. The others wait in the
database, which determines their order."""
_HOUSEKEEPING_S = 60.0
_FORECAST_S = 5.0
_RETRY_S = 2.0
_MOST_RETRY_S = 300.0
"""Longest wait of a postponed job; each wait is twice as long as the previous wait."""
_MOST_CHECKED = 16
"""Maximum number of new jobs that are being checked or wait for their check."""

OpenPlane: TypeAlias = Callable[[int], AbstractContextManager[ControlPlane]]


@dataclass(slots=True)
class _Live:
    """A job that was submitted to the control plane, where its run is called ``run_name``."""

    run_name: str
    task: Task
    projection: Projection
    level: int
    is_cancelled: bool = False
    has_ended: bool = False
    forecast_at: float = field(default=0.0)


def _report(error: Exception) -> None:
    """Log why this server does not lead; only errors of unknown kinds need a traceback."""
    if is_of_service(error):
        _LOG.warning("no server can lead: %s", first_line(error))
    elif isinstance(error, AltoError):
        _LOG.error("this server has no cluster, and tries again: %s", error)
    else:
        _LOG.error("the coordinator restarts after an error", exc_info=error)


def _waiting(num_gpus: int, most: int) -> str:
    """Return the message for a job that is larger than all present machines."""
    return (
        f"Expected {num_gpus} GPUs for this job, found {most}: machines of the cluster are away. The job waits for "
        "them; if they do not come back, cancel it and ask for fewer"
    )


class Coordinator:
    """The worker that leads if no other server does, and then works on the database's jobs until it is stopped.

    Args:
        open_plane: Opens the control plane; called with the epoch whenever this process becomes the leader.
    """

    def __init__(self, service: Service, leadership: Leadership, open_plane: OpenPlane) -> None:
        self._service = service
        self._leadership = leadership
        self._open_plane = open_plane
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="alto-coordinator", daemon=True)
        self._live: dict[str, _Live] = {}
        self._checks: dict[str, Future[None]] = {}
        self._put_off: dict[str, float] = {}
        self._num_delays: Counter[str] = Counter()
        self._silent_since: float | None = None
        self._house_at = 0.0
        self._tried_epoch: int | None = None
        self.plane: ControlPlane | None = None
        self.failure: BaseException | None = None
        """The error that keeps this server from leading; None if all is well. Errors of single jobs do not count."""

    def start(self) -> None:
        """Start on a separate thread."""
        self._thread.start()

    def begin_stop(self) -> None:
        """Start no more tasks, and let running executors save and stop. Does not wait for them."""
        if self._is_stopping.is_set():
            return
        self._is_stopping.set()
        self._service.work.set()
        if (plane := self.plane) is not None and plane.num_gpus()[0]:
            _LOG.info("waiting until running tasks are saved")

    def stop(self) -> None:
        """Ask running executors to save and stop, and wait for them."""
        self.begin_stop()
        if self._thread.is_alive():
            self._thread.join()

    # -- leading ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._is_stopping.is_set():
            try:
                if self._leadership.acquire():
                    self._lead()
            except LostLeadershipError as error:
                _LOG.warning("%s", error)
            except Exception as error:
                # No state is lost on an error: the next iteration starts from the database.
                if str(error) != str(self.failure):
                    _report(error)
                self.failure = error
            self._is_stopping.wait(_RETRY_S)
        with contextlib.suppress(SQLAlchemyError):
            self._leadership.release()

    def _lead(self) -> None:
        _LOG.info("this server leads")
        with (
            self._connected() as plane,
            ThreadPoolExecutor(2, "alto-checks") as pool,
            registering(self._service),
        ):
            self.plane, self.failure = plane, None
            self._live, self._checks, self._put_off = {}, {}, {}
            self._num_delays, self._silent_since = Counter(), None
            try:
                self._limit_tenants(plane)
                self._fail_too_large(plane)
                while not self._is_stopping.is_set():
                    self._service.work.clear()
                    self._turn_in_patience(plane, pool)
                    self._service.work.wait(TURN_S)
                plane.drain()
                self._note_ends(plane)
            finally:
                self.plane = None

    @contextlib.contextmanager
    def _connected(self) -> Iterator[ControlPlane]:
        """Yield the control plane of this leader. Its first attempt to connect may take longer than the lease; after a
        failed attempt, another server may lead when the lease has ended."""
        epoch = self._leadership.epoch
        is_first, self._tried_epoch = epoch != self._tried_epoch, epoch
        with contextlib.ExitStack() as opened:
            with self._leadership.renewed() if is_first else contextlib.nullcontext():
                plane = opened.enter_context(self._open_plane(epoch))
            self._tried_epoch = None
            yield plane

    def _turn_in_patience(self, plane: ControlPlane, pool: ThreadPoolExecutor) -> None:
        """Run one turn; while the database does not answer for a short time, executors continue."""
        try:
            self.turn(plane, pool)
        except LostLeadershipError:
            raise
        except Exception as error:
            if not is_of_service(error):
                raise
            self.failure = error
            if self._silent_since is None:
                self._silent_since = time.monotonic()
                _LOG.warning("the database does not answer: %s", first_line(error))
            elif time.monotonic() - self._silent_since > LEASE_S:
                # Another server may lead from now on: save what runs before giving it up.
                plane.drain()
                raise
            self._is_stopping.wait(_RETRY_S)
        else:
            self._silent_since = self.failure = None

    def turn(self, plane: ControlPlane, pool: ThreadPoolExecutor) -> None:
        """Synchronise the control plane with the database once."""
        plane.check_connected()
        self._leadership.renew()
        self._forget_delays()
        self._check_new(plane, pool)
        self._note_ends(plane)
        self._cancel_unwanted(plane)
        self._submit_wanted(plane)
        if time.monotonic() - self._house_at > _HOUSEKEEPING_S:
            self._house_at = time.monotonic()
            self._limit_tenants(plane)
            self._clean()

    def _clean(self) -> None:
        """Delete expired and unneeded files; what a disk refuses to delete now is tried again next time."""
        try:
            delete_expired(self._service)
            clear_ended_runs(self._service, self._live)
        except OSError as error:
            _LOG.warning("unneeded files cannot be removed: %s", error)

    def _limit_tenants(self, plane: ControlPlane) -> None:
        with self._service.store.reading() as session:
            tenants = list(session.scalars(select(Tenant)))
        for tenant in tenants:
            plane.limit(tenant.name, self._service.limits_of(tenant).max_gpus)

    # -- new jobs --------------------------------------------------------------------------------------------------

    def _check_new(self, plane: ControlPlane, pool: ThreadPoolExecutor) -> None:
        for job, check in list(self._checks.items()):
            if check.done():
                del self._checks[job]
                check.result()
        left = _MOST_CHECKED - len(self._checks)
        if left <= 0:
            return
        with self._service.store.reading() as session:
            new = list(
                session.scalars(
                    select(JobRow)
                    .where(JobRow.status == "validating_files", JobRow.id.not_in([*self._checks, *self._put_off]))
                    # Jobs that were postponed before come last: they were tried already.
                    .order_by(JobRow.id.in_([*self._num_delays]), JobRow.number)
                    .limit(left)
                )
            )
        for row in new:
            self._checks[row.id] = pool.submit(self._check, plane, row)

    def _check(self, plane: ControlPlane, job: JobRow) -> None:
        """Make the run folder of a job and queue the job, or fail it."""
        with self._alone(job, "invalid_job"):
            make_run(self._service, job)
            task = settled_task(self._service, job)
            plane.check(task)
            _, most = plane.capacity()
            with self._changing(job.id) as (session, row):
                if row.status == "validating_files":
                    row.status, row.run_dir = "queued", str(self._service.run_of(job))
                    add_event(session, row, "Files validated, moving job to queued state")
                    if task.num_gpus > most:
                        add_event(session, row, _waiting(task.num_gpus, most), level="warn")
                    _LOG.info("job %s of tenant %s is queued", job.id, job.tenant)
            self._num_delays.pop(job.id, None)
        self._service.work.set()

    def _fail_too_large(self, plane: ControlPlane) -> None:
        """Fail jobs that do not fit on the machines of the settings: they would wait forever."""
        if self._service.settings.machines is None:
            return
        _, most = plane.capacity()
        with self._service.store.reading() as session:
            rows = session.scalars(select(JobRow).where(JobRow.status.in_(("queued", "running"))))
            waiting = [row for row in rows if row.task.get("num_gpus", 1) > most]
        for row in waiting:
            with self._alone(row, "invalid_job"):
                plane.check(settled_task(self._service, row))

    # -- jobs of the control plane ---------------------------------------------------------------------------------

    def _submit_wanted(self, plane: ControlPlane) -> None:
        """Submit the jobs that come next, and withdraw waiting jobs that do not come next any more."""
        num_gpus, most = plane.capacity()
        states = plane.states()
        begun = {job: live for job, live in self._live.items() if not states[live.run_name].is_new}
        # Neither ended jobs whose results cannot be stored yet, nor jobs that wait for machines that are away, count
        # towards the limit.
        working = [live for live in begun.values() if not (live.has_ended or states[live.run_name].is_too_large)]
        with self._service.store.reading() as session:
            wanted = wanted_jobs(session, [*begun, *self._put_off], most)
        order = in_turns([(job, tenant) for job, tenant, _ in wanted], Counter(live.task.tenant for live in working))
        levels = levels_of(wanted)
        next_ones = order[: max(0, min(MOST_SUBMITTED, 2 * num_gpus) - len(working))]
        moved: dict[str, int] = {}
        for job in self._live.keys() - begun.keys():
            live = self._live[job]
            if job not in next_ones:
                if plane.take_back(live.run_name):
                    del self._live[job]
            elif live.level != levels[job]:
                live.level = moved[live.run_name] = levels[job]
        if moved:
            plane.prioritise(moved)
        for job in next_ones:
            if job in self._live:
                continue
            with self._service.store.reading() as session:
                row = session.scalar(select(JobRow).where(JobRow.id == job))
            if row is not None:
                self._submit(plane, row, levels[job])

    def _submit(self, plane: ControlPlane, job: JobRow, level: int) -> None:
        root = self._service.run_of(job)
        run = RunDir(root)
        projection = Projection(job.id, run.journal_file)
        with self._alone(job, "cannot_run"):
            projection.has_unwritten()  # read what was written under an earlier lease
            if has_result(run):  # a server died before it recorded the result
                self._finish(job, projection)
                return
            task = settled_task(self._service, job)
            with self._changing(job.id) as (_, row):
                if row.status not in ("queued", "running"):
                    return
                row.lease += 1
                lease = row.lease
                # Written before the commit, while no other server can become the leader. A previous leader fails above,
                # so it cannot overwrite a newer lease.
                run.lease(lease)
            with self._service.store.reading() as session:
                tenant = session.get(Tenant, job.tenant)
            plane.limit(job.tenant, self._service.limits_of(tenant).max_gpus)
            # Tasks of tenants that share executors may be trained with other tenants' tasks.
            shares_with = "" if tenant is not None and tenant.shares_executors else f"tenant {job.tenant}"
            run_name = f"{job.id}.{lease}"
            plane.submit(run_name, root, task, priority=level, shares_with=shares_with)
            self._live[job.id] = _Live(run_name, task, projection, level)

    def _cancel_unwanted(self, plane: ControlPlane) -> None:
        if not self._live:
            return
        with self._service.store.reading() as session:
            rows = session.execute(
                select(JobRow.id).where(JobRow.id.in_(list(self._live)), JobRow.status.not_in(("queued", "running")))
            )
            unwanted = [job for (job,) in rows]
        for job in unwanted:
            live = self._live[job]
            if not live.is_cancelled:
                live.is_cancelled = True
                with contextlib.suppress(QueueCommandError):  # the task has ended in the meantime
                    plane.cancel(live.run_name)

    def _note_ends(self, plane: ControlPlane) -> None:
        if not self._live:
            return
        states = plane.states()
        with self._service.store.reading() as session:
            rows = {row.id: row for row in session.scalars(select(JobRow).where(JobRow.id.in_(list(self._live))))}
        for job, live in list(self._live.items()):
            state = states[live.run_name]
            if job in self._put_off:
                continue
            with self._alone(rows[job], "cannot_run"):
                self._note_progress(job, live, state)
            if state.outcome is not None:
                live.has_ended = True
                with self._alone(rows[job], "no_result"):
                    self._note_end(rows[job], live, state)
                if job not in self._put_off:
                    del self._live[job]

    def _note_progress(self, job: str, live: _Live, state: SubmittedRun) -> None:
        is_due = state.is_running and time.monotonic() - live.forecast_at > _FORECAST_S
        has_unwritten = live.projection.has_unwritten()
        if not (has_unwritten or is_due):
            return
        with self._changing(job) as (session, row):
            live.projection.write(session, row)
            if not is_due:
                return
            is_first, live.forecast_at = not live.forecast_at, time.monotonic()
            remaining_s = outlook(self._service.histories.read(self._service.run_of(row)), time.time()).remaining_s
            if row.status == "queued":
                row.status, row.started_at = "running", row.started_at or now()
                add_event(session, row, "Fine-tuning job started: loading the model, measuring memory and time")
                _LOG.info("job %s of tenant %s is running", row.id, row.tenant)
            elif is_first:
                _LOG.info("job %s of tenant %s continues", row.id, row.tenant)
            if row.status == "running":
                row.estimated_finish = None if remaining_s is None else now() + int(remaining_s)

    def _note_end(self, job: JobRow, live: _Live, state: SubmittedRun) -> None:
        while live.projection.has_unwritten():
            with self._changing(job.id) as (session, row):
                live.projection.write(session, row)
        if state.outcome == "finished":
            self._finish(job, live.projection)
        elif state.outcome == "failed":
            code, param = code_of_end(state.error, "training_failed")
            self._fail(job, code, param, state.reason or "the executor failed")
        # A stopped run was paused or cancelled; if it was resumed meanwhile, the next turn submits it again.

    def _finish(self, job: JobRow, projection: Projection) -> None:
        with self._changing(job.id) as (session, row):
            while projection.has_unwritten():
                projection.write(session, row)
            if row.status not in ("queued", "running", "paused"):
                return
        with self._alone(job, "no_result"):
            found = publish(self._service, job)
            with self._changing(job.id) as (session, row):
                if row.status in ("queued", "running", "paused"):
                    row.started_at = row.started_at or now()
                    write_result(session, row, found)
                    _LOG.info("job %s of tenant %s has succeeded", job.id, job.tenant)
            if self.plane is not None:
                remember_duration(self._service, job, self.plane.remember_duration)

    # -- faults ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self, job: JobRow, code: str) -> Iterator[None]:
        """Keep errors of ``job`` from affecting other jobs: it fails, or is postponed while a disk refuses.

        Args:
            code: Error code if neither the job's rows nor its model are the cause.
        """
        try:
            yield
        except Exception as error:
            if is_of_service(error) or isinstance(error, ClusterLostError):
                raise
            if is_of_storage(error):
                self._delay(job, error)
                return
            if isinstance(error, FileNotFoundError):
                self._fail(job, "missing_file", None, missing_file(error))
                return
            if not isinstance(error, AltoError | ApiError):
                _LOG.error("job %s failed with an unexpected error", job.id, exc_info=error)
                self._fail(job, "internal_error", None, "the service had an internal error; see its log for the cause")
                return
            self._fail(job, *code_of(error, code), error)

    def _delay(self, job: JobRow, error: Exception) -> None:
        """Postpone ``job`` until a disk or the artifact store works; report it once, in an event and in the log."""
        self._num_delays[job.id] += 1
        pause_s = min(_MOST_RETRY_S, _RETRY_S * 2 ** min(16, self._num_delays[job.id] - 1))
        self._put_off[job.id] = time.monotonic() + pause_s
        if self._num_delays[job.id] > 1:
            return
        _LOG.error("job %s waits: its files cannot be read or written", job.id, exc_info=error)
        with self._changing(job.id) as (session, row):
            add_event(session, row, "The service cannot read or write the job's files; it tries again", level="warn")

    def _fail(self, job: JobRow, code: str, param: str | None, error: Exception | str) -> None:
        message = shown_error(self._service, job, str(error))
        with self._changing(job.id) as (session, row):
            if row.status not in ENDED:
                row.status, row.finished_at, row.estimated_finish = "failed", now(), None
                row.error = {"code": code, "message": message, "param": param}
                add_event(session, row, f"The job failed: {message}", level="error")
                _LOG.info("job %s of tenant %s has failed: %s", job.id, job.tenant, code)

    def _forget_delays(self) -> None:
        """Make jobs eligible again once they were postponed long enough."""
        for job, until in list(self._put_off.items()):
            if until <= time.monotonic():
                del self._put_off[job]

    @property
    def problem(self) -> str:
        """Why no task can be started, as a sentence for operators; empty if this server leads, or another one does."""
        if self.plane is None and self._leadership.is_held:
            return "this server is not connected to its cluster; see its log for the cause"
        if self.failure is not None:
            return "the coordinator restarts after an error; see its log for the cause"
        return ""

    @property
    def num_put_off(self) -> int:
        """Number of jobs that are postponed because a disk or the artifact store failed."""
        return len(self._put_off)

    # -- the database ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _changing(self, job: str) -> Iterator[tuple[Session, JobRow]]:
        """Yield a transaction of the leader and the locked row of a job."""
        with self._service.store.writing() as session:
            self._leadership.check(session)
            row = lock_job(session, job)
            assert row is not None, "rows of jobs stay"
            yield session, row
