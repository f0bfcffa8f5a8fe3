"""Requests that want too much: of other tenants, of the service's machine, of its memory and of its patience."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from services import ROWS, Served, served, wait_for

from alto.service.access import create_key, create_tenant, revoke_key
from alto.service.app import create_app
from alto.service.ids import now
from alto.service.openai.objects import job_object
from alto.service.settings import ServiceSettings
from alto.service.store.tables import JobRow
from alto.service.web import limits as body_limits
from benchmarks.service.plane import simulated_plane
from benchmarks.service.simulated_cluster import SimulatedCluster

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

    def routes(self) -> list[tuple[str, str, dict[str, Any]]]:
        """All methods and paths that need a key, with bodies that are well-formed."""
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


def filled(path: str, ids: dict[str, str]) -> str:
    # Where the action is one of a job of a task, it is another word.
    ids = ids | ({"action": "stop"} if path.startswith("/api") else {})
    return re.sub(r"\{(\w+)(?::path)?\}", lambda match: ids[match[1]], path)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("service")
    with served(root, open_plane=simulated_plane(root, lambda: SimulatedCluster(duration_s=0.2))) as found:
        site = Site(found)
        with contextlib.closing(site.http):
            yield site


def refused(response: httpx2.Response, status: int | tuple[int, ...] = 400) -> dict[str, Any]:
    """The error of an answer, in the one form that they have."""
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


# -- keys and tenants --------------------------------------------------------------------------------------------------


def test_every_route_needs_a_key_that_counts(site: Site) -> None:
    routes = site.routes()
    assert len(routes) > 30
    for method, path, body in routes:
        for key in (None, "a revoked", "a expired", "alto-unknown", "x", site.keys["a"][:-1], site.keys["a"] + "x"):
            answer = site.send(method, filled(path, site.ids["a"]), key, **body)
            assert refused(answer, 401)["code"] == "invalid_api_key", (method, path, key)
            assert answer.headers["www-authenticate"] == "Bearer"


def test_every_route_needs_its_scope(site: Site) -> None:
    for method, path, body in site.routes():
        is_reading = method == "GET" or path == "/api/drafts" or "/permissions" in path or "/graders" in path
        wrong = "a writes" if is_reading else "a reads"
        for key in (wrong, "a chats"):
            if path.endswith("/completions"):
                if key == "a chats":
                    continue
                key = "a writes"
            answer = site.send(method, filled(path, site.ids["a"]), key, **body)
            assert refused(answer, 403)["code"] == "insufficient_scope", (method, path, key)


def test_nothing_of_another_tenant_is_found(site: Site) -> None:
    """What another tenant has looks as what nobody has."""
    own, unknown = site.ids["a"], dict.fromkeys(site.ids["a"], "none-0") | {"action": "cancel", "job": "job-000"}
    checked = 0
    for method, path, body in site.routes():
        if "{" not in path or "/permissions" in path or "/graders" in path:
            continue
        theirs = site.send(method, filled(path, own), "b", **body)
        nobodys = site.send(method, filled(path, unknown), "b", **body)
        # Uploads to the hub are switched off, whoever's the model is.
        status = 400 if path.endswith("/push") else 404
        assert (theirs.status_code, nobodys.status_code) == (status, status), (method, path)
        name = next(value for key, value in own.items() if f"{{{key}" in path)
        assert theirs.json()["error"]["message"].replace(name, "none-0") == nobodys.json()["error"]["message"]
        checked += 1
    assert checked > 15
    assert site.send("GET", f"/v1/fine_tuning/jobs/{own['job_id']}").json()["status"] == "succeeded", "nothing changed"
    assert site.send("GET", f"/v1/files/{own['file_id']}/content").content == ROWS
    for path in ("/v1/files", "/v1/fine_tuning/jobs"):
        refused(site.send("GET", f"{path}?after={own['file_id' if 'files' in path else 'job_id']}", "b"), 404)
    for key in ("training_file", "validation_file"):
        refused(site.job("b", **{key: own["file_id"]}), 404)


def test_lists_have_nothing_of_another_tenant(site: Site) -> None:
    theirs = set(site.ids["a"].values()) - {"job-000", "cancel", "x"}
    for method, path, _ in site.routes():
        if method == "GET" and "{" not in path:
            answer = site.send("GET", path, "b")
            assert answer.status_code == 200, path
            assert not [name for name in theirs if name in answer.text], path
    for path in ("/metrics", "/readyz", "/healthz"):
        assert site.send("GET", path, None).status_code == 200
        assert not re.search("tenant-|ftjob-", site.send("GET", path, None).text)


def test_a_body_is_read_only_from_those_with_a_key(site: Site) -> None:
    host, port = site.served.url.removeprefix("http://").split(":")
    for path, kind in (("/v1/files", "multipart/form-data; boundary=x"), ("/v1/fine_tuning/jobs", "application/json")):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: 100000\r\n\r\n"
            connection.sendall(head.encode())
            assert b" 401 " in connection.recv(65536), "the answer does not wait for the body"


# -- pages of other sites ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    with served(tmp_path_factory.mktemp("keyless")) as found, httpx2.Client(base_url=found.url) as http:
        yield http


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8100", "localhost.evil.example", "[", "[::1", "", "10.0.0.1", "testserver",
     "127.0.0.1.evil.example", "evil@evil.example"],
)  # fmt: skip
def test_without_keys_other_names_of_this_machine_are_refused(keyless: httpx2.Client, host: str) -> None:
    refused(keyless.get("/v1/files", headers={"host": host}), 403)


@pytest.mark.parametrize("host", ["localhost", "localhost:80", "127.0.0.1:1", "[::1]", "[::1]:5"])
def test_without_keys_this_machine_is_answered(keyless: httpx2.Client, host: str) -> None:
    assert keyless.get("/v1/files", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://[", "http://localhost:1", "", "x", "http://"]
)
def test_pages_of_other_sites_change_nothing(keyless: httpx2.Client, site: Site, origin: str) -> None:
    body = {"bytes": 3, "filename": "a", "mime_type": "a", "purpose": "fine-tune"}
    refused(keyless.post("/v1/uploads", json=body, headers={"origin": origin}), 403)
    cookie = {"cookie": f"alto_key={site.keys['a']}", "origin": origin}
    refused(site.send("POST", "/v1/uploads", None, json=body, headers=cookie), 403)
    assert "access-control-allow-origin" not in keyless.get("/v1/files", headers={"origin": origin}).headers
    own = str(keyless.base_url).rstrip("/")
    assert keyless.post("/v1/uploads", json=body, headers={"origin": own}).status_code == 200


# -- bodies ------------------------------------------------------------------------------------------------------------

DEEP = "[" * 400 + "]" * 400
BODIES = {
    "nothing": b"",
    "text": b"hello",
    "list": b"[]",
    "null": b"null",
    "invalid UTF-8": b'{"model": "\xff"}',
    "NUL": b'{"model": "a\\u0000"}',
    "NUL in a key": b'{"metadata": {"\\u0000": "a"}}',
    "NUL among settings": b'{"hyperparameters": {"target_modules": ["\\u0000"]}}',
    "half a surrogate pair": b'{"model": "\\ud800"}',
    "half a surrogate pair in a key": b'{"\\ud800": 1}',
    "half a surrogate pair among settings": b'{"hyperparameters": {"x": {"\\udfff": [1]}}}',
    "NaN": b'{"hyperparameters": {"early_exit": {"x": NaN}}}',
    "infinity": b'{"hyperparameters": {"x": [-Infinity]}}',
    "a number that is infinite": b'{"hyperparameters": {"x": 1e999}}',
    "5000 digits": b'{"seed": ' + b"9" * 5000 + b"}",
    "400 digits": b'{"hyperparameters": {"learning_rate_multiplier": 1' + b"0" * 400 + b"}}",
    "65 bits": b'{"hyperparameters": {"x": 18446744073709551616}}',
    "deep": f'{{"hyperparameters": {{"x": {DEEP}}}}}'.encode(),
    "very deep": b"[" * 500_000,
    "deep objects": b'{"a":' * 100_000,
    "many keys": json.dumps({"hyperparameters": {f"k{n}": 1 for n in range(50_000)}}).encode(),
    "a long key": json.dumps({"hyperparameters": {"k" * 900_000: "auto"}}).encode(),
    "a long key of pairs": json.dumps({"metadata": {"k" * 900_000: 1}}).encode(),
    "a large grid": json.dumps({"hyperparameters": {"lr": [n * 1e-9 for n in range(1, 30_000)]}}).encode(),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_that_is_none_is_refused(site: Site, body: bytes) -> None:
    if body.startswith((b'{"hyper', b'{"metadata')) and body.endswith(b"}"):
        body = body[:-1] + f', "model": "alto-tiny", "training_file": "{site.ids["a"]["file_id"]}"}}'.encode()
    for path in ("/v1/fine_tuning/jobs", "/api/drafts"):
        refused(site.send("POST", path, content=body, headers=JSON))


def test_values_that_are_kept_are_answered(site: Site) -> None:
    pairs = {"a": "\u2028</script><script>alert(1)</script>", "\U0001f600": "é\x7f\x1b"}
    created = site.job("a", metadata=pairs).json()
    assert created["metadata"] == pairs
    assert site.send("GET", f"/v1/fine_tuning/jobs/{created['id']}").headers["content-type"] == "application/json"


def test_bodies_that_are_too_long_are_ended(site: Site) -> None:
    most = site.served.service.settings.max_request_bytes
    pieces = (b"x" * 65536 for _ in range(most // 65536 + 2))
    refused(site.send("POST", "/v1/fine_tuning/jobs", content=b"x" * (most + 1), headers=JSON), 413)
    refused(site.send("POST", "/v1/fine_tuning/jobs", content=pieces, headers=JSON), 413)
    refused(site.send("POST", "/v1/fine_tuning/jobs", content=b"x" * (most + 1), headers=JSON, key=None), (401, 413))


@pytest.mark.parametrize("is_chunked", [False, True])
def test_files_that_are_too_long_are_ended(tmp_path: Path, is_chunked: bool) -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    tail = b'\r\n--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--x--\r\n'
    kind = {"content-type": "multipart/form-data; boundary=x"}
    with served(tmp_path, max_upload_bytes=1000) as found, httpx2.Client(base_url=found.url) as http:
        for size in (1001, 200_000):
            parts = [head, b"x" * size, tail]
            body: Any = iter(parts) if is_chunked else b"".join(parts)
            refused(http.post("/v1/files", content=body, headers=kind), 413)
        fits = head + ROWS[:900].rpartition(b"\n")[0] + tail
        assert http.post("/v1/files", content=fits, headers=kind).json()["status"] == "processed"
        assert not list((tmp_path / "artefacts").glob("**/*.new-*")), "nothing unfinished is left"
        assert len(http.get("/v1/files").json()["data"]) == 1


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "GZIP", "identity, gzip"])
def test_compressed_bodies_are_refused(site: Site, encoding: str) -> None:
    headers = JSON | {"content-encoding": encoding}
    refused(site.send("POST", "/v1/fine_tuning/jobs", content=b"x", headers=headers), 415)


def test_slow_bodies_are_ended(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limits, "_IDLE_S", 0.2)
    host, port = site.served.url.removeprefix("http://").split(":")
    for path in ("/v1/fine_tuning/jobs", "/v1/files"):
        kind = "multipart/form-data; boundary=x" if path == "/v1/files" else "application/json"
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            head = (
                f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {site.keys['a']}\r\n"
                f"Content-Type: {kind}\r\nContent-Length: 100\r\n\r\n--x"
            )
            connection.sendall(head.encode())
            answer = b""
            while b"too_slow" not in answer:
                answer += (piece := connection.recv(65536))
                assert piece, answer
            assert b" 400 " in answer


def test_forms_have_few_parts(site: Site) -> None:
    file = {"file": ("a", ROWS)}
    many_fields = {"purpose": "fine-tune"} | {f"f{number}": "1" for number in range(2000)}
    refused(site.send("POST", "/v1/files", files=file, data=many_fields))
    refused(site.send("POST", "/v1/files", files=[("file", ("a", b"{}"))] * 2000, data={"purpose": "fine-tune"}))
    refused(site.send("POST", "/v1/files", files=file, data={"purpose": "x" * 500_000}))
    refused(site.send("POST", "/v1/files", data={"purpose": "fine-tune", "file": "text"}))
    for body in (
        b"",
        b"--x",
        b"--x\r\n\r\n",
        b"--x--",
        b"\xff" * 100,
        b"--x\r\nContent-Disposition: form-data\r\n\r\n",
    ):
        for kind in ("multipart/form-data; boundary=x", "multipart/form-data", "multipart/form-data; boundary=", "x"):
            refused(site.send("POST", "/v1/files", content=body, headers={"content-type": kind}))


@pytest.mark.parametrize(
    "path",
    ["/v1/files/a%00b", "/v1/files?after=%00", "/v1/files?purpose=a%00", "/v1/fine_tuning/jobs?metadata[a%00]=b",
     "/v1/fine_tuning/jobs?metadata[a]=%00", "/v1/models/a%00b", "/api/tasks/%00", "/v1/%00"],
)  # fmt: skip
def test_addresses_without_a_meaning_for_databases_are_refused(site: Site, path: str) -> None:
    refused(site.send("GET", path), 400)


@pytest.mark.parametrize(
    "path",
    ["/v1/files/%ff%fe", "/v1/files?after=%ff", "/v1/files/" + "x" * 5000, "/v1/files/%F0%9F%98%80",
     "/v1/models/%ed%a0%80", "/api/tasks/x/events?since=1"],
)  # fmt: skip
def test_odd_addresses_are_not_found(site: Site, path: str) -> None:
    refused(site.send("GET", path), 404)


def test_events_begin_only_where_numbers_are(site: Site) -> None:
    path = f"/api/tasks/{site.ids['a']['task']}/events"
    for since in (10**30, -1, 0, "x"):
        refused(site.send("GET", f"{path}?since={since}"))
    for last in ("9" * 20, "-1", "x", "1.5"):
        assert "event: end" in site.send("GET", path, headers={"last-event-id": last}).text
    refused(site.send("GET", path, headers={"last-event-id": "9" * 21}))


@pytest.mark.parametrize("count", [b"\xb2", b"x", b"-1", b"9" * 5000, b"\xff", b""])
def test_odd_counts_of_repetitions_are_answered(site: Site, count: bytes) -> None:
    body = {"bytes": 3, "filename": "a", "mime_type": "a", "purpose": "fine-tune"}
    headers: Any = {"x-stainless-retry-count": count, "idempotency-key": ""}
    assert site.send("POST", "/v1/uploads", json=body, headers=headers).status_code == 200


# -- paths, addresses and code -----------------------------------------------------------------------------------------

PATHS = ["../../etc/passwd", "/etc/passwd", "..", ".", "C:\\x\\..\\boot.ini", "a/../../b", "file:///etc/passwd",
         "http://127.0.0.1:1/x", "s3://bucket/x", "\\\\host\\share", "ftp::x", "gsm8k", "openai/gsm8k"]  # fmt: skip


@pytest.mark.parametrize("name", PATHS)
def test_names_are_never_paths(site: Site, name: str) -> None:
    file = site.send("GET", f"/v1/files/{site.upload('a', name=name)}").json()
    assert not {"/", "\\"} & set(file["filename"])
    assert file["filename"]
    for body in ({"model": name}, {"training_file": name}, {"validation_file": name}):
        refused(site.job("a", **body), 404)
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        refused(site.job("a", suffix=name))
    about = {"bytes": 3, "filename": name, "mime_type": "a", "purpose": "fine-tune"}
    assert not {"/", "\\"} & set(site.send("POST", "/v1/uploads", json=about).json()["filename"])
    quoted = name.replace("/", "%2f").replace("\\", "%5c")
    for path in ("/v1/files/{}", "/v1/files/{}/content", "/v1/models/{}", "/api/tasks/{}", "/api/tasks/{}/report"):
        assert site.send("GET", path.format(quoted)).status_code in (404, 200 if name in ("..", ".") else 404)
    job = f"/api/tasks/{site.ids['a']['task']}/jobs/{quoted}/stop"
    assert site.send("POST", job).status_code in (400, 404, 405)


def test_models_of_the_hub_are_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from alto.service.errors import ApiError
    from alto.service.models import base_model_of

    settings = ServiceSettings(hub_models=True, trust_remote_code=("owner/trusted",))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "local").mkdir(parents=True)
    assert base_model_of(settings, "owner/name") == {"model": "owner/name"}
    assert base_model_of(settings, "owner/trusted")["trust_remote_code"]
    for name in (*PATHS[:-1], "owner/local", "owner/../x", "/x/y", "a/b/c", "./a", "~/a", "owner/name\n", "-/x"):
        with pytest.raises(ApiError, match="model: expected"):
            base_model_of(settings, name)


def test_rows_that_name_files_and_servers_are_text(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()
    connect = socket.socket.connect
    own = int(site.served.url.rpartition(":")[2])

    def watched(self: socket.socket, address: Any) -> None:
        if not (isinstance(address, tuple) and address[1] == own):
            asked.append(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", watched)
    secret = site.served.service.settings.root / "secret.txt"
    secret.write_text("do not read this")
    rows = [
        {"messages": [{"role": "user", "content": str(secret)}, {"role": "assistant", "content": f"file://{secret}"}]},
        {
            "messages": [
                {"role": "user", "content": "http://127.0.0.1:9/x"},
                {"role": "assistant", "content": "{{ x }}"},
            ]
        },
    ] * 20
    file = site.upload("a", "".join(json.dumps(row) + "\n" for row in rows).encode())
    body = {"model": "alto-tiny", "training_file": file, "hyperparameters": FIXED}
    answer = site.send("POST", "/api/drafts", json=body)
    assert answer.status_code == 200
    assert str(secret) in answer.text, "as text"
    assert "do not read this" not in answer.text
    parts = [{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/"}}]},
                           {"role": "assistant", "content": "a"}]}]  # fmt: skip
    body["training_file"] = site.upload("a", "".join(json.dumps(row) + "\n" for row in parts * 20).encode())
    refused(site.send("POST", "/api/drafts", json=body), (400, 200))
    for content in (b"\x80\x04\x95", b"PK\x03\x04", b"\x1f\x8b\x08", b"--- !!python/object/apply:os.system ['true']\n"):
        assert site.send("GET", f"/v1/files/{site.upload('a', content)}").json()["status"] == "error"
    assert not asked


def test_a_task_of_a_request_trusts_nothing(site: Site) -> None:
    with site.served.service.store.reading() as session:
        for row in session.query(JobRow):
            assert not {"trust_remote_code", "use_safetensors", "chat_template", "init_adapter"} & row.task.keys()
            assert row.task["model"] == "alto-tiny"


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_errors_of_rows_have_no_paths(site: Site) -> None:
    file = site.upload("a", ROWS + b'{"prompt": 1}\n')
    body = {"model": "alto-tiny", "training_file": file, "hyperparameters": FIXED}
    error = refused(site.send("POST", "/api/drafts", json=body))
    root = str(site.served.service.settings.root)
    assert root not in error["message"]
    job = site.send("POST", "/v1/fine_tuning/jobs", json=body).json()["id"]
    wait_for(lambda: site.send("GET", f"/v1/fine_tuning/jobs/{job}").json()["status"] == "failed")
    for path in (f"/v1/fine_tuning/jobs/{job}", f"/v1/fine_tuning/jobs/{job}/events", f"/api/tasks/{job}"):
        assert root not in site.send("GET", path).text


def test_content_is_downloaded_and_never_shown(site: Site) -> None:
    page = b"<html><script>alert(1)</script>"
    file = site.upload("a", page, name='<script>".html')
    answer = site.send("GET", f"/v1/files/{file}/content")
    assert answer.content == page
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"].startswith("attachment;")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "<" not in answer.headers["content-disposition"]


def test_reports_show_texts_as_text(site: Site) -> None:
    job = site.ids["a"]["task"]
    answer = site.send("GET", f"/api/tasks/{job}/report")
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"].startswith("sandbox")
    assert answer.headers["x-frame-options"] == "DENY"


def test_a_failure_is_named_and_says_nothing_else(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alto.service.openai.jobs.job_object", lambda row: job_object(None))  # type: ignore[arg-type]
    answer = site.send("GET", f"/v1/fine_tuning/jobs/{site.ids['a']['job_id']}")
    error = refused(answer, 500)
    assert answer.headers["x-request-id"] in error["message"]
    assert answer.headers["connection"] == "close"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "NoneType" not in answer.text


def test_logs_have_no_keys_and_no_bodies(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    secret = "ThisIsInTheBody"
    with caplog.at_level(logging.DEBUG):
        site.job("a", metadata={secret: secret}, suffix=secret)
        site.send("GET", f"/v1/files?after={secret}")
        site.send("GET", f"/v1/files/{secret}")
        site.send("POST", "/v1/fine_tuning/jobs", content=json.dumps({secret: secret}), headers=JSON)
        site.send("GET", "/v1/files", "alto-ThisIsInTheBody")
        site.upload("a", secret.encode(), name=secret)
        # Answers are sent before they are logged.
        wait_for(lambda: sum(record.getMessage() == "request" for record in caplog.records) >= 6)
    for record in caplog.records:
        if not record.name.startswith(("alto", "uvicorn.error")):
            continue
        text = f"{record.getMessage()} {vars(record)}"
        assert secret not in text
        assert not any(key in text for key in site.keys.values())


def test_a_refused_transaction_is_logged_without_its_values(site: Site) -> None:
    from sqlalchemy import text
    from sqlalchemy.exc import OperationalError

    with pytest.raises(OperationalError) as caught, site.served.service.store.writing() as session:
        session.execute(text("SELECT :value FROM nothing"), {"value": "ThisIsInTheBody"})
    assert "ThisIsInTheBody" not in str(caught.value)


def test_odd_methods_are_not_counted_by_name(site: Site) -> None:
    for number in range(5):
        refused(site.send(f"ODD{number}", "/v1/files"), 405)
        refused(site.send("GET", f"/odd-{number}"), 404)
    assert "odd" not in site.send("GET", "/metrics").text.lower()


# -- limits ------------------------------------------------------------------------------------------------------------


def limited(site: Site, tenant: str, **limits: Any) -> str:
    with site.served.service.store.writing() as session:
        create_tenant(session, tenant, limits)
        return create_key(session, tenant)[1]


def test_requests_a_second_are_limited(site: Site) -> None:
    key = limited(site, "hasty", requests_per_s=0.2)
    answers = [site.send("GET", "/v1/models", key) for _ in range(3)]
    assert answers[0].status_code == 200
    refused(answers[-1], 429)
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
    key = limited(site, "hasty-too", requests_per_s=1000)
    file = {"files": {"file": ("a", ROWS)}, "data": {"purpose": "fine-tune"}}
    assert site.send("POST", "/v1/files", key, **file).status_code == 200
    with site.served.service.rates._lock:
        left = site.served.service.rates._buckets["hasty-too"][0]
    assert left >= 4998.9, "a request with a body is one request"
    assert site.send("GET", "/v1/models").status_code == 200, "others are not limited"


def test_open_tasks_are_limited(site: Site) -> None:
    key = limited(site, "busy", max_tasks=1)
    site.keys["busy"] = key
    site.ids["busy"] = {"file_id": site.upload("busy")}
    with site.served.service.store.writing() as session:
        row = session.query(JobRow).filter_by(tenant="tenant-a").first()
        assert row is not None
        session.add(JobRow(**{column.name: getattr(row, column.name) for column in JobRow.__table__.columns
                              if column.name not in ("number", "id", "tenant", "status")},
                           id="ftjob-busy", tenant="busy", status="paused"))  # fmt: skip
    answer = site.job("busy")
    assert refused(answer, 429)["code"] == "too_many_jobs"
    assert int(answer.headers["retry-after"]) <= 60
    assert answer.headers["x-should-retry"] == "false"
    assert site.send("POST", "/v1/fine_tuning/jobs/ftjob-busy/cancel", "busy").status_code == 200
    assert site.job("busy").status_code == 200


def test_bytes_are_limited_those_of_uploads_too(site: Site) -> None:
    site.keys["full"] = limited(site, "full", max_bytes=2 * len(ROWS))
    site.upload("full")
    about = {"bytes": len(ROWS), "filename": "a", "mime_type": "a", "purpose": "fine-tune"}
    upload = site.send("POST", "/v1/uploads", "full", json=about).json()["id"]
    file = {"files": {"file": ("a", ROWS[:100])}, "data": {"purpose": "fine-tune"}}
    for answer in (
        site.send("POST", "/v1/files", "full", **file),
        site.send("POST", "/v1/uploads", "full", json=about),
    ):
        assert refused(answer, 429)["code"] == "storage_quota_exceeded"
    part = site.send("POST", f"/v1/uploads/{upload}/parts", "full", files={"data": ("a", ROWS)}).json()["id"]
    done = site.send("POST", f"/v1/uploads/{upload}/complete", "full", json={"part_ids": [part]})
    assert done.json()["file"]["bytes"] == len(ROWS)
    refused(site.send("POST", "/v1/files", "full", **file), 429)
    site.send("DELETE", f"/v1/files/{done.json()['file']['id']}", "full")
    assert site.send("POST", "/v1/files", "full", **file).status_code == 200


def test_gpus_are_limited(site: Site) -> None:
    site.keys["small"] = limited(site, "small", max_gpus=2)
    site.ids["small"] = {"file_id": site.upload("small")}
    assert site.job("small", hyperparameters=FIXED | {"num_gpus": 2}).status_code == 200
    assert refused(site.job("small", hyperparameters=FIXED | {"num_gpus": 3}))["code"] == "too_many_gpus"


def test_followers_are_limited_before_their_streams_begin(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from alto.service.api.streams import Followers

    monkeypatch.setattr(Followers, "follow", lambda *_: pytest.fail("it began"))
    monkeypatch.setattr(Followers, "check_room", Followers.check_room)
    # A process without room for any.
    with served(site.served.service.settings.root / "other") as other:
        file = httpx2.post(f"{other.url}/v1/files", files={"file": ("a", ROWS)}, data={"purpose": "fine-tune"}).json()
        body = {"model": "alto-tiny", "training_file": file["id"]}
        job = httpx2.post(f"{other.url}/v1/fine_tuning/jobs", json=body).json()["id"]
        monkeypatch.setattr(Followers, "check_room", _no_room)
        refused(httpx2.get(f"{other.url}/api/tasks/{job}/events"), 503)


def _no_room(self: Any) -> None:
    from alto.service.errors import ApiError

    raise ApiError(503, "full", headers={"Retry-After": "10"})


def test_clones_are_limited(tmp_path: Path) -> None:
    plane = simulated_plane(tmp_path, lambda: SimulatedCluster(duration_s=60))
    with served(tmp_path, open_plane=plane, max_jobs=2) as found, httpx2.Client(base_url=found.url, timeout=60) as http:
        file = http.post("/v1/files", files={"file": ("a", ROWS)}, data={"purpose": "fine-tune"}).json()["id"]
        body = {"model": "alto-tiny", "training_file": file, "hyperparameters": FIXED}
        path = f"/api/tasks/{http.post('/v1/fine_tuning/jobs', json=body).json()['id']}"
        wait_for(lambda: bool(http.get(path).json()["jobs"]))
        assert refused(http.post(f"{path}/jobs/job-000/clone", json={}))["code"] == "too_many_configurations"
        error = refused(http.post(f"{path}/jobs/none/stop"), 404)
        assert error["code"] == "job_not_found"
        assert error["message"] == "job: expected a job of this task, found none named 'none'"
