"""``alto serve`` as a user starts it, with executors that train: SFT and DPO by OpenAI's client, and a restart."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from services import ROWS, wait_for

from alto.service.store.jobs import ENDED

pytestmark = pytest.mark.slow("queues")

CLI = (sys.executable, "-c", "from alto.cli import main; main()")
PAIRS = "".join(
    json.dumps(
        {
            "input": {"messages": [{"role": "user", "content": f"{n} + 1?"}]},
            "preferred_output": [{"role": "assistant", "content": str(n + 1)}],
            "non_preferred_output": [{"role": "assistant", "content": str(n + 2)}],
        }
    )
    + "\n"
    for n in range(40)
).encode()


class Server:
    """The command, while it runs."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

    def create(self, rows: bytes, kind: str, **hyperparameters: Any) -> str:
        file = self.client.files.create(file=("rows.jsonl", rows), purpose="fine-tune")
        method: Any = {"type": kind, kind: {"hyperparameters": hyperparameters}}
        return self.client.fine_tuning.jobs.create(model="alto-tiny", training_file=file.id, method=method).id

    def ended(self, job: str) -> Any:
        wait_for(lambda: self.client.fine_tuning.jobs.retrieve(job).status in ENDED, timeout_s=400)
        return self.client.fine_tuning.jobs.retrieve(job)

    def messages(self, job: str) -> list[str]:
        return [event.message for event in self.client.fine_tuning.jobs.list_events(job, limit=100)][::-1]


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """``alto serve`` on a free port; ended as systemd ends it."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [*CLI, "serve", "--port", "0", "--data-dir", str(folder)]
    with (
        (folder.parent / "log").open("a") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process,
    ):
        assert process.stdout is not None
        found = re.search(r"http://\S+:\d+", process.stdout.readline())
        assert found is not None, (folder.parent / "log").read_text()
        try:
            yield Server(process, found[0])
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=200) == 0, "it drains, and ends well"


def test_both_methods_are_trained_and_a_restart_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "service"
    with serving(folder) as server:
        tuned = server.create(ROWS, "supervised", n_epochs=1, learning_rate=[1e-3, 5e-3], r=[4, 8], batch_size=4)
        long = server.create(ROWS, "supervised", n_epochs=200, learning_rate=1e-3, r=4, batch_size=1)
        found = server.ended(tuned)
        assert found.status == "succeeded", found.error
        assert found.hyperparameters.n_epochs == 1
        assert found.hyperparameters.learning_rate_multiplier in (2.0, 10.0)
        assert found.trained_tokens > 0
        assert any("Best of 4 configurations" in message for message in server.messages(tuned))
        wait_for(lambda: any("step" in message for message in server.messages(long)))
    with serving(folder) as server:
        wait_for(lambda: "Training continues from its checkpoints" in server.messages(long))
        assert server.client.fine_tuning.jobs.pause(long).status == "paused"
        preferred = server.create(PAIRS, "dpo", n_epochs=1, beta=[0.1, 0.3], batch_size=4, learning_rate=1e-4, r=4)
        found = server.ended(preferred)
        assert found.status == "succeeded", found.error
        assert found.method.type == "dpo"
        assert found.method.dpo.hyperparameters.beta in (0.1, 0.3)
        assert server.client.fine_tuning.jobs.resume(long).status in ("queued", "running")
        assert server.client.fine_tuning.jobs.cancel(long).status == "cancelled"
