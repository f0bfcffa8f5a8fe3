"""Server-sent events of a task: followers read its events in order, each once, from any starting point."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from alto.service.context import Service, ServiceOf
from alto.service.errors import ApiError
from alto.service.openai.objects import event_object
from alto.service.store import Store
from alto.service.store.jobs import ENDED, events_of, find_job
from alto.service.store.tables import JobRow
from alto.service.web.access import Reader

POLL_S = 0.5
HEARTBEAT_S = 15.0
_AT_ONCE = 200
_MOST_EVENTS = 2**31 - 1

router = APIRouter(prefix="/tasks")


class Followers:
    """A poller that wakes the followers of tasks with new events, with one query for all of them.

    Args:
        most: Maximum number of followers in this process.
    """

    def __init__(self, store: Store, most: int = 1000) -> None:
        self._store = store
        self._most = most
        self._following: Counter[str] = Counter()
        self._known: dict[str, tuple[int, str]] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._poller: asyncio.Task[None] | None = None
        self._is_ending = False

    def end(self) -> None:
        """End all streams, also later ones, because the server stops. Clients connect again and continue after their
        last event. Must be called on the event loop of the streams."""
        self._is_ending = True
        for changed in self._changed.values():
            changed.set()

    def check_room(self) -> None:
        """Check that another follower is allowed.

        Raises:
            ApiError: This process has the maximum number of followers.
        """
        if self._following.total() >= self._most:
            raise ApiError(
                503,
                f"too many clients are streaming events from this server (limit {self._most}); try again later",
                code="too_many_followers",
                headers={"Retry-After": "10"},
            )

    async def follow(self, job: str, since: int) -> AsyncIterator[str]:
        """Yield events of ``job`` from number ``since`` on, as the text of server-sent events, until the job ends."""
        self._following[job] += 1
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        try:
            while not self._is_ending:
                changed = self._changed.setdefault(job, asyncio.Event())
                events, status, is_all = await run_in_threadpool(self._read, job, since)
                for number, text in events:
                    yield text
                    since = number + 1
                if is_all and status in ENDED:
                    yield f"event: end\ndata: {json.dumps({'status': status})}\n\n"
                    return
                if is_all:
                    try:
                        await asyncio.wait_for(changed.wait(), HEARTBEAT_S)
                    except TimeoutError:
                        yield ": still here\n\n"
        finally:
            self._following[job] -= 1
            if not self._following[job]:
                del self._following[job]
                self._known.pop(job, None)
                self._changed.pop(job, None)

    def _read(self, job: str, since: int) -> tuple[list[tuple[int, str]], str, bool]:
        """Return events of a job as text, its status before they were read, and whether there are no more."""
        with self._store.reading() as session:
            status = session.scalar(select(JobRow.status).where(JobRow.id == job)) or "cancelled"
            rows = events_of(session, job, since=since, limit=_AT_ONCE)
        texts = [
            (row.number, f"id: {row.number}\nevent: {row.type}\ndata: {json.dumps(event_object(row))}\n\n")
            for row in rows
        ]
        return texts, status, len(rows) < _AT_ONCE

    async def _poll(self) -> None:
        while self._following:
            await asyncio.sleep(POLL_S)
            try:
                found = await run_in_threadpool(self._states, list(self._following))
            except SQLAlchemyError:
                continue  # followers also read by themselves every HEARTBEAT_S, and requests report the error
            for job, state in found.items():
                if self._known.get(job) != state:
                    self._known[job] = state
                    if (changed := self._changed.pop(job, None)) is not None:
                        changed.set()

    def _states(self, jobs: list[str]) -> dict[str, tuple[int, str]]:
        with self._store.reading() as session:
            rows = session.execute(select(JobRow.id, JobRow.num_events, JobRow.status).where(JobRow.id.in_(jobs)))
            return {job: (num_events, status) for job, num_events, status in rows}


@router.get("/{task}/events")
async def events(
    request: Request,
    service: ServiceOf,
    caller: Reader,
    task: str,
    last_event_id: Annotated[str | None, Header(max_length=20)] = None,
    since: Annotated[int, Query(ge=1, le=_MOST_EVENTS)] = 1,
) -> StreamingResponse:
    """Stream a task's events as they happen; ``Last-Event-ID`` or ``since`` says where to begin."""
    await run_in_threadpool(_check, service, caller.tenant, task)
    is_number = last_event_id is not None and last_event_id.isdecimal()
    begin = min(int(last_event_id or 0), _MOST_EVENTS) + 1 if is_number else since
    followers: Followers = request.app.state.followers
    followers.check_room()
    return StreamingResponse(
        followers.follow(task, begin),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


def _check(service: Service, tenant: str, task: str) -> None:
    with service.store.reading() as session:
        find_job(session, tenant, task)
