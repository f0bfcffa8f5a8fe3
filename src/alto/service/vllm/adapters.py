"""Adapter operations of a vLLM server. Source: code of vLLM's ``entrypoints/openai/serving_models.py``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from alto.errors import ServiceError
from alto.service.settings import VllmSettings
from alto.service.vllm.upstream import Reply, Upstream, UpstreamError

_PASSING = (429, 502, 503, 504)
"""Statuses of a server that is busy or starting."""
_MOST_CHARS = 500


class AdapterRefusedError(ServiceError):
    """The vLLM server refuses an adapter, or does not answer with it."""


class VllmServer:
    """A vLLM server with ``--enable-lora`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING``.

    Every method raises `UpstreamError` if its request fails.
    """

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._upstream = Upstream(settings)

    async def models(self) -> dict[str, str]:
        """Return the paths of all models that the server serves, by name: the base model, and the loaded adapters."""
        async with self._request("GET", "/v1/models") as reply:
            content = await reply.read()
            if reply.status != 200:
                raise UpstreamError(f"expected a list of models from the vLLM server, found status {reply.status}")
        try:
            return {str(model["id"]): str(model.get("root") or "") for model in json.loads(content)["data"]}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UpstreamError("expected a list of models from the vLLM server, found something else") from error

    async def load(self, name: str, folder: Path) -> None:
        """Load the adapter in ``folder`` as model ``name``; the server must see the folder at the same path.

        Raises:
            AdapterRefusedError: The server refuses the adapter.
        """
        body = {"lora_name": name, "lora_path": str(folder)}
        async with self._request("POST", "/v1/load_lora_adapter", body) as reply:
            content = await reply.read()
            if reply.status == 200 or "already been loaded" in message_of(content):
                return
            hint = (
                "; start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=true, where it sees the folder at "
                "the same path"
                if reply.status in (404, 405)
                else ""
            )
            raise AdapterRefusedError(
                f"expected vLLM to load the adapter, found status {reply.status} ({message_of(content)}){hint}"
            )

    async def unload(self, name: str) -> None:
        """Unload adapter ``name``; no error if absent.

        Raises:
            AdapterRefusedError: The server keeps the adapter.
        """
        async with self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name}) as reply:
            content = await reply.read()
            if reply.status not in (200, 404):
                raise AdapterRefusedError(
                    f"expected vLLM to unload the adapter, found status {reply.status} ({message_of(content)})"
                )

    async def probe(self, name: str) -> None:
        """Let model ``name`` generate one token, as a chat reply or, if it has no chat template, as a completion.

        Raises:
            AdapterRefusedError: The model generates no token.
        """
        body = {"model": name, "max_tokens": 1, "temperature": 0}
        message = {"role": "user", "content": "Hello"}
        status, content = await self._post("/v1/chat/completions", {**body, "messages": [message]})
        if status == 400:
            status, content = await self._post("/v1/completions", {**body, "prompt": "Hello"})
        if status != 200:
            hint = ""
            if status == 404 and self._settings.cache is not None:
                hint = (
                    "; start vLLM with VLLM_PLUGINS=lora_filesystem_resolver and with the folder of vllm.cache as "
                    "VLLM_LORA_RESOLVER_CACHE_DIR"
                )
            raise AdapterRefusedError(
                f"expected one token of the model, found status {status} ({message_of(content)}){hint}"
            )
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(content)["choices"]:
                return
        raise AdapterRefusedError("expected one token of the model, found an answer without one")

    async def _post(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        async with self._request("POST", path, body) as reply:
            return reply.status, await reply.read()

    @contextlib.asynccontextmanager
    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> AsyncIterator[Reply]:
        reply = await self._upstream.send(method, path, body)
        try:
            if reply.status in (401, 403):
                raise UpstreamError(
                    "expected a vLLM server that accepts vllm.api_key, found that it refuses the key; correct it"
                )
            if reply.status in _PASSING or 300 <= reply.status < 400:
                raise UpstreamError(f"expected an answer of the vLLM server, found status {reply.status}; see its log")
            yield reply
        finally:
            await reply.close()


def message_of(content: bytes) -> str:
    """Return the message of a vLLM error, shortened; empty if it has none."""
    try:
        found = json.loads(content)
    except ValueError:
        return ""
    if isinstance(found, dict) and isinstance(found.get("error"), dict):
        found = found["error"]
    text = found.get("message") or found.get("detail") if isinstance(found, dict) else None
    return text[:_MOST_CHARS] if isinstance(text, str) else ""
