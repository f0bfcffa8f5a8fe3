"""A service with two tenants that both have one of everything, and its errors."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
from services import ROWS, Served, served, wait_for

from alto.service.access import create_key, revoke_key
from alto.service.ids import now
from alto.service.serve import create_app
from benchmarks.service.plane import simulated_plane
from benchmarks.service.simulated_cluster import SimulatedCluster

__all__ = ["FIXED", "JSON", "Site", "filled", "open_site", "refused"]

JSON = {"content-type": "application/json"}
FIXED = {"learning_rate": 1e-4, "n_epochs": 1}


class Site:
    """A service that needs keys, with two tenants that both have one of everything."""

    def __init__(self, service: Served) -> None:
        self.served = service
        self.http = httpx2.Client(base_url=service.url, timeout=60)
        with service.service.store.writing() as session:
            keys = {
                "a": create_key(session, "tenant-a")[1],
                "b": create_key(session, "tenant-b")[1],
                "a reads": create_key(session, "tenant-a", scopes=["read"])[1],
                "a writes": create_key(session, "tenant-a", scopes=["write"])[1],
                "a chats": create_key(session, "tenant-a", scopes=["chat"])[1],
                "a expired": create_key(session, "tenant-a", expires_at=now() - 1)[1],
            }
            revoked, keys["a revoked"] = create_key(session, "tenant-a")
            revoke_key(session, revoked.id)
        self.keys = keys
        self.ids = {tenant: self._make_all(tenant) for tenant in ("a", "b")}

    def send(self, method: str, path: str, key: str | None = "a", **more: Any) -> httpx2.Response:
        headers = {} if key is None else {"authorization": f"Bearer {self.keys.get(key, key)}"}
        return self.http.request(method, path, headers=headers | more.pop("headers", {}), **more)

    def upload(self, tenant: str, content: bytes = ROWS, name: str = "rows.jsonl") -> str:
        files = {"file": (name, content)}
        return self.send("POST", "/v1/files", tenant, files=files, data={"purpose": "fine-tune"}).json()["id"]

    def job(self, tenant: str, **more: Any) -> httpx2.Response:
        body = {"model": "alto-tiny", "training_file": self.ids[tenant]["file_id"], "hyperparameters": FIXED, **more}
        return self.send("POST", "/v1/fine_tuning/jobs", tenant, content=json.dumps(body), headers=JSON)

    def _make_all(self, tenant: str) -> dict[str, str]:
        file = self.upload(tenant)
        body = {"model": "alto-tiny", "training_file": file, "hyperparameters": FIXED}
        job = self.send("POST", "/v1/fine_tuning/jobs", tenant, json=body).json()["id"]
        about = {"bytes": 3, "filename": "a", "mime_type": "a", "purpose": "fine-tune"}
        upload = self.send("POST", "/v1/uploads", tenant, json=about).json()["id"]
        path = f"/v1/fine_tuning/jobs/{job}"
        wait_for(lambda: self.send("GET", path, tenant).json()["status"] == "succeeded")
        model = self.send("GET", path, tenant).json()["fine_tuned_model"]
        return {"file_id": file, "job_id": job, "task": job, "upload_id": upload, "model": model, "job": "job-000",
                "action": "cancel", "checkpoint": f"{model}:x", "permission": "x"}  # fmt: skip

    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        """Return the parameters of every path that can be fetched."""
        paths = create_app(self.served.service).openapi()["paths"]
        return {path: methods["get"].get("parameters", []) for path, methods in paths.items() if "get" in methods}

    def routes(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Return all methods and paths that need a key, with well-formed bodies."""
        found = []
        document = create_app(self.served.service).openapi()
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                if operation.get("security") == []:
                    continue
                body: dict[str, Any] = {}
                if path == "/v1/files" and method == "post":
                    body = {"files": {"file": ("a", ROWS)}, "data": {"purpose": "fine-tune"}}
                elif path.endswith("/parts"):
                    body = {"files": {"data": ("a", b"abc")}}
                elif path.endswith("/complete"):
                    body = {"json": {"part_ids": ["part-0"]}}
                elif path.endswith("/priority"):
                    body = {"json": {"priority": 1}}
                elif path.endswith("/clone"):
                    body = {"json": {}}
                elif path == "/v1/uploads":
                    body = {"json": {"bytes": 3, "filename": "a", "mime_type": "a", "purpose": "fine-tune"}}
                elif path in ("/v1/fine_tuning/jobs", "/api/drafts") and method == "post":
                    body = {"json": {"model": "alto-tiny", "training_file": "file-0", "hyperparameters": FIXED}}
                found.append((method.upper(), path, body))
        return found


@contextlib.contextmanager
def open_site(root: Path) -> Iterator[Site]:
    """Open a service in ``root`` whose tasks end by themselves."""
    with served(root, open_plane=simulated_plane(root, lambda: SimulatedCluster(duration_s=0.2))) as found:
        site = Site(found)
        with contextlib.closing(site.http):
            yield site


def filled(path: str, ids: dict[str, str]) -> str:
    # The action of a job of a task has another name.
    ids = ids | ({"action": "stop"} if path.startswith("/api") else {})
    return re.sub(r"\{(\w+)(?::path)?\}", lambda match: ids[match[1]], path)


def refused(response: httpx2.Response, status: int | tuple[int, ...] = 400) -> dict[str, Any]:
    """Return the error of an answer, in the one form that all have."""
    statuses = (status,) if isinstance(status, int) else status
    assert response.status_code in statuses, response.text[:300]
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    assert len(error["message"]) < 10_000
    for path in ("/home", "/tmp", "/work", "site-packages", "Traceback", ".py"):
        assert path not in error["message"]
    found: dict[str, Any] = error
    return found
