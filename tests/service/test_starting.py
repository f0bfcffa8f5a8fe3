"""The start of a service, its logs and counts, its settings, and its keys on the command line."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import stat
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from services import ROWS, served, wait_for
from typer.testing import CliRunner

from alto.cli.app import app
from alto.errors import ServiceError, SpecError, UnknownKeyError
from alto.service import serve as serving
from alto.service.serve import configure_logs, listening, serve
from alto.service.settings import ServiceSettings, load_settings
from alto.service.store.tables import LeaderRow
from benchmarks.service.plane import simulated_plane
from benchmarks.service.simulated_cluster import SimulatedCluster

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that another program listens on."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


@pytest.fixture
def loggers() -> Iterator[None]:
    """Restore loggers and the factory of log records afterwards."""
    factory = logging.getLogRecordFactory()
    found = [logging.getLogger(name) for name in ("", "alto.service", "uvicorn.error")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in found]
    yield
    logging.setLogRecordFactory(factory)
    for logger, (handlers, propagate, level) in zip(found, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_a_port_in_use_is_reported_before_anything_leads(tmp_path: Path, taken: int, loggers: None) -> None:
    settings = ServiceSettings(data_dir=str(tmp_path), port=taken)
    with pytest.raises(ServiceError, match=f"listens on {taken} of 127.0.0.1; choose another port"):
        serve(settings)
    with served(tmp_path) as service, service.service.store.reading() as session:
        leader = session.get(LeaderRow, 1)
        assert leader is None or leader.epoch == 0, "no coordinator was started"


@pytest.mark.parametrize("mode", [0o755, 0o2770, 0o700])
def test_a_data_folder_that_is_there_is_closed_to_others(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "data"
    root.mkdir()
    root.chmod(mode)
    with served(root):
        assert stat.S_IMODE(root.stat().st_mode) == mode & ~0o077


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    settings = ServiceSettings(host=host, port=0)
    with pytest.raises(ServiceError, match="host: expected an address of this machine, found"), listening(settings):
        pass


def test_all_addresses_of_a_name_have_one_port() -> None:
    with listening(ServiceSettings(host="localhost", port=0)) as sockets:
        assert len({each.getsockname()[1] for each in sockets}) == 1


def test_a_stop_ends_open_streams_and_saves_tasks_at_once(
    tmp_path: Path, loggers: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plane = simulated_plane(tmp_path, lambda: SimulatedCluster(duration_s=600))
    monkeypatch.setattr(serving._Planes, "opened", lambda _, epoch: plane(epoch))
    seen: list[str] = []

    def use(url: str) -> None:
        try:
            with httpx2.Client(base_url=url, timeout=60) as http:
                file = http.post("/v1/files", files={"file": ("a", ROWS)}, data={"purpose": "fine-tune"}).json()["id"]
                body = {"model": "alto-tiny", "training_file": file}
                path = f"/api/tasks/{http.post('/v1/fine_tuning/jobs', json=body).json()['id']}"
                wait_for(lambda: http.get(path).json()["status"] == "running")
                with http.stream("GET", f"{path}/events") as events:
                    for line in events.iter_lines():
                        if not seen:
                            os.kill(os.getpid(), signal.SIGTERM)
                        seen.append(line)
        finally:
            if not seen:
                os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        used: list[Future[None]] = []
        serve(
            ServiceSettings(data_dir=str(tmp_path), port=0),
            on_ready=lambda url: used.append(pool.submit(use, url)),
        )
        used[0].result()  # the stream was complete, not cut off
    assert "event: end" not in seen, "the task has not ended, so clients continue after their last event"
    lines = capsys.readouterr().err.splitlines()
    assert all(line.split()[1] == "info" for line in lines), lines
    order = [
        next(number for number, line in enumerate(lines) if text in line)
        for text in ("waiting until running tasks are saved", "Finished server process")
    ]
    assert order == sorted(order)


def record_with_a_time_of_ray(*arguments: Any, **keywords: Any) -> logging.LogRecord:
    record = logging.LogRecord(*arguments, **keywords)
    vars(record)["_ray_timestamp_ns"] = 7
    return record


@pytest.mark.parametrize("as_json", [True, False])
def test_warnings_of_other_packages_are_lines_of_the_log(
    capsys: pytest.CaptureFixture[str], loggers: None, *, as_json: bool
) -> None:
    # Ray, once imported, makes its process's log records, each with a time of its own.
    logging.setLogRecordFactory(record_with_a_time_of_ray)
    configure_logs(as_json=as_json)
    logging.getLogger("python_multipart.multipart").warning("Expected boundary character %d", 45)
    logging.getLogger("python_multipart.multipart").info("parsed")
    (line,) = capsys.readouterr().err.splitlines()
    if as_json:
        found = json.loads(line)
        assert (found["level"], found["message"]) == ("warning", "Expected boundary character 45")
        assert found.keys() == {"time", "level", "logger", "message"}
    else:
        assert line.endswith("warning Expected boundary character 45")


def test_a_request_that_fails_is_counted_as_500(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("of the test")

    monkeypatch.setattr("alto.service.api.cluster.ClusterView.read", fail)
    with served(tmp_path) as service:
        assert httpx2.get(f"{service.url}/api/cluster").status_code == 500
        counts = [
            line for line in httpx2.get(f"{service.url}/metrics").text.splitlines() if 'route="/api/cluster"' in line
        ]
    assert any('status="500"' in line for line in counts)
    assert not any('status="0"' in line for line in counts)


def keys(root: Path, *arguments: str) -> str:
    answer = CliRunner().invoke(app, ["keys", *arguments, "--data-dir", str(root)])
    assert answer.exit_code == 0, answer.output
    return answer.output


def test_keys_are_listed_with_their_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys(tmp_path, "create", "b")
    assert keys(tmp_path, "list", "--tenant", "a") == "There are no keys of a; make one with: alto keys create a\n"
    for lasting in ("30s", "45m", "2h"):
        keys(tmp_path, "create", "a", "--expires", lasting)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3000)
    states = [line.split("  ")[2].split()[:2] for line in keys(tmp_path, "list", "--tenant", "a").splitlines()]
    assert sorted(states) == [["expired", "since"], ["expired", "since"], ["valid", "until"]]


@pytest.mark.parametrize("command", [("list",), ("revoke", "key-1")])
def test_keys_of_a_folder_without_a_service_are_an_error_that_creates_nothing(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    answer = CliRunner().invoke(app, ["keys", *command, "--data-dir", str(tmp_path / "wrong")])
    assert isinstance(answer.exception, ServiceError)
    assert "found no file" in str(answer.exception)
    assert not (tmp_path / "wrong").exists()


def test_a_key_in_a_new_database_names_it(tmp_path: Path) -> None:
    database = str(tmp_path / "alto.db")
    first = keys(tmp_path, "create", "a")
    assert f"Created the database {database};" in first
    assert "database" not in keys(tmp_path, "create", "a")
    assert json.loads(keys(tmp_path, "create", "a", "--json"))["database"] is None
    other = json.loads(keys(tmp_path / "other", "create", "a", "--json"))
    assert other["database"] == str(tmp_path / "other" / "alto.db")


def test_keys_are_listed_with_the_limits_of_their_tenants(tmp_path: Path) -> None:
    keys(tmp_path, "create", "a", "--max-gpus", "2", "--max-bytes", "200000")
    keys(tmp_path, "create", "a", "--max-gpus", "1")  # changes the limit of both keys
    keys(tmp_path, "create", "b")
    limits, *lines = keys(tmp_path, "list").splitlines()
    assert limits == "limits of a: max_gpus 1, max_bytes 200000"
    assert len(lines) == 3
    listed = json.loads(keys(tmp_path, "list", "--json"))["keys"]
    nothing = dict.fromkeys(("max_tasks", "requests_per_s"))
    assert [key["limits"] for key in listed if key["tenant"] == "a"] == [
        {"max_gpus": 1, "max_bytes": 200000, **nothing}
    ] * 2


def test_merged_weights_need_nothing_beside_the_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "alto-lora[peft]" in extras["service"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prt: 1", "the settings file has the unknown key 'prt'. Did you mean 'port'?"),
        ("colour: red", "the settings file has the unknown key 'colour'. Known keys are artefacts, cluster, "),
        ("vllm: {urll: 'http://a', base_model: b}", "vllm has the unknown key 'urll'. Did you mean 'url'?"),
    ],
)
def test_an_unknown_key_is_answered_with_those_that_there_are(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(text)
    with pytest.raises(UnknownKeyError) as caught:
        load_settings(path, {})
    assert str(caught.value).startswith(message)


def test_settings_of_a_server_are_read(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text("port: 1\nvllm: {url: 'http://a', base_model: b}")
    found = load_settings(path, {"port": 2})
    assert (found.port, found.vllm and found.vllm.url) == (2, "http://a")


def test_machines_are_listed_only_for_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text("machines: [8, 4]")
    with pytest.raises(SpecError, match="machines should be given with a cluster of several machines, found"):
        load_settings(path, {})
    assert load_settings(path, {"cluster": "auto"}).machines == (8, 4)
