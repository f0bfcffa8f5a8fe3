"""W&B: really offline, read back from what ``wandb sync`` would send; online against a fake server."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from journals import entry

from alto.trackers import tracking
from alto.trackers.wandb import WandbTracker

Event = dict[str, Any]


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where a login is kept


def show(events: list[Event], run_dir: Path) -> None:
    with tracking({"wandb": WandbTracker()}, run_dir) as (observe,):
        for event in events:
            observe(entry(event))


class TestOffline:
    pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # raised by it and its libraries

    @pytest.fixture(autouse=True)
    def _offline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("wandb", reason="wandb is not installed")
        monkeypatch.setenv("WANDB_MODE", "offline")

    def test_a_run_for_each_job(self, small_run: list[Event], tmp_path: Path) -> None:
        show(small_run, tmp_path)
        found = {run["name"]: run for run in map(read, offline_files(tmp_path))}
        assert set(found) == {"a", "b", "c", "d"}
        d = found["d"]
        assert (d["project"], d["group"]) == ("alto", tmp_path.name)
        assert d["config"]["r"] == 8
        assert d["config"]["model"] == "alto-tiny"
        assert d["history"]["train/loss"] == [(step, 2.0) for step in range(1, 101)]
        assert d["history"]["eval/loss"] == [(10, 2.1), (100, 1.9)]
        assert (found["c"]["summary"]["outcome"], found["c"]["summary"]["eval/best_loss"]) == ("overfitting", 2.2)
        assert found["a"]["history"]["train/loss"][0] == (1, float("inf"))

    def test_resumed_run_leaves_new_runs_that_are_whole(self, small_run: list[Event], tmp_path: Path) -> None:
        show(small_run[:20], tmp_path)
        before = set(offline_files(tmp_path))
        show(small_run, tmp_path)
        found = {run["name"]: run for run in map(read, set(offline_files(tmp_path)) - before)}
        assert found["d"]["history"]["train/loss"] == [(step, 2.0) for step in range(1, 101)]
        assert not {run["id"] for run in found.values()} & {read(path)["id"] for path in before}

    def test_a_user_who_is_not_logged_in_gets_one_warning(
        self,
        small_run: list[Event],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setenv("WANDB_MODE", "online")
        sys.modules["wandb"].teardown()  # W&B reads the environment once
        show(small_run, tmp_path)
        (message,) = [message for message in caplog.messages if message.startswith("tracker wandb")]
        assert "expected a login at W&B, found none; use 'wandb login'" in message


class Server:
    """A fake of W&B online: keeps runs by id, and like W&B accepts no step before a resumed run's next one."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, dict[str, float]]] = {}
        self.names: dict[str, str] = {}
        self.num_inits = 0

    def setup(self, settings: Any) -> Any:
        return SimpleNamespace(settings=SimpleNamespace(mode="online"))

    def login(self, *, prompt: bool, verify: bool) -> bool:
        return True

    Settings = SimpleNamespace

    def init(self, *, id: str, name: str, **_: Any) -> Any:
        self.num_inits += 1
        self.names[id] = name
        rows = self.rows.setdefault(id, {})
        starting_step = max(rows, default=-1) + 1

        def log(metrics: dict[str, float], *, step: int) -> None:
            assert step >= starting_step
            rows.setdefault(step, {}).update(metrics)

        def finish(exit_code: int) -> None:
            pass

        return SimpleNamespace(id=id, offline=False, starting_step=starting_step, log=log, finish=finish, summary={})


@pytest.mark.parametrize("cut", [5, 12, 20, 24])
def test_resumed_run_goes_on_with_the_same_runs(
    small_run: list[Event],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cut: int,
) -> None:
    server = Server()
    monkeypatch.setitem(sys.modules, "wandb", server)
    show(small_run[:cut], tmp_path)
    show(small_run, tmp_path)
    assert not caplog.messages
    rows = {server.names[tool_id]: held for tool_id, held in server.rows.items()}
    assert len(server.rows) == len(rows) == 4
    assert {job: list(held) for job, held in rows.items()} == {
        job: list(range(1, last + 1)) for job, last in {"a": 10, "b": 10, "c": 50, "d": 100}.items()
    }
    assert rows["d"][100] == {"train/loss": 2.0, "eval/loss": 1.9, "eval/train_ema": 2.0}


def test_jobs_that_had_ended_are_not_opened_again(
    small_run: list[Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    monkeypatch.setitem(sys.modules, "wandb", server)
    show(small_run, tmp_path)
    assert server.num_inits == 4
    show(small_run, tmp_path)
    assert server.num_inits == 4


def offline_files(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))


def read(path: Path) -> dict[str, Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    run: dict[str, Any] = {"history": {}, "summary": {}}
    for data in chunks(path.read_bytes()):
        record = Record.FromString(data)
        match record.WhichOneof("record_type"):
            case "run":
                run |= {"id": record.run.run_id, "name": record.run.display_name}
                run |= {"project": record.run.project, "group": record.run.run_group}
                run["config"] = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            case "history":
                row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                for key in row.keys() - {"_step", "_runtime", "_timestamp"}:
                    value = float(row[key]) if isinstance(row[key], str) else row[key]
                    run["history"].setdefault(key, []).append((record.history.step.num, value))
            case "summary":
                run["summary"] |= {
                    item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.summary.update
                }
    return run


def chunks(data: bytes, *, block: int = 2**15) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, after a head of seven bytes."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        if (left := block - position % block) < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
