"""A vLLM server for tests: real HTTP, and the answers of vLLM's routes for adapters, without a model."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

__all__ = ["BASE", "KEY", "PIECES", "ROOT", "FakeVllm", "fake_vllm"]

BASE = "tiny-base"
ROOT = "/models/tiny"
"""Path with which the server was started."""
KEY = "key-of-the-server"


def _chunk(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return json.dumps({"id": "c-1", "object": "chat.completion.chunk", "created": 1, "choices": [choice]}).encode()


PIECES = (b"data: " + _chunk("one") + b"\n\n", b": a comment\n\nda", b"ta: " + _chunk("two") + b"\n\ndata: [DONE]\n\n")
"""Chunks of a stream, cut in the middle of a line."""


class FakeVllm:
    """The state and the behaviour of the server; tests change it.

    Attributes:
        url: Address of the server.
        adapters: Folder of each adapter to whose name it answers.
        requests: Method, path, body and headers of every request so far, with bodies as JSON values.
        refuses_load, fails_probe: Names of adapters that it does not load, or does not answer with.
        is_away: Whether it is being started: every request is answered with 503.
        hangs: Paths on which it does not answer until the test ends.
        drops: Paths on which it closes the connection without an answer.
        breaks_streams: Whether streams end in the middle.
        redirects_to: Address to which requests are redirected.
        answer: Status and body of the next completions, in place of its own.
        headers: Further headers of every answer.
        cache: Folder in which it looks for adapters that requests name; None if it has no resolver.
        num_gone: Number of callers that have closed their connection while it hung.
    """

    def __init__(self) -> None:
        self.url = ""
        self.adapters: dict[str, str] = {}
        self.requests: list[tuple[str, str, Any, dict[str, str]]] = []
        self.refuses_load: set[str] = set()
        self.fails_probe: set[str] = set()
        self.is_away = False
        self.hangs: set[str] = set()
        self.drops: set[str] = set()
        self.breaks_streams = False
        self.redirects_to: str | None = None
        self.answer: tuple[int, Any] | None = None
        self.headers: dict[str, str] = {}
        self.cache: Path | None = None
        self.num_gone = 0
        self.is_over = threading.Event()

    def restart(self) -> None:
        """Drop all adapters, like a new process."""
        self.adapters.clear()

    def paths(self) -> list[str]:
        return [path for _, path, _, _ in self.requests]

    def loads(self) -> list[str]:
        """Names of adapters in the order of the requests to load them."""
        return [body["lora_name"] for _, path, body, _ in self.requests if path == "/v1/load_lora_adapter"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeVllm

    def do_GET(self) -> None:
        self._handle(None)

    def do_POST(self) -> None:
        self._handle(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0)))))

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _handle(self, body: Any) -> None:
        fake = self.fake
        fake.requests.append(
            (self.command, self.path, body, {key.lower(): value for key, value in self.headers.items()})
        )
        if self.path in fake.hangs:
            self._hang()
        elif self.path in fake.drops:
            self.close_connection = True
        elif fake.redirects_to is not None:
            self._send(307, {}, Location=fake.redirects_to)
        elif fake.is_away:
            self._send(503, {"detail": "starting"})
        elif self.headers.get("Authorization") != f"Bearer {KEY}":
            self._send(401, {"error": "Unauthorized"})
        elif self.path == "/v1/models":
            models = [{"id": BASE, "root": ROOT}, *({"id": name} for name in fake.adapters)]
            self._send(200, {"object": "list", "data": models})
        elif self.path == "/v1/load_lora_adapter":
            self._load(body["lora_name"], body["lora_path"])
        elif self.path == "/v1/unload_lora_adapter":
            if fake.adapters.pop(body["lora_name"], None) is None:
                self._fail(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
            else:
                self._send(200, "Success")
        elif self.path in ("/v1/chat/completions", "/v1/completions"):
            self._complete(body)
        else:
            self._send(404, {"detail": "Not Found"})

    def _hang(self) -> None:
        self.close_connection = True
        while not self.fake.is_over.is_set():
            readable, _, _ = select.select([self.connection], [], [], 0.02)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                self.fake.num_gone += 1
                return

    def _load(self, name: str, folder: str) -> None:
        if name in self.fake.adapters:
            self._fail(400, f"The lora adapter '{name}' has already been loaded.")
        elif name in self.fake.refuses_load:
            self._fail(400, f"LoRA rank 64 is greater than max_lora_rank 16, in {folder}/adapter_config.json")
        elif not (Path(folder) / "adapter_config.json").is_file():
            self._fail(404, "No adapter found")
        else:
            self.fake.adapters[name] = folder
            self._send(200, "Success")

    def _resolve(self, name: str) -> None:
        """Load an adapter as the filesystem resolver does."""
        fake = self.fake
        if fake.cache is None or name in fake.adapters or name == BASE:
            return
        folder = fake.cache / name
        if not (folder / "adapter_config.json").is_file():
            return
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        if config["base_model_name_or_path"] == ROOT:
            fake.adapters[name] = str(folder.resolve())

    def _complete(self, body: Any) -> None:
        fake, name = self.fake, body["model"]
        self._resolve(name)
        if name not in (BASE, *fake.adapters):
            self._fail(404, f"The model `{name}` does not exist.")
        elif name in fake.fails_probe:
            self._fail(500, "CUDA error")
        elif fake.answer is not None:
            self._send(*fake.answer)
        elif body.get("stream"):
            self._stream()
        else:
            text = f"I am {name}"
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "finish_reason": "stop", "message": message, "text": text, "logprobs": None}
            kind = "chat.completion" if "messages" in body else "text_completion"
            self._send(200, {"id": "c-1", "object": kind, "created": 1, "model": name, "choices": [choice]})

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        for key, value in self.fake.headers.items():
            self.send_header(key, value)
        self.end_headers()
        for piece in PIECES[: 1 if self.fake.breaks_streams else None]:
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.flush()
        if not self.fake.breaks_streams:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def _fail(self, status: int, message: str) -> None:
        self._send(status, {"error": {"message": message, "type": "BadRequestError", "code": status}})

    def _send(self, status: int, value: Any, **headers: str) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        for key, found in {**self.fake.headers, **headers, "Content-Type": "application/json"}.items():
            self.send_header(key, found)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextlib.contextmanager
def fake_vllm() -> Iterator[FakeVllm]:
    """Run a server on a free port of this machine inside the context."""
    fake = FakeVllm()
    handler = type("_Bound", (_Handler,), {"fake": fake})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield fake
        finally:
            fake.is_over.set()
            server.shutdown()
            thread.join()
