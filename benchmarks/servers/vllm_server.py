"""A vLLM server in a process of its own, and its answers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.servers.adapters import NUM_NEW_TOKENS, QUESTIONS, Answer

__all__ = ["RefusedError", "Server", "free_port", "serving"]

_START_S = 600.0
_ANSWER_S = 300.0


class RefusedError(Exception):
    """The server refuses to load a model, or to answer."""


@contextlib.contextmanager
def serving(
    python: Path, model: str, log: Path, *options: str, env: Mapping[str, str] | None = None, port: int | None = None
) -> Iterator[Server]:
    """Yield a vLLM server of ``model`` that answers; leaving the block stops it.

    Args:
        python: The interpreter of an environment with vLLM.
        log: File of its output.
        port: Port on which it listens; None chooses a free one.

    Raises:
        RefusedError: The server ends instead of answering; the message has the last error of its output.
    """
    port = port or free_port()
    command = [str(python.with_name("vllm")), "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager", *options]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", **(env or {})}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | settings, start_new_session=True
        )
        server = Server(port)
        try:
            server.wait(process, log)
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Server:
    """A running server at a port of this machine."""

    port: int

    def wait(self, process: subprocess.Popen[bytes], log: Path) -> None:
        """Wait until the server answers.

        Raises:
            RefusedError: It ended, or does not answer in time.
        """
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RefusedError(last_error(log.read_text(errors="replace")))
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.ask("GET", "/health")[0] == 200:
                    return
            time.sleep(0.5)
        raise RefusedError(f"no answer within {_START_S:g} s")

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """Return status and content of an answer; JSON if it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_S)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read()
        finally:
            connection.close()
        try:
            return reply.status, json.loads(text)
        except ValueError:
            return reply.status, text.decode(errors="replace")

    def load(self, name: str, folder: Path) -> None:
        """Load an adapter as a model of that name.

        Raises:
            RefusedError: The server refuses it.
        """
        status, content = self.ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        if status != 200:
            raise RefusedError(f"status {status}: {_message(content)}")

    def answers(self, name: str, *, has_template: bool) -> list[Answer]:
        """Return the greedy answers of a model to all questions.

        Raises:
            RefusedError: The server does not answer.
        """
        return [self._answer(name, question, has_template=has_template) for question in QUESTIONS]

    def _answer(self, name: str, question: str, *, has_template: bool) -> Answer:
        prompt: dict[str, Any] = {"prompt": question}
        if has_template:
            prompt = {"messages": [{"role": "user", "content": question}]}
        tokens = self._post("/tokenize", {"model": name, **prompt})["tokens"]
        settings = {
            "temperature": 0,
            "max_tokens": NUM_NEW_TOKENS,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
        }
        if has_template:
            choice = self._post("/v1/chat/completions", {"model": name, **prompt, **settings, "logprobs": True})
            found = [(each["token"], each["logprob"]) for each in choice["choices"][0]["logprobs"]["content"]]
        else:
            choice = self._post("/v1/completions", {"model": name, **prompt, **settings, "logprobs": 1})
            logprobs = choice["choices"][0]["logprobs"]
            found = list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))
        return Answer(
            question=question,
            prompt_ids=tokens,
            token_ids=[int(token.removeprefix("token_id:")) for token, _ in found],
            logprobs=[float(logprob) for _, logprob in found],
        )

    def scores(self, name: str) -> list[list[float]]:
        """Return the probabilities of a classifier's labels for the text of each question."""
        found = self._post("/classify", {"model": name, "input": list(QUESTIONS)})
        return [list(map(float, each["probs"])) for each in found["data"]]

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        status, content = self.ask("POST", path, body)
        if status != 200:
            raise RefusedError(f"{path}: status {status}: {_message(content)}")
        return content


def _message(content: Any) -> str:
    if isinstance(content, dict) and isinstance(content.get("error"), dict):
        content = content["error"].get("message", content)
    return str(content)[:300]


def last_error(log: str) -> str:
    """Return the last line of a server's output that names an error; not the line that refers to an earlier one."""
    lines: Sequence[str] = [line.strip() for line in log.splitlines() if "Error" in line and "root cause" not in line]
    return lines[-1][-300:] if lines else "the server ended without an error message"
