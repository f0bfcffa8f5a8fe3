"""``alto serve`` as a user starts it, with executors that train: SFT and DPO by OpenAI's client, and a restart."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from services import ROWS, local_plane, served, wait_for

from alto.backbone import load_tokenizer
from alto.service.store.jobs import ENDED
from alto.spec import BaseModelSpec

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
    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
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
    """Run ``alto serve`` on a free port, and end it as systemd does."""
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
            assert process.wait(timeout=200) == 0, "it drains, and exits with 0"


def check_results(server: Server, job: Any) -> None:
    """Check that checkpoints, curves, measurements and adapter of the winner exist, and are gone once deleted."""
    client = server.client
    checkpoints = client.fine_tuning.jobs.checkpoints.list(job.id, limit=100).data
    losses = [point.metrics.full_valid_loss for point in checkpoints]
    curves = list(csv.DictReader(client.files.content(job.result_files[0]).text.splitlines()))
    assert {row["job"] for row in curves} == {f"job-{number:03d}" for number in range(4)}
    best = min(float(row["valid_loss"]) for row in curves)
    assert min(loss for loss in losses if loss is not None) == pytest.approx(best, rel=1e-5)
    task = httpx2.get(f"{server.url}/api/tasks/{job.id}").json()
    assert task["result"]["validation_loss"] == pytest.approx(best, rel=1e-5)
    assert task["result"]["config"]["learning_rate"] == task["jobs"][0]["config"]["learning_rate"]
    archive = httpx2.get(f"{server.url}/api/models/{job.fine_tuned_model}/adapter")
    with zipfile.ZipFile(io.BytesIO(archive.content)) as files:
        assert {"adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(files.namelist())
        template = load_tokenizer(BaseModelSpec(id="alto-tiny")).chat_template
        assert files.read("chat_template.jinja").decode() == template
    assert client.models.delete(job.fine_tuned_model).deleted
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(job.fine_tuned_model)
    assert client.files.delete(job.result_files[0]).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(job.result_files[0])


def test_auto_searches(tmp_path: Path) -> None:
    """``"auto"`` means: search for the best."""
    with serving(tmp_path / "service") as server:
        job = server.create(ROWS, "supervised", n_epochs=1, batch_size="auto", learning_rate_multiplier="auto")
        found = server.ended(job)
        assert found.status == "succeeded", found.error
        task = httpx2.get(f"{server.url}/api/tasks/{job}").json()
        configs = [each["config"] for each in task["jobs"]]
        assert len({config["learning_rate"] for config in configs}) > 2
        assert len({config["per_device_train_batch_size"] for config in configs}) > 1
        assert {config["num_train_epochs"] for config in configs} == {1}
        # "auto" is the request, the best value is the answer.
        assert isinstance(found.hyperparameters.batch_size, int)


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
        check_results(server, found)
        wait_for(lambda: any("step" in message for message in server.messages(long)))
    # A restored backup, or a folder moved to a larger disk, continues elsewhere.
    folder = folder.rename(tmp_path / "moved")
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


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    root = tmp_path / "data"
    with served(root, open_plane=local_plane(root), models={"broken": str(tmp_path / "broken")}) as service:
        client = service.client()
        job = client.fine_tuning.jobs.create(model="broken", training_file=service.upload(client)).id
        error = service.finished(client, job).error
    assert (error.code, error.param) == ("invalid_model", "model"), error.message
    assert error.message.startswith("model: expected")
