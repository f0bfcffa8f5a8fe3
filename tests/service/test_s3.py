"""Files and adapters in an S3-compatible store: moto's server over HTTP."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="needs the extra 'service'")

import fsspec
from fastapi.testclient import TestClient
from served_models import add_model
from services import served

from alto.service.files import Artefacts
from alto.service.serve import create_app, opened_service
from alto.service.settings import ServiceSettings

# moto and boto3 are imported where they are used, because every worker of pytest imports this file.
pytestmark = [
    pytest.mark.skipif(find_spec("s3fs") is None, reason="needs s3fs"),
    pytest.mark.skipif(find_spec("moto") is None, reason="needs moto[server]"),
]

MIB = 2**20


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket; environment variables name the server, as for any S3-compatible store."""
    import boto3
    from moto.server import ThreadedMotoServer

    found = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    found.start()
    host, port = found.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    boto3.client("s3", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket="alto")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield "s3://alto/service"
    found.stop()


class Cut:
    """A stream that breaks off after some bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes

    def read(self, size: int) -> bytes:
        if self._left <= 0:
            raise ConnectionResetError("cut")
        self._left -= size
        return b"x" * size


def test_contents_are_written_whole_read_and_deleted(bucket: str, tmp_path: Path) -> None:
    import boto3

    store, other = Artefacts(bucket), Artefacts(bucket)
    assert store.local_folder("models") is None
    assert store.names("models/a") == []
    content = os.urandom(7 * MIB)  # more than one part of a multi-part upload
    store.write("models/a/weights", io.BytesIO(content))
    store.write("models/a/config.json", io.BytesIO(b"{}"))
    assert other.names("models/a") == ["config.json", "weights"]
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    client.put_object(Bucket="alto", Key="service/models/a/late", Body=b"of another server")
    assert other.names("models/a") == ["config.json", "late", "weights"]
    store.delete("models/a/late")
    other.fetch_folder("models/a", tmp_path / "a")
    assert (tmp_path / "a" / "weights").read_bytes() == content

    with pytest.raises(ConnectionResetError):
        store.write("models/a/half", Cut(20 * MIB))  # type: ignore[arg-type]
    assert other.names("models/a") == ["config.json", "weights"]
    with pytest.raises(FileNotFoundError):
        other.open("models/a/half")
    store.delete("models/a")
    assert other.names("models/a") == []
    store.delete("models/a")


def test_an_upload_that_was_cut_is_continued_by_another_server(bucket: str, tmp_path: Path) -> None:
    line = b'{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "%d"}]}\n'
    parts = [b"".join(line % (10**9 + 10**6 * part + n) for n in range(12_000)) for part in range(4)]
    size = sum(map(len, parts))
    settings = {"artefacts": bucket, "models": {"base": "alto-tiny"}}
    ids = []
    with served(tmp_path, **settings) as service:
        client = service.client()
        upload = client.uploads.create(bytes=size, filename="a.jsonl", mime_type="text/jsonl", purpose="fine-tune")
        ids += [client.uploads.parts.create(upload.id, data=part).id for part in parts[:2]]
    with served(tmp_path, **settings) as service:
        client = service.client()
        ids += [client.uploads.parts.create(upload.id, data=part).id for part in parts[2:]]
        digest = hashlib.md5(b"".join(parts)).hexdigest()
        file = client.uploads.complete(upload.id, part_ids=ids, md5=digest).file
        assert file is not None
        assert file.bytes == size
        assert client.files.content(file.id).read() == b"".join(parts)
    assert not (tmp_path / "artefacts").exists()


def test_a_model_is_downloaded_from_the_store(bucket: str, tmp_path: Path) -> None:
    settings = ServiceSettings(data_dir=str(tmp_path), models={"base": "alto-tiny"}, artefacts=bucket)
    with opened_service(settings) as service:
        name = add_model(service, "a")
        client = TestClient(create_app(service), base_url="http://localhost")
        answer = client.get(f"/api/models/{name}/adapter")
        assert answer.status_code == 200
        assert len(answer.content) > 1000
