"""The parts that only the cluster of one machine has: its devices, its signals, its controller's death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clusters import Started, is_alive, wait_for

from alto.cluster import Ending, Outcome, TaskTicket, hosting, worker
from alto.cluster.attempt import AttemptDir
from alto.cluster.local import LocalCluster
from alto.cluster.orders import Orders, WorkOrder
from alto.errors import RunBusyError, SpecError
from alto.records import Node
from alto.runs import RunDir

StartLocal = Callable[..., Started]


@pytest.fixture
def start_local(tmp_path: Path) -> Iterator[StartLocal]:
    """``start_local(host, num_gpus=None, **timeouts)``: executors run that host of ``cluster_hosts``."""
    clusters: list[LocalCluster] = []

    def start(host: str, num_gpus: int | None = None, **timeouts: float) -> Started:
        clusters.append(LocalCluster(total_gpus=num_gpus, **timeouts))
        return Started(clusters[-1], tmp_path, host)

    yield start
    for cluster in clusters:
        cluster.close()


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize(("total_gpus", "gpus"), [(None, (0, 1, 2, 3)), (3, (0, 1, 2))])
@pytest.mark.usefixtures("four_gpus")
def test_its_gpus_are_those_of_the_machine(total_gpus: int | None, gpus: tuple[int, ...]) -> None:
    cluster = LocalCluster(total_gpus=total_gpus)
    assert (cluster.nodes, cluster.has_gpus) == ((Node(name="local", gpus=gpus),), True)
    cluster.close()


@pytest.mark.parametrize(("total_gpus", "gpus"), [(None, (0,)), (3, (0, 1, 2))])
@pytest.mark.usefixtures("no_gpus")
def test_without_gpus_they_are_slots_of_the_cpu(total_gpus: int | None, gpus: tuple[int, ...]) -> None:
    cluster = LocalCluster(total_gpus=total_gpus)
    assert (cluster.nodes, cluster.has_gpus) == ((Node(name="local", gpus=gpus),), False)


@pytest.mark.parametrize("total_gpus", [0, 5])
@pytest.mark.usefixtures("four_gpus")
def test_more_gpus_than_there_are_is_refused(total_gpus: int) -> None:
    with pytest.raises(SpecError, match=f"found {total_gpus}"):
        LocalCluster(total_gpus=total_gpus)


@pytest.mark.parametrize(("visible", "seen"), [(None, "1,2"), ("7,GPU-6b,GPU-5c,4", "GPU-6b,GPU-5c")])
@pytest.mark.usefixtures("four_gpus")
def test_an_executor_sees_its_own_gpus(
    start_local: StartLocal, monkeypatch: pytest.MonkeyPatch, visible: str | None, seen: str
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    started = start_local("tells_variables")
    started.start(gpus=(1, 2))
    assert started.until_event("environment")["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("is_trusted", [False, True])
@pytest.mark.usefixtures("no_gpus")
def test_every_rank_gets_the_tenant_and_the_permission_for_code_of_a_model(
    start_local: StartLocal, monkeypatch: pytest.MonkeyPatch, is_trusted: bool, num_ranks: int
) -> None:
    monkeypatch.setenv("ALTO_TRUST_REMOTE_CODE", "1")  # set by another executor, which this process may belong to
    started, ranks = start_local("TellsTicket", 2), range(num_ranks)
    ticket = {"trust_remote_code": is_trusted, "tenant": "research", "priority": 3}
    run_dir = started.start(gpus=tuple(ranks), num_ranks=num_ranks, **ticket)
    assert started.until_ended().outcome is Outcome.FINISHED
    for rank in ranks:
        assert json.loads((run_dir / f"ticket-{rank}").read_text(encoding="utf-8")) == [is_trusted, "research", 3]


@pytest.mark.parametrize(("gpus", "threads"), [((0,), 3), ((1, 3), 6), ((0, 1, 2, 3), 13)])
@pytest.mark.usefixtures("no_gpus")
def test_an_executor_takes_its_share_of_the_cores(
    start_local: StartLocal, monkeypatch: pytest.MonkeyPatch, gpus: tuple[int, ...], threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(13)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    started = start_local("tells_variables", 4)
    started.start(gpus=gpus)
    entry = started.until_event("environment")
    assert (entry["OMP_NUM_THREADS"], entry["CUDA_VISIBLE_DEVICES"]) == (str(threads), "")
    assert entry["ALTO_MEMORY_SHARE"] == str(len(gpus) / 4)


@pytest.mark.parametrize(("value", "threads"), [("6", 3), ("5,2", 2), ("1", 1), ("99", 6), ("0", 6), ("all", 6)])
@pytest.mark.usefixtures("no_gpus")
def test_executors_share_no_more_cores_than_the_user_allows(
    start_local: StartLocal, monkeypatch: pytest.MonkeyPatch, value: str, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(13)))
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    started = start_local("tells_variables", 2)
    started.start()
    assert started.until_event("environment")["OMP_NUM_THREADS"] == str(threads)


def test_output_goes_to_the_log_of_the_attempt_and_never_to_the_terminal(
    start_local: StartLocal, capfd: pytest.CaptureFixture[str]
) -> None:
    started = start_local("prints_and_dies")
    run_dir = started.start()
    started.until_ended()
    started.events.clear()
    started.start()  # started by a controller that counts from zero again
    started.until_ended()
    for folder in ("attempt-1", "attempt-1-2"):
        log = run_dir / "logs" / folder
        assert [(log / name).read_text() for name in ("stdout.log", "stderr.log")] == ["to stdout\n", "to stderr\n"]
    assert capfd.readouterr() == ("", "")


def test_an_unexpected_error_is_in_the_log(start_local: StartLocal) -> None:
    started = start_local("fails")
    (started.run_dir("a") / "error").write_text("unknown", encoding="utf-8")
    run_dir = started.start()
    assert started.until_ended().reason == "RuntimeError: as the test wants it"
    assert "in fails" in (run_dir / "logs" / "attempt-1" / "stderr.log").read_text(encoding="utf-8")
    ending = AttemptDir(run_dir / "logs" / "attempt-1").ending()
    assert ending == Ending(outcome=Outcome.LOST, reason="RuntimeError: as the test wants it", error="RuntimeError")


def test_the_controller_keeps_its_signal_handlers(start_local: StartLocal) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        started = start_local("works")
        started.start()
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        assert started.until_ended().outcome is Outcome.FINISHED
    finally:
        signal.signal(signal.SIGTERM, before)


def test_it_waits_for_who_still_holds_the_run_and_tells_nothing_of_his(start_local: StartLocal) -> None:
    started = start_local("works")
    run = RunDir(started.run_dir("a"))
    with run.locked():
        run_dir = started.start()
        wait_for((run_dir / "found-locked").exists, "the executor", meanwhile=started.poll)
        run.journal_file.write_text('{"seq": 0, "time": 1.0, "event": "task_interrupted"}\n', encoding="utf-8")
        started.poll()
        assert started.events == []
    assert started.until_ended().outcome is Outcome.FINISHED
    assert [line["event"] for line in started.lines_of()] == ["began", "done"]


def test_it_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first of several ranks nor the single process of an executor does."""
    for module in (worker, hosting):
        monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.1)
    orders = Orders(tmp_path)
    ticket = TaskTicket(task="a", run_dir=str(tmp_path), host="cluster_hosts:works")
    orders.work(ticket, attempt := AttemptDir.create(tmp_path, 1))
    with RunDir(tmp_path).locked():
        (order,) = orders.new()
        assert isinstance(order, WorkOrder)
        with pytest.raises(RunBusyError, match="found that another process has held"):
            worker._wait_until_free(order.attempt)
        orders.work(ticket, attempt)
        code = textwrap.dedent(
            f"""
            from pathlib import Path
            from alto.cluster import hosting
            hosting.LOCK_TIMEOUT_S = 0.1
            raise SystemExit(hosting.OrderLoop(hosting.Orders(Path({str(tmp_path)!r})), hosting.StopRequest()).run())
            """
        )
        ended = subprocess.run([sys.executable, "-c", code], check=False, timeout=300)
    assert ended.returncode == 1
    ending = orders.ended(2)
    assert ending is not None
    assert (ending.outcome, ending.error, orders.takes_more) == (Outcome.LOST, "RunBusyError", False)


CONTROLLER = """
    import json, sys
    from alto.cluster import EntryWritten, Launch, TaskTicket
    from alto.cluster.local import LocalCluster
    from alto.records import Gpu

    run_dir, host = sys.argv[1:]
    ticket = TaskTicket(task="a", run_dir=run_dir, host="cluster_hosts:" + host, is_parallel=True)
    cluster = LocalCluster(total_gpus={num_ranks}, drain_timeout_s={drain_timeout_s})
    (node,) = cluster.nodes
    gpus = tuple(Gpu(node.name, index) for index in node.gpus)
    cluster.start(Launch(ticket=ticket, gpus=gpus, attempt=1))
    while True:
        for event in cluster.poll(1):
            if isinstance(event, EntryWritten):
                print(json.dumps(event.entry.to_dict()), flush=True)
"""


@pytest.mark.parametrize(
    ("host", "num_ranks", "drain_timeout_s", "outcome"),
    [
        ("has_children", 1, 60, Outcome.INTERRUPTED),
        ("hangs", 1, 1, None),
        ("ranks_take_turns", 2, 60, Outcome.INTERRUPTED),
    ],
)
def test_executors_do_not_outlive_their_controller(
    start_local: StartLocal, host: str, num_ranks: int, drain_timeout_s: int, outcome: Outcome | None
) -> None:
    run_dir = start_local(host).run_dir("a")
    script = textwrap.dedent(CONTROLLER.format(num_ranks=num_ranks, drain_timeout_s=drain_timeout_s))
    with subprocess.Popen([sys.executable, "-c", script, str(run_dir), host], stdout=subprocess.PIPE) as controller:
        pids = pids_of(controller)
        assert all(map(is_alive, pids))
        controller.kill()
    wait_for(lambda: not any(map(is_alive, pids)), "the death of all")
    ending = AttemptDir(run_dir / "logs" / "attempt-1").ending()
    assert (ending and ending.outcome) == outcome


def pids_of(controller: subprocess.Popen[bytes]) -> list[int]:
    """Return the process ids of an executor and of its children or ranks."""
    assert controller.stdout is not None
    pids: list[int] = []
    for line in controller.stdout:
        entry: dict[str, Any] = json.loads(line)
        pids += entry.get("pids", [])
        if entry["event"] in ("began", "loading"):
            return [*pids, *([entry["pid"]] if "pid" in entry else [])]
    raise AssertionError("the controller has died")


def test_a_controller_that_was_stopped_does_not_take_its_executors_for_hung(
    start_local: StartLocal, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = start_local("waits", heartbeat_timeout_s=30)
    started.start()
    os.kill(started.until_event("began")["pid"], signal.SIGSTOP)  # so was everything
    started.poll()
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 1000)
    assert started.cluster.poll(0) == []


@pytest.mark.parametrize(
    ("how", "outcome", "error", "reason"),
    [
        ("return", Outcome.FINISHED, "", "could not write down how it ended"),
        ("write", Outcome.FAILED, "DiskFullError", "is full or cannot be written; free disk space"),
        ("RunBusyError", Outcome.LOST, "", "could not write down how it ended"),
        ("SpecError", Outcome.FAILED, "", "could not write down how it ended"),
        ("TaskInterruptedError", Outcome.INTERRUPTED, "", "could not write down how it ended"),
    ],
)
def test_an_executor_says_how_it_ended_where_it_can_write_nothing(
    how: str, outcome: Outcome, error: str, reason: str, start_local: StartLocal
) -> None:
    started = start_local("fills_the_disk", 1)
    (started.run_dir("a") / "how").write_text(how)
    run_dir = started.start()
    ended = started.until_ended()
    assert (ended.outcome, ended.error) == (outcome, error)
    assert reason in " ".join((ended.reason, *ended.notices))
    attempt = AttemptDir(run_dir / "logs" / "attempt-1")
    assert attempt.ending() is None
    assert [path.name for path in attempt.root.iterdir() if path.suffix == ".new"] == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"outcome": "fine", "reason": "", "error": ""}', "\xff"])
def test_an_invalid_ending_file_is_ignored(text: str, tmp_path: Path) -> None:
    attempt = AttemptDir.create(tmp_path, 1)
    (attempt.root / "ended.json").write_bytes(text.encode("latin-1"))
    assert attempt.ending() is None


def test_an_executor_whose_journal_cannot_be_read_is_the_only_one_that_ends(start_local: StartLocal) -> None:
    started = start_local("waits", 2)
    run_dir = started.start("a")
    started.start("b", gpus=(1,))
    started.until_event("began", "a")
    started.until_event("began", "b")
    (run_dir / "journal.jsonl").unlink()
    (run_dir / "journal.jsonl").mkdir()
    ended = started.until_ended("a")
    assert ended.outcome is Outcome.LOST
    assert "cannot be read" in ended.reason
    assert started.ended("b") is None


def test_its_executors_end_where_the_kernel_reaps_them(start_local: StartLocal) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as some parents leave it to their children
    try:
        started = start_local("works", 1)
        started.start()
        assert started.until_ended().outcome is Outcome.FINISHED
    finally:
        signal.signal(signal.SIGCHLD, before)
