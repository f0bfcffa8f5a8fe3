"""The ports that a run listens on, and its reaction to strangers who connect."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sockets import Listening, descendants, listening_sockets
from tiny import make_task, read_journal, save_model

from alto.errors import AltoError

CLI = (sys.executable, "-c", "from alto.cli import main; main()")
LIMIT_S = 300.0


@contextlib.contextmanager
def running(*args: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Run ``alto`` with these arguments; kill what is left of it at the end."""
    command = [*CLI, *map(str, args)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            for pid in descendants(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def write_task(folder: Path, **changes: Any) -> Path:
    settings = {"model": str(save_model(folder / "model")), "r": 4, "report_to": "none", "num_train_epochs": 2}
    task = make_task(folder, search_space={"lr": [1e-3, 1e-2]}, early_exit=False, **{**settings, **changes})
    path = folder / "task.yaml"
    path.write_text(task.to_yaml(), encoding="utf-8")
    return path


def watched(process: subprocess.Popen[str]) -> Iterator[set[Listening]]:
    """Yield the sockets that all processes of a run listen on, again and again until it has ended."""
    gives_up_at = time.monotonic() + LIMIT_S
    while process.poll() is None:
        assert time.monotonic() < gives_up_at, "the run did not end"
        yield listening_sockets(descendants(process.pid))
        time.sleep(0.1)


def events_of(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the only run in ``folder``, as far as they are written."""
    lines: list[str] = []
    with contextlib.suppress(FileNotFoundError):  # a new folder is renamed a moment later
        for path in list(folder.glob("**/journal.jsonl")):
            lines += path.read_text("utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def is_executor(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_bytes().startswith(b"alto-executor")
    return False


def test_a_process_alone_listens_on_nothing(tmp_path: Path) -> None:
    """Neither the command, nor its measuring and planning processes, nor the executor listens."""
    seen: set[Listening] = set()
    executors: set[int] = set()
    with running("run", write_task(tmp_path), "--output-dir", tmp_path / "runs", "--quiet") as process:
        for found in watched(process):
            seen |= found
            executors |= set(filter(is_executor, descendants(process.pid)))
        assert process.stdout is not None
        assert process.returncode == 0, process.stdout.read()
    assert executors, "the process that plans and trains was not observed"
    assert any(event["event"] == "train" for event in events_of(tmp_path / "runs"))
    assert not seen


class Touches:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._path}",)


def strange_messages(marker: Path) -> list[bytes]:
    """Return noise and pickles: bare, and with the sizes that PyTorch's own messages of objects begin with."""
    attack = pickle.dumps(Touches(marker))
    size = len(attack).to_bytes(8, "little")
    return [b"\0" * 4096, b"\xff" * 4096, b"GET / HTTP/1.0\r\n\r\n", b"", attack, size + attack, size * 2 + attack]


def send(found: Listening, message: bytes) -> None:
    with contextlib.suppress(OSError), found.connect() as connection:
        connection.sendall(message)
        connection.settimeout(0.05)
        connection.recv(1024)


def test_ranks_listen_on_the_loopback_interface_alone_and_do_not_run_what_strangers_send(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    seen: set[Listening] = set()
    attacked: set[Listening] = set()
    output_dir = tmp_path / "runs"
    path = write_task(tmp_path, num_gpus=2, num_train_epochs=6)
    with running("tune", path, "--output-dir", output_dir, "--quiet") as process:
        for found in watched(process):
            seen |= found
            if any(event["event"] == "train" for event in events_of(output_dir)):
                for one in found - attacked:
                    for message in strange_messages(marker):
                        send(one, message)
                    attacked.add(one)
        assert process.stdout is not None
        output = process.stdout.read()
    assert seen, "ranks talk to each other over TCP"
    assert [one for one in seen if not one.is_loopback] == []
    assert attacked, "it was not attacked while it trained"
    assert not marker.exists()
    (run_dir,) = output_dir.iterdir()
    ended = read_journal(run_dir)[-1]["event"]
    if process.returncode == 0:
        assert ended == "task_completed"
    else:
        assert "Traceback" not in output
        assert any(error.__name__ in output for error in named_errors()), output


def named_errors() -> list[type[AltoError]]:
    return [AltoError, *AltoError.__subclasses__()]
