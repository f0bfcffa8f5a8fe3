"""Requests that are too large, too slow, or meaningless."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from typing import Any

import httpx2
import pytest
from services import ROWS, served, wait_for
from sites import JSON, Site, refused

from alto.service.web import bodies as body_limits

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
def test_an_invalid_body_is_refused(site: Site, body: bytes) -> None:
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
        fits = ROWS[:900].rpartition(b"\n")[0].ljust(1000, b"\n")  # without what a form adds
        assert http.post("/v1/files", content=head + fits + tail, headers=kind).json()["status"] == "processed"
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


def test_an_upload_that_the_client_breaks_off_is_one_line_of_the_log(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "alto.service")
    host, _, port = site.served.url.rpartition("/")[2].rpartition(":")
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {site.keys['a']}\r\n"
        "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 1000\r\n\r\n--x\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode())
    wait_for(lambda: any(getattr(record, "route", "") == "/v1/files" for record in caplog.records))
    assert [(getattr(record, "status", 0), record.exc_info) for record in caplog.records] == [(400, None)]


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
