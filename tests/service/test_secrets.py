"""Requests for what the service's machine has: its files, its network, its logs."""

from __future__ import annotations

import json
import logging
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from services import ROWS, wait_for
from sites import FIXED, JSON, Site, refused

from alto.service.openai.objects import job_object
from alto.service.settings import ServiceSettings
from alto.service.store.tables import JobRow

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
    addresses = list[Any]()
    connect = socket.socket.connect
    own = int(site.served.url.rpartition(":")[2])

    def watched(self: socket.socket, address: Any) -> None:
        if not (isinstance(address, tuple) and address[1] == own):
            addresses.append(address)
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
    assert not addresses


def test_a_task_of_a_request_trusts_nothing(site: Site) -> None:
    with site.served.service.store.reading() as session:
        for row in session.query(JobRow):
            assert not {"trust_remote_code", "use_safetensors", "chat_template", "init_adapter"} & row.task.keys()
            assert row.task["model"] == "alto-tiny"


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
