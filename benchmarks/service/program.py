"""Measures a service under load: many tenants submit tasks, others follow them, and executors are simulated.

    python -m benchmarks.paper service --scale cpu

One server with SQLite, as ``alto serve`` starts it, and one process of clients share the machine. Every tenant uploads
a file and submits its tasks over HTTP, as OpenAI's client does. Followers read server-sent events until the end of
their task; each drops its connection once and continues from there. The gate: no task is lost, none exists twice or was
trained twice, and every follower saw every event once, in order.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from benchmarks.common import ROOT, option_parser, publish_figures

SIZES = {"smoke": (3, 12, 4, 8, 0.05), "cpu": (50, 2000, 200, 16, 0.2)}
"""Numbers of tenants, submissions, followers and simultaneous executors, and seconds that each executor takes."""
GOALS: dict[str, tuple[str, float]] = {
    "lost": ("<=", 0),
    "duplicated": ("<=", 0),
    "order_violations": ("<=", 0),
}
NUM_CLIENTS = 16
"""Number of simultaneous requests."""
ENDED = ("succeeded", "failed", "cancelled")
ROWS = b"".join(json.dumps({"prompt": f"{n} + 1?", "completion": str(n + 1)}).encode() + b"\n" for n in range(40))


@dataclass(kw_only=True)
class Load:
    """The work and the observations of the clients.

    Attributes:
        jobs: Tenant by id of each accepted task.
        latencies_s: Seconds until the answers, by kind of request.
        order_violations: Events that a follower missed, saw twice, or saw out of order.
        num_events: Number of events that followers saw.
    """

    jobs: dict[str, str] = field(default_factory=dict)
    latencies_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    order_violations: int = 0
    num_events: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = option_parser(__doc__, SIZES).parse_args(arguments)
    num_tenants, num_tasks, num_followers, num_gpus, duration_s = SIZES[options.scale]
    with tempfile.TemporaryDirectory(prefix="alto-service-") as folder:
        root, port = Path(folder), _free_port()
        keys = _keys(root, num_tenants)
        command = [sys.executable, "-m", "benchmarks.service.server", folder, str(port), str(num_gpus), str(duration_s)]
        with subprocess.Popen(command, cwd=ROOT, env=_environment()) as server:
            try:
                load = Load()
                began_at = time.monotonic()
                asyncio.run(_drive(f"http://127.0.0.1:{port}", keys, load, num_tasks, num_followers))
                took_s = time.monotonic() - began_at
            finally:
                server.terminate()
        counts = _check(root, load, num_tasks)
    failures = [f"{name}: expected 0, found {count}" for name, count in counts.items() if count]
    figures: dict[str, float] = {**counts, "tasks_per_s": num_tasks / took_s, "events_followed": load.num_events}
    for kind, values in load.latencies_s.items():
        ordered = sorted(values)
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
            figures[f"{kind}_{name}_ms"] = 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]
    rows = [
        {
            "request": kind,
            "count": len(values),
            "mean_ms": 1000 * statistics.fmean(values),
            "max_ms": 1000 * max(values),
        }
        for kind, values in load.latencies_s.items()
    ]
    return publish_figures(
        options,
        "service",
        gate_failures=failures,
        figures=lambda: figures,
        goals=GOALS,
        rows=rows,
        notes=[
            f"{num_tenants} tenants, {num_tasks} tasks, {num_followers} followers, {num_gpus} simulated executors of "
            f"{duration_s:g} s each, {NUM_CLIENTS} requests at a time; clients and server share the machine."
        ],
    )


async def _drive(url: str, keys: dict[str, str], load: Load, num_tasks: int, num_followers: int) -> None:
    limits = httpx2.Limits(max_connections=num_followers + NUM_CLIENTS + 4)
    async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        while not await _answers(client):
            await asyncio.sleep(0.1)
        files = {tenant: await _upload(client, key, load) for tenant, key in keys.items()}
        tenants = list(keys)
        places = asyncio.Semaphore(NUM_CLIENTS)
        followed: list[asyncio.Task[None]] = []

        async def submit(number: int) -> None:
            tenant = tenants[number % len(tenants)]
            async with places:
                job = await _create(client, keys[tenant], files[tenant], number, load)
            load.jobs[job] = tenant
            if number % max(1, num_tasks // num_followers) == 0 and len(followed) < num_followers:
                followed.append(asyncio.create_task(_follow(client, keys[tenant], job, load)))

        await asyncio.gather(*(submit(number) for number in range(num_tasks)))
        await _wait(client, keys, load)
        await asyncio.gather(*followed)


async def _answers(client: httpx2.AsyncClient) -> bool:
    try:
        return bool((await client.get("/readyz")).status_code == 200)
    except httpx2.TransportError:
        return False


@asynccontextmanager
async def _timed(load: Load, kind: str) -> AsyncIterator[None]:
    began_at = time.monotonic()
    yield
    load.latencies_s[kind].append(time.monotonic() - began_at)


async def _upload(client: httpx2.AsyncClient, key: str, load: Load) -> str:
    async with _timed(load, "upload"):
        answer = await client.post(
            "/v1/files", data={"purpose": "fine-tune"}, files={"file": ("rows.jsonl", ROWS)}, headers=_headers(key)
        )
    answer.raise_for_status()
    return str(answer.json()["id"])


async def _create(client: httpx2.AsyncClient, key: str, file: str, number: int, load: Load) -> str:
    body = {
        "model": "alto-tiny",
        "training_file": file,
        "seed": number,
        "method": {"type": "supervised", "supervised": {"hyperparameters": {"learning_rate": [1e-4, 1e-3]}}},
    }
    async with _timed(load, "create"):
        answer = await client.post("/v1/fine_tuning/jobs", json=body, headers=_headers(key))
    answer.raise_for_status()
    return str(answer.json()["id"])


async def _follow(client: httpx2.AsyncClient, key: str, job: str, load: Load) -> None:
    """Read the events of a task to its end; the connection is dropped once on the way."""
    last, has_dropped = 0, False
    while True:
        headers = {**_headers(key), **({"Last-Event-ID": str(last)} if last else {})}
        async with client.stream("GET", f"/api/tasks/{job}/events", headers=headers, timeout=600) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    number = int(line[4:])
                    load.num_events += 1
                    load.order_violations += number != last + 1
                    last = number
                    if last == 3 and not has_dropped:
                        has_dropped = True
                        break
                elif line == "event: end":
                    return


async def _wait(client: httpx2.AsyncClient, keys: dict[str, str], load: Load) -> None:
    """Poll tasks, as users do, until all have ended."""
    left = dict(load.jobs)
    while left:
        for job, tenant in list(left.items())[:: max(1, len(left) // 50)]:
            async with _timed(load, "retrieve"):
                answer = await client.get(f"/v1/fine_tuning/jobs/{job}", headers=_headers(keys[tenant]))
            if answer.json()["status"] in ENDED:
                del left[job]
        tenant = next(iter(keys))
        async with _timed(load, "list"):
            await client.get("/v1/fine_tuning/jobs", params={"limit": 100}, headers=_headers(keys[tenant]))
        if len(left) < len(load.jobs) // 10:
            await asyncio.sleep(0.2)


def _check(root: Path, load: Load, num_tasks: int) -> dict[str, int]:
    """Return the tasks that were lost or exist twice, and the events that were seen out of order, by the database and
    the journals."""
    from alto.service.settings import ServiceSettings
    from alto.service.store import Store
    from alto.service.store.tables import JobRow, ModelRow

    store = Store(ServiceSettings(data_dir=str(root)).database_url)
    with store.reading() as session:
        rows = list(session.query(JobRow))
        models = Counter(row.job for row in session.query(ModelRow))
    store.close()
    succeeded = {row.id for row in rows if row.status == "succeeded"}
    trained = Counter[str]()
    for row in rows:
        journal = root / "runs" / row.tenant / row.id / "journal.jsonl"
        trained[row.id] = journal.read_text().count('"event": "task_completed"') if journal.exists() else 0
    return {
        "lost": len(set(load.jobs) - succeeded) + max(0, num_tasks - len(load.jobs)),
        "duplicated": len({row.id for row in rows} - set(load.jobs))
        + sum(count > 1 for count in models.values())
        + sum(count > 1 for count in trained.values()),
        "order_violations": load.order_violations,
    }


def _keys(root: Path, num_tenants: int) -> dict[str, str]:
    from alto.service.access import create_key
    from alto.service.database import opened_store
    from alto.service.settings import ServiceSettings

    found = {}
    with opened_store(ServiceSettings(data_dir=str(root))) as store, store.writing() as session:
        for number in range(num_tenants):
            name = f"tenant-{number:03d}"
            found[name] = create_key(session, name)[1]
    return found


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _environment() -> dict[str, str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
