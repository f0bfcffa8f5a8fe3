"""Requests for what others have: other tenants, and pages of other sites."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import httpx2
import pytest
from services import ROWS, served
from sites import Site, filled, refused


def test_every_route_needs_a_key_that_counts(site: Site) -> None:
    routes = site.routes()
    assert len(routes) > 30
    for method, path, body in routes:
        for key in (None, "a revoked", "a expired", "alto-unknown", "x", site.keys["a"][:-1], site.keys["a"] + "x"):
            answer = site.send(method, filled(path, site.ids["a"]), key, **body)
            assert refused(answer, 401)["code"] == "invalid_api_key", (method, path, key)
            assert "ask the operator of the service" in answer.json()["error"]["message"]
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
    """Another tenant's objects look as if they did not exist."""
    own, unknown = site.ids["a"], dict.fromkeys(site.ids["a"], "none-0") | {"action": "cancel", "job": "job-000"}
    checked = 0
    for method, path, body in site.routes():
        if "{" not in path or "/permissions" in path or "/graders" in path:
            continue
        theirs = site.send(method, filled(path, own), "b", **body)
        nobodys = site.send(method, filled(path, unknown), "b", **body)
        # Uploads to the hub are switched off for everybody's models.
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


def test_a_page_after_an_object_of_another_tenant_looks_like_one_after_an_unknown_object(site: Site) -> None:
    paths = [path for path, of in site.parameters().items() if any(found.get("name") == "after" for found in of)]
    assert len(paths) > 5
    for path in paths:
        for theirs in (*site.ids["a"].values(), f"ftevent-{site.ids['a']['job_id'].partition('-')[2]}-1"):
            own = filled(path, site.ids["b"])
            found, nobodys = (site.send("GET", own, "b", params={"after": name}) for name in (theirs, "none-0"))
            error = refused(found, 404)
            assert error["param"] == "after", path
            assert error | {"message": error["message"].replace(f"{theirs!r}", "'none-0'")} == refused(nobodys, 404)


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
