"""The service's use of a database, equal on SQLite and PostgreSQL."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from journals import Journal
from postgres import new_database
from sqlalchemy import inspect, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from alto import service
from alto.errors import ServiceError
from alto.service import access
from alto.service.access import caller_of, create_key, create_tenant, has_keys, revoke_key
from alto.service.coordinator import leadership as leadership_module
from alto.service.coordinator.leadership import LEASE_S, Leadership, LostLeadershipError
from alto.service.coordinator.projection import Projection
from alto.service.errors import JobStateError, ReusedKeyError, TenantError, TooManyRequestsError, UnknownJobError
from alto.service.ids import new_id, now
from alto.service.store import Store
from alto.service.store import store as replays_module
from alto.service.store import store as store_module
from alto.service.store.jobs import (
    add_event,
    cancel_job,
    count_open,
    events_of,
    find_job,
    in_turns,
    lock_job,
    page_of,
    pause_job,
    resume_job,
)
from alto.service.store.store import Refusals, RequestMark, database_time
from alto.service.store.tables import Base, JobRow, LeaderRow
from alto.service.web.answers import api_error_of


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    found = Store(database)
    found.migrate()
    yield found
    found.close()


def add_job(store: Store, tenant: str = "a", status: str = "queued", **own: object) -> str:
    with store.writing() as session:
        return add_job_in(session, tenant=tenant, status=status, **own)


def add_job_in(session: Session, *, tenant: str = "a", status: str = "queued", **own: object) -> str:
    values = {
        "id": new_id("ftjob"), "tenant": tenant, "status": status, "created_at": now(), "model": "m",
        "training_file": "file-1", "seed": 1, "priority": 0, "request": {}, "task": {}, "lease": 0, "num_events": 0,
        "journal_seq": 0,
    }  # fmt: skip
    row = JobRow(**{**values, **own})
    session.add(row)
    session.flush()
    return row.id


def test_migrations_give_the_tables_that_the_code_has(store: Store) -> None:
    with store.reading() as session:
        found = inspect(session.connection())
        assert set(found.get_table_names()) == {*Base.metadata.tables, "alembic_version"}
        for name, table in Base.metadata.tables.items():
            assert {column["name"] for column in found.get_columns(name)} == set(table.columns.keys()), name
            indexed = {tuple(index["column_names"]) for index in found.get_indexes(name)}
            assert {tuple(column.name for column in index.columns) for index in table.indexes} <= indexed, name


def test_migrating_again_changes_nothing(store: Store) -> None:
    job = add_job(store)
    store.migrate()
    with store.reading() as session:
        assert find_job(session, "a", job).status == "queued"


def test_a_database_of_a_newer_version_is_refused(store: Store) -> None:
    with store.writing() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ServiceError, match="newer version of ALTO"):
        store.migrate()


def test_a_transaction_is_kept_as_a_whole_or_not_at_all(store: Store) -> None:
    job = add_job(store)

    def cancel_and_fail() -> None:
        with store.writing() as session:
            cancel_job(session, "a", job)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        cancel_and_fail()
    with store.reading() as session:
        assert find_job(session, "a", job).status == "queued"
        assert events_of(session, job, since=1, limit=10) == []


def test_events_of_many_writers_are_numbered_without_gaps(store: Store) -> None:
    job, start = add_job(store), threading.Barrier(4)

    def write(writer: int) -> None:
        start.wait()
        for number in range(10):
            with store.writing() as session:
                row = lock_job(session, job)
                assert row is not None
                add_event(session, row, f"{writer} {number}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    with store.reading() as session:
        events = events_of(session, job, since=1, limit=100)
    assert [event.number for event in events] == list(range(1, 41))
    for writer in range(4):
        own = [event.message for event in events if event.message.startswith(f"{writer} ")]
        assert own == [f"{writer} {number}" for number in range(10)], "in the order of their commits"


def test_states_change_only_where_that_is_allowed(store: Store) -> None:
    changes = {"cancel": cancel_job, "pause": pause_job, "resume": resume_job}
    states = ("validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled")
    found = {}
    for state in states:
        for name, change in changes.items():
            job = add_job(store, status=state)
            try:
                with store.writing() as session:
                    found[state, name] = change(session, "a", job).status
            except JobStateError:
                found[state, name] = "refused"
    assert found == {
        **{(state, "cancel"): "cancelled" for state in (*states[:4], "cancelled")},
        **{(state, "cancel"): "refused" for state in ("succeeded", "failed")},
        **{(state, "pause"): "paused" for state in ("queued", "running", "paused")},
        **{(state, "pause"): "refused" for state in ("validating_files", "succeeded", "failed", "cancelled")},
        ("paused", "resume"): "queued",
        ("queued", "resume"): "queued",
        ("running", "resume"): "running",
        **{(state, "resume"): "refused" for state in ("validating_files", "succeeded", "failed", "cancelled")},
    }


def test_jobs_of_others_are_not_there(store: Store) -> None:
    job = add_job(store, tenant="a")
    with store.reading() as session:
        assert count_open(session, "a") == 1
        assert count_open(session, "b") == 0
        with pytest.raises(UnknownJobError) as foreign:
            find_job(session, "b", job)
        with pytest.raises(UnknownJobError) as unknown:
            find_job(session, "b", "ftjob-0")
    assert str(foreign.value).replace(job, "X") == str(unknown.value).replace("ftjob-0", "X")


@pytest.mark.parametrize("is_ascending", [False, True])
def test_pages_hold_each_row_once(store: Store, *, is_ascending: bool) -> None:
    jobs = [add_job(store) for _ in range(7)]
    read, after = [], None
    with store.reading() as session:
        while True:
            rows, has_more = page_of(
                session, select(JobRow), JobRow.number, after=after, limit=3, is_ascending=is_ascending
            )
            read += [row.id for row in rows]
            after = rows[-1].number
            if not has_more:
                break
    assert read == (jobs if is_ascending else jobs[::-1])


def test_every_entry_of_a_journal_is_reported_once_whoever_leads(
    store: Store, small_run: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Entries read one by one, by different coordinators, equal entries read at once."""
    lines = [f"{json.dumps(event)}\n" for event in small_run]
    messages = []
    for parts in (["".join(lines)], lines):
        job, journal = add_job(store), tmp_path / f"journal-{len(parts)}.jsonl"
        for part in parts:
            with journal.open("a") as file:
                file.write(part)
            projection = Projection(job, journal)
            assert projection.has_unwritten()
            with store.writing() as session:
                row = lock_job(session, job)
                assert row is not None
                projection.write(session, row)
        with store.reading() as session:
            messages.append([event.message for event in events_of(session, job, since=1, limit=1000)])
    assert messages[0][0] == "Training 4 configurations"
    assert messages[1] == messages[0]


def test_events_tell_users_from_rules(store: Store, tmp_path: Path) -> None:
    written, path = Journal(), tmp_path / "journal.jsonl"
    for job, reason in (("job-001", "stopped"), ("job-002", "overfitting")):
        written.end("job_exited", job, 10, best=(10, 2.0), reason=reason, evidence={})
    path.write_text("".join(f"{json.dumps(event)}\n" for event in written.events), encoding="utf-8")
    job = add_job(store)
    projection = Projection(job, path)
    assert projection.has_unwritten()
    with store.writing() as session:
        row = lock_job(session, job)
        assert row is not None
        projection.write(session, row)
    with store.reading() as session:
        assert [event.message for event in events_of(session, job, since=1, limit=10)] == [
            "Configuration job-001 was stopped by a user",
            "Configuration job-002 stopped early: overfitting",
        ]


def test_metadata_is_searched(store: Store) -> None:
    job = add_job(store, pairs={"team": "a", "x": "1"})
    add_job(store, pairs={"team": "b"})
    add_job(store)
    with store.reading() as session:
        found = session.scalars(select(JobRow.id).where(JobRow.pairs["team"].as_string() == "a")).all()
        none = session.scalars(select(JobRow.id).where(JobRow.pairs.is_(None))).all()
    assert found == [job]
    assert len(none) == 1


def test_a_repeated_request_finds_what_it_created(store: Store) -> None:
    first = RequestMark(tenant="a", path="/x", body_hash="1")
    with store.writing() as session:
        assert first.find(session) is None
        first.note(session, "job", "ftjob-1")
    again = RequestMark(tenant="a", path="/x", body_hash="1", is_retry=True)
    with store.writing() as session:
        assert again.find(session) == "ftjob-1"
        assert first.find(session) is None, "the same request, sent on purpose, is a new one"
        for other in ({"tenant": "b"}, {"path": "/y"}, {"body_hash": "2"}):
            changed = RequestMark(**{"tenant": "a", "path": "/x", "body_hash": "1", "is_retry": True, **other})
            assert changed.find(session) is None, other


@pytest.mark.parametrize(("keys", "window_s"), [({"is_retry": True}, 600), ({"key": "k"}, 24 * 3600)])
def test_a_repetition_comes_within_ten_minutes_or_with_a_key_within_a_day(
    store: Store, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], window_s: int
) -> None:
    mark = RequestMark(tenant="a", path="/x", body_hash="1", **keys)
    created = now()
    monkeypatch.setattr(replays_module, "now", lambda: created)
    with store.writing() as session:
        mark.note(session, "job", "ftjob-1")
    for later_s, found in ((window_s, "ftjob-1"), (window_s + 1, None)):
        monkeypatch.setattr(replays_module, "now", lambda later_s=later_s: created + later_s)
        with store.writing() as session:
            assert mark.find(session) == found


@pytest.mark.parametrize("has_database", [True, False])
def test_a_request_that_is_refused_forgets_older_ones_and_not_what_it_has_created(
    store: Store, *, has_database: bool
) -> None:
    refusals = Refusals()
    mark = partial(RequestMark, tenant="a", path="/x", body_hash="1", refusals=refusals)
    with store.writing() as session:
        mark().note(session, "job", "ftjob-1")
    again = mark(is_retry=True)
    again.forget_older(store, has_database=has_database)
    with store.writing() as session:
        assert again.find(session) == "ftjob-1", "a repetition forgets nothing"
    mark(key="k").forget_older(store, has_database=has_database)
    with store.writing() as session:
        assert again.find(session) == "ftjob-1", "nor does a repetition with a key"
    mark().forget_older(store, has_database=has_database)
    with store.writing() as session:
        assert again.find(session) is None
    new = mark()
    with store.writing() as session:
        new.note(session, "job", "ftjob-2")
    new.forget_older(store, has_database=has_database)  # its answer failed, perhaps after the commit
    with store.writing() as session:
        assert again.find(session) == "ftjob-2"


def test_equal_requests_at_once_create_one_object(store: Store) -> None:
    start, marks = threading.Barrier(6), [RequestMark(tenant="a", path="/x", body_hash="1", key="k")] * 6

    def send(mark: RequestMark) -> bool:
        start.wait()
        with store.writing() as session:
            if mark.find(session) is not None:
                return False
            mark.note(session, "job", new_id("ftjob"))
            return True

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(send, marks)) == 1


def test_a_key_for_another_body_is_refused(store: Store) -> None:
    with store.writing() as session:
        RequestMark(tenant="a", path="/x", body_hash="1", key="k").note(session, "job", "ftjob-1")
    with store.writing() as session:
        assert RequestMark(tenant="a", path="/x", body_hash="1", key="k").find(session) == "ftjob-1"
        with pytest.raises(ReusedKeyError, match="used with a different body"):
            RequestMark(tenant="a", path="/x", body_hash="2", key="k").find(session)


def test_keys_open_until_they_are_revoked_or_expire(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.writing() as session:
        assert not has_keys(session)
        create_tenant(session, "a", {"max_tasks": 3})
        row, secret = create_key(session, "a", scopes=["read"])
        _, brief = create_key(session, "b", expires_at=now() + 100)
    with store.writing() as session:
        found = caller_of(session, secret)
        assert found is not None
        assert (found.tenant, found.scopes) == ("a", {"read"})
        assert caller_of(session, brief) is not None
        assert caller_of(session, f"{secret}x") is None
        assert secret not in {value for value in vars(row).values() if isinstance(value, str)}
        revoke_key(session, row.id)
        assert caller_of(session, secret) is None
        monkeypatch.setattr(access, "now", lambda: now() + 101)
        assert caller_of(session, brief) is None
        assert has_keys(session), "the end of the last key does not open the service to everybody"


class DatabaseClock:
    """A database whose clock is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1e9
        monkeypatch.setattr(leadership_module, "database_time", lambda session: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> DatabaseClock:
    return DatabaseClock(monkeypatch)


def test_one_server_leads_and_another_takes_over_after_its_silence(store: Store, clock: DatabaseClock) -> None:
    own_s = 0.0
    first, second = (Leadership(store, clock=lambda: own_s) for _ in range(2))
    assert first.acquire()
    assert first.acquire(), "it still leads"
    assert not second.acquire()
    own_s = LEASE_S  # of its own clock, which only tells it to renew
    clock.now_s += LEASE_S - 1
    first.renew()
    clock.now_s += LEASE_S - 1
    assert not second.acquire(), "the lease was renewed since"
    clock.now_s += 1
    assert second.acquire()
    assert second.epoch > first.epoch
    with pytest.raises(LostLeadershipError), store.writing() as session:
        first.check(session)
    with pytest.raises(AssertionError, match="it does not lead"):
        assert first.epoch
    assert not first.acquire()
    with store.writing() as session:
        second.check(session)


def test_a_renewal_of_a_former_leader_is_refused(store: Store, clock: DatabaseClock) -> None:
    own_s = 0.0
    first, second = (Leadership(store, clock=lambda: own_s) for _ in range(2))
    assert first.acquire()
    clock.now_s += LEASE_S
    assert second.acquire()
    own_s, clock.now_s = LEASE_S, clock.now_s + 1
    with pytest.raises(LostLeadershipError):
        first.renew()
    first.release()
    with store.reading() as session:
        row = session.get(LeaderRow, 1)
        assert row is not None
        assert (row.epoch, row.renewed_at) == (second.epoch, clock.now_s - 1), "nothing of it was changed"
        assert row.holder


@pytest.mark.parametrize("jump_s", [-1e6, 1e6])
def test_a_clock_of_the_database_that_jumps_changes_the_leader_at_most(
    store: Store, clock: DatabaseClock, jump_s: float
) -> None:
    first, second = Leadership(store), Leadership(store)
    assert first.acquire()
    clock.now_s += jump_s
    assert second.acquire(), "leadership must not wait for the old time"
    assert not first.acquire()


def test_the_database_tells_the_time(store: Store) -> None:
    with store.reading() as session:
        began = time.time()
        assert began - 1 < database_time(session) < time.time() + 1


def test_servers_with_one_host_and_one_process_id_do_not_take_leadership_from_each_other(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are two containers: the leading process cannot be seen from the second."""
    monkeypatch.setattr(socket, "gethostname", lambda: "alto")
    monkeypatch.setattr(os, "getpid", lambda: 7)
    first = Leadership(store)
    assert first.acquire()
    monkeypatch.setattr(os, "getpid", lambda: 999_999_999)
    second = Leadership(store)
    for _ in range(3):
        assert not second.acquire()
        assert first.acquire()


def test_a_leader_that_has_released_its_lease_is_followed_at_once(store: Store) -> None:
    first, second = Leadership(store), Leadership(store)
    assert first.acquire()
    first.release()
    assert second.acquire()


def test_a_former_leader_that_releases_its_lease_leaves_that_of_its_successor(
    store: Store, clock: DatabaseClock
) -> None:
    """It was silent for too long, and ends before it looks who leads."""
    first, second, third = (Leadership(store) for _ in range(3))
    assert first.acquire()
    clock.now_s += LEASE_S
    assert second.acquire()
    first.release()
    assert not third.acquire()
    assert second.acquire()


def test_a_leader_that_stands_still_in_a_transaction_keeps_nobody_from_leading(
    postgres: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "STALLED_S", 0.5)
    address = new_database(postgres)
    stores = [Store(address), Store(address)]
    stores[0].migrate()
    first, second = (Leadership(store, lease_s=0.1) for store in stores)
    assert first.acquire()

    def stand_still() -> None:
        with stores[0].writing() as session:
            first.check(session)
            time.sleep(0.2)
            assert second.acquire(), "its transaction has ended"
            add_job_in(session)

    with pytest.raises(DBAPIError):
        stand_still()
    with stores[1].reading() as session:
        assert session.scalars(select(JobRow)).all() == []
    for store in stores:
        store.close()


def test_a_database_of_an_older_version_gets_a_new_leader_at_once(database: str) -> None:
    store = Store(database)
    with store._writing.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(store_module.MIGRATIONS))
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        connection.execute(text("INSERT INTO leader (id, epoch, beat, holder) VALUES (1, 41, 7, 'host 1 boot:1')"))
    store.migrate()
    new = Leadership(store)
    assert new.acquire()
    assert new.epoch == 42
    store.close()


def test_tenants_take_turns(store: Store) -> None:
    """Tenants with the fewest jobs in the control plane come first; each keeps its own order."""
    waiting = [("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("c1", "c")]
    assert in_turns(waiting, {}) == ["a1", "b1", "c1", "a2", "a3"]
    assert in_turns(waiting, {"a": 1, "c": 2}) == ["b1", "a1", "a2", "c1", "a3"]


def test_errors_of_store_and_access_are_answered_at_the_edge() -> None:
    """They hold no status; each kind has its own answer."""
    given = {
        UnknownJobError("ftjob-1"): (404, "fine_tuning_job_id", "fine_tuning_job_not_found"),
        JobStateError("no"): (400, "fine_tuning_job_id", "invalid_state"),
        ReusedKeyError("no"): (400, "Idempotency-Key", "idempotency_key_reused"),
        TooManyRequestsError("no", wait_s=7): (429, None, "rate_limit_exceeded"),
    }
    assert {type(error) for error in given} == set(TenantError.__subclasses__())
    for error, expected in given.items():
        answer = api_error_of(error)
        assert (answer.status, answer.param, answer.code) == expected
        assert answer.headers == ({"Retry-After": "7"} if answer.status == 429 else {})
    folder = Path(service.__file__).parent
    for path in (folder / "access.py", *(folder / "store").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        assert not re.search(r"ApiError|refused\(|not_found\(|fastapi|starlette", source), path
