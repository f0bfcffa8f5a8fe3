"""From an upload to answers of a real vLLM server: two fine-tuning jobs, one name, and restarts of vLLM."""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy", reason="needs the extra 'service'")

import openai
from services import Served, local_plane, served, wait_for

from alto.service.settings import VllmSettings
from alto.service.vllm import registering
from benchmarks.common import REAL_MODEL
from benchmarks.servers.adapters import QUESTIONS, answers_of, peft_model
from benchmarks.servers.program import SERVERS
from benchmarks.servers.vllm_server import Server, free_port, serving

pytestmark = [
    pytest.mark.slow("servers"),
    pytest.mark.skipif(not (SERVERS / ".done").exists(), reason="needs .venv-servers: python -m tools.make_servers"),
    pytest.mark.skipif(not REAL_MODEL.exists(), reason="needs SmolLM2: python -m tools.make_real_model"),
]

BASE = "smollm2"


def rows(offset: int) -> bytes:
    """Rows whose answers differ between the two jobs."""
    return "".join(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"What is {number} plus {number % 5}?"},
                    {"role": "assistant", "content": f"It is {number + number % 5 + offset}, for sure."},
                ]
            }
        )
        + "\n"
        for number in range(10, 34)
    ).encode()


@contextlib.contextmanager
def vllm(port: int, cache: Path, log: Path) -> Iterator[Server]:
    """Run vLLM with the filesystem resolver."""
    env = {"VLLM_PLUGINS": "lora_filesystem_resolver", "VLLM_LORA_RESOLVER_CACHE_DIR": str(cache)}
    options = ("--served-model-name", BASE, "--enable-lora", "--max-lora-rank", "16")
    with serving(SERVERS / "bin" / "python", str(REAL_MODEL), log, *options, env=env, port=port) as server:
        yield server


def tuned(service: Served, client: openai.OpenAI, offset: int) -> Any:
    """Search four configurations, and return the job that has succeeded."""
    settings = {"learning_rate": [1e-3, 3e-3], "r": [4, 8], "n_epochs": 1, "batch_size": 4, "max_length": 128}
    job = client.fine_tuning.jobs.create(
        model=BASE,
        training_file=service.upload(client, rows(offset)),
        suffix="sums",
        method={"type": "supervised", "supervised": {"hyperparameters": settings}},
    )
    wait_for(lambda: client.fine_tuning.jobs.retrieve(job.id).finished_at is not None, timeout_s=1800)
    job = client.fine_tuning.jobs.retrieve(job.id)
    assert job.status == "succeeded", job.error
    return job


def answers(client: openai.OpenAI, model: str) -> list[str]:
    found = []
    for question in QUESTIONS:
        reply = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=16
        )
        found.append(str(reply.choices[0].message.content))
    return found


def by_peft(url: str, model: str, folder: Path) -> list[str]:
    """Download an adapter, and return PEFT's answers."""
    import httpx2

    content = httpx2.get(f"{url}/api/models/{model}/adapter", timeout=60).content
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        archive.extractall(folder)
    loaded, tokenizer = peft_model(str(REAL_MODEL), folder)
    texts = [tokenizer.decode(answer.token_ids) for answer in answers_of(loaded, tokenizer)]
    return [text.partition(tokenizer.eos_token)[0] for text in texts]


def test_two_jobs_share_a_name_that_survives_restarts_of_vllm(tmp_path: Path) -> None:
    port, cache, log = free_port(), tmp_path / "cache", tmp_path / "vllm.log"
    cache.mkdir()
    root = tmp_path / "data"
    settings = VllmSettings(
        url=f"http://127.0.0.1:{port}", base_model=BASE, probe_interval_s=1, timeout_s=600, cache=str(cache)
    )
    with (
        served(root, open_plane=local_plane(root), models={BASE: str(REAL_MODEL)}, vllm=settings) as service,
        registering(service.service),
    ):
        client = service.client(timeout=600, max_retries=5)
        state = lambda model: client.get(f"{service.url}/api/models/{model}", cast_to=dict[str, Any])  # noqa: E731
        with vllm(port, cache, log):
            first = tuned(service, client, offset=0)
            name = first.fine_tuned_model
            alias = name.rpartition(":")[0]
            wait_for(lambda: state(name)["ready"], timeout_s=600)
            expected = by_peft(service.url, name, tmp_path / "first")
            assert answers(client, name) == expected
            assert answers(client, alias) == expected
        with vllm(port, cache, log) as server:
            direct = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", timeout=600)
            assert answers(direct, alias) == expected, "after its restart, vLLM itself finds the alias"
            second = tuned(service, client, offset=700)
            wait_for(lambda: state(second.fine_tuned_model)["ready"], timeout_s=600)
            wait_for(lambda: (cache / alias).resolve() == (cache / second.fine_tuned_model).resolve())
            other = by_peft(service.url, second.fine_tuned_model, tmp_path / "second")
            assert other != expected, "both jobs answer alike, so the test proves nothing"
            wait_for(lambda: answers(direct, alias) == other, timeout_s=600)
            assert answers(client, alias) == other
            assert answers(client, name) == expected, "the older model stays under its own name"
