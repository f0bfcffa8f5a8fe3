"""The folder of vLLM's filesystem resolver: complete adapters, names that move, and restarts of both servers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="needs the extra 'service'")

from fake_vllm import BASE, KEY, ROOT, FakeVllm, fake_vllm
from fastapi.testclient import TestClient
from served_models import add_model, row_of
from typer.testing import CliRunner

from alto.cli import app
from alto.errors import ServiceError
from alto.service.context import Service
from alto.service.serve import create_app, opened_service
from alto.service.settings import ServiceSettings, VllmSettings
from alto.service.vllm import Registrar
from alto.service.vllm.cache import AdapterCache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def vllm(folder: Path) -> Iterator[FakeVllm]:
    with fake_vllm() as found:
        found.cache = folder
        yield found


@pytest.fixture
def service(tmp_path: Path, vllm: FakeVllm, folder: Path) -> Iterator[Service]:
    server = VllmSettings(url=vllm.url, api_key=KEY, base_model=BASE, cache=str(folder))
    settings = ServiceSettings(data_dir=str(tmp_path / "data"), models={"base": BASE}, vllm=server)
    with opened_service(settings) as found:
        yield found


def turn(service: Service) -> None:
    Registrar(service).turn()


def adapter(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8, "base_model_name_or_path": "other"}', encoding="utf-8")
    (folder / "adapter_model.safetensors").write_text(text, encoding="utf-8")
    return folder


def test_a_model_is_put_into_the_folder_and_found_there(service: Service, vllm: FakeVllm, folder: Path) -> None:
    name = add_model(service, "a")
    turn(service)
    assert row_of(service, name).serving == "ready"
    assert vllm.loads() == []
    config = json.loads((folder / name / "adapter_config.json").read_text(encoding="utf-8"))
    assert config == {"r": 8, "base_model_name_or_path": ROOT}
    assert (folder / name / "adapter_model.safetensors").read_bytes() == b"a" * 1000
    source = Path(service.settings.root / "artefacts/models/default/ftjob-a/adapter_config.json")
    assert json.loads(source.read_text(encoding="utf-8")) == {"r": 8}, "the service's own copy was changed"


def test_a_restarted_server_finds_models_without_the_service(service: Service, vllm: FakeVllm, folder: Path) -> None:
    name = add_model(service, "a", suffix="sums")
    turn(service)
    before = len(vllm.requests)
    vllm.restart()
    for asked in (name, "ft:base:default:sums"):
        body = {"model": asked, "messages": []}
        client = TestClient(create_app(service), base_url="http://localhost")
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert set(vllm.paths()[before:]) == {"/v1/chat/completions"}


def test_an_alias_moves_to_the_newer_model_and_the_server_looks_again(
    service: Service, vllm: FakeVllm, folder: Path
) -> None:
    alias = "ft:base:default:sums"
    first = add_model(service, "a", suffix="sums")
    turn(service)
    assert (folder / alias).resolve() == (folder / first).resolve()
    vllm.adapters[alias] = str((folder / alias).resolve())  # a request named it
    second = add_model(service, "b", suffix="sums")
    turn(service)
    assert (folder / alias).resolve() == (folder / second).resolve()
    assert alias not in vllm.adapters, "the server still answers with the old model"
    assert (folder / first).is_dir(), "requests may still name the old model"

    client = TestClient(create_app(service), base_url="http://localhost")
    assert client.delete(f"/v1/models/{second}").status_code == 200
    turn(service)
    assert (folder / alias).resolve() == (folder / first).resolve()
    assert not (folder / second).exists()
    assert client.delete(f"/v1/models/{first}").status_code == 200
    turn(service)
    assert list(folder.iterdir()) == []


def test_a_link_that_was_moved_before_a_crash_is_looked_for_again(
    service: Service, vllm: FakeVllm, folder: Path
) -> None:
    alias = "ft:base:default:sums"
    add_model(service, "a", suffix="sums")
    turn(service)
    vllm.adapters[alias] = "/an/old/place"
    turn(service)  # of another process, which finds the link as it should be
    assert alias not in vllm.adapters


def test_a_server_with_another_path_of_its_base_gets_configurations_with_this_path(
    service: Service, vllm: FakeVllm, folder: Path
) -> None:
    name = add_model(service, "a")
    turn(service)
    file = folder / name / "adapter_config.json"
    file.write_text(json.dumps({"r": 8, "base_model_name_or_path": "/moved"}), encoding="utf-8")
    vllm.restart()
    turn(service)
    assert json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"] == ROOT
    assert row_of(service, name).serving == "ready"


def test_a_server_without_the_resolver_is_named(service: Service, vllm: FakeVllm) -> None:
    vllm.cache = None
    name = add_model(service, "a")
    turn(service)
    details = str(row_of(service, name).serving_details)
    assert "VLLM_PLUGINS=lora_filesystem_resolver" in details


def test_a_copy_is_complete_or_absent(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, source = AdapterCache(folder), adapter(tmp_path / "source", "weights")
    copytree = shutil.copytree

    def killed(source: Path, target: Path) -> None:
        copytree(source, target)
        (target / "adapter_model.safetensors").write_text("half", encoding="utf-8")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", killed)
        with pytest.raises(KeyboardInterrupt):
            cache.publish("org/name:a", source, ROOT)
    assert not (folder / "org").exists()
    assert len(list(folder.iterdir())) == 1
    cache = AdapterCache(folder)
    assert list(folder.iterdir()) == [], "the half copy was left"
    cache.publish("org/name:a", source, ROOT)
    assert (folder / "org/name:a" / "adapter_model.safetensors").read_text(encoding="utf-8") == "weights"
    assert cache.point({"org/alias": "org/name:a"}) == ["org/alias"]
    assert cache.point({"org/alias": "org/name:a"}) == []
    assert (folder / "org/alias").resolve() == (folder / "org/name:a").resolve()
    assert cache.point({}) == ["org/alias"]
    assert (folder / "org/name:a").is_dir()


@pytest.mark.parametrize("name", ["..", "a/../../b", ""])
def test_names_outside_the_folder_are_refused(name: str, folder: Path) -> None:
    with pytest.raises(ServiceError, match="expected the name of a model"):
        AdapterCache(folder).remove(name)


def test_the_command_line_needs_a_server_in_the_settings(tmp_path: Path) -> None:
    arguments = ["serve", "--data-dir", str(tmp_path), "--vllm-cache", str(tmp_path / "cache")]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code != 0
    assert "--vllm-cache: expected a vLLM server in the settings" in str(found.exception)
