"""``/api/models``: serving state, adapters as zip files, merged weights and uploads to the hub."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from unittest.mock import create_autospec

import pytest

pytest.importorskip("sqlalchemy", reason="needs the extra 'service'")

from exported import save_base
from fake_vllm import BASE, KEY, fake_vllm
from fastapi.testclient import TestClient
from huggingface_hub import HfApi, RepoUrl
from peft_adapters import PLAIN, edit_config, save_with_peft
from served_models import add_model, key_of
from services import wait_for
from transformers import AutoModelForCausalLM

from alto.artifacts import winner
from alto.service.api import models
from alto.service.context import Service
from alto.service.serve import create_app, opened_service
from alto.service.settings import ServiceSettings, VllmSettings
from alto.service.store.jobs import events_of
from alto.service.store.tables import FileRow
from alto.service.vllm import Registrar

# PEFT reads a transformers property by its deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with opened_service(ServiceSettings(data_dir=str(tmp_path / "data"), models={"base": BASE})) as found:
        yield found


@pytest.fixture
def client(service: Service) -> TestClient:
    return TestClient(create_app(service), base_url="http://localhost")


def messages_of(service: Service, job: str) -> list[str]:
    with service.store.reading() as session:
        return [event.message for event in events_of(session, f"ftjob-{job}", since=1, limit=100)]


def put_adapter(service: Service, job: str, folder: Path) -> None:
    """Replace the files of a model by a real adapter, with its base model."""
    base = save_base(folder / "base")
    adapter = save_with_peft(AutoModelForCausalLM.from_pretrained(base), folder / "adapter", **PLAIN)
    edit_config(adapter, base_model_name_or_path=str(base))
    service.artefacts.write_folder(f"models/default/ftjob-{job}", adapter)


def test_models_say_whether_they_are_ready(tmp_path: Path) -> None:
    with fake_vllm() as vllm:
        settings = VllmSettings(url=vllm.url, api_key=KEY, base_model=BASE)
        with opened_service(ServiceSettings(data_dir=str(tmp_path), models={"base": BASE}, vllm=settings)) as service:
            first, second = add_model(service, "a", suffix="sums"), add_model(service, "b")
            vllm.fails_probe.add(second)
            client = TestClient(create_app(service), base_url="http://localhost")
            states = [(model["serving"], model["ready"]) for model in client.get("/api/models").json()["data"]]
            assert states == [("none", False)] * 2
            Registrar(service).turn()
            found = client.get("/api/models").json()["data"]
            assert [(model["id"], model["serving"], model["ready"]) for model in found] == [
                (second, "failed", False),
                (first, "ready", True),
            ]
            assert "CUDA error" in found[0]["serving_details"]
            assert found[1]["aliases"] == ["ft:base:default:sums"]
            by_alias = client.get("/api/models/ft:base:default:sums").json()
            assert {key: by_alias[key] for key in ("id", "job", "base_model", "merged")} == {
                "id": first,
                "job": "ftjob-a",
                "base_model": "base",
                "merged": "none",
            }


@pytest.mark.parametrize("has_server", [True, False])
def test_a_job_whose_adapter_vllm_could_not_serve_is_told_before_it_trains(has_server: bool, tmp_path: Path) -> None:
    vllm = VllmSettings(url="http://127.0.0.1:9", base_model="base") if has_server else None
    with opened_service(ServiceSettings(data_dir=str(tmp_path), models={"base": "alto-tiny"}, vllm=vllm)) as service:
        client = TestClient(create_app(service), base_url="http://localhost")
        row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
        rows = "\n".join([json.dumps(row)] * 12).encode()
        file = client.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", rows)}).json()["id"]
        told = {}
        for use_dora in ([True, False], False):
            body = {"model": "base", "training_file": file, "hyperparameters": {"use_dora": use_dora}}
            draft = client.post("/api/drafts?num_rows=0", json=body).json()
            job = client.post("/v1/fine_tuning/jobs", json=body).json()["id"]
            events = client.get(f"/v1/fine_tuning/jobs/{job}/events").json()["data"]
            told[str(use_dora)] = [each["message"] for each in events if each["level"] == "warn"]
            assert told[str(use_dora)] == draft["notes"]
        assert told["False"] == []
        assert len(told["[True, False]"]) == has_server
        assert all("cannot serve an adapter with use_dora" in message for message in told["[True, False]"])


def test_pages_of_models(service: Service, client: TestClient) -> None:
    models = [add_model(service, job) for job in "abc"]
    page = client.get("/api/models?limit=2").json()
    assert ([model["id"] for model in page["data"]], page["has_more"]) == (models[:0:-1], True)
    rest = client.get(f"/api/models?limit=2&after={models[1]}").json()
    assert ([model["id"] for model in rest["data"]], rest["has_more"]) == (models[:1], False)
    assert client.get("/api/models?after=nothing").status_code == 404


def test_an_adapter_comes_as_a_zip_file(service: Service, client: TestClient) -> None:
    name = add_model(service, "a")
    answer = client.get(f"/api/models/{name}/adapter")
    assert answer.headers["content-disposition"] == 'attachment; filename="ftjob-a.zip"'
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["adapter_config.json", "adapter_model.safetensors"]
        assert archive.read("adapter_model.safetensors") == b"a" * 1000


def test_the_card_of_a_model_of_the_hub_names_no_folder_of_the_service(service: Service, client: TestClient) -> None:
    name = add_model(service, "a", base_model_name_or_path="hub/base")
    rows = service.settings.root / "runs" / "default" / "ftjob-a" / "data" / "training.jsonl"
    card = 'base_model: "hub/base"\ntuned on `{}`\n```python\n```\n'
    service.artefacts.write("models/default/ftjob-a/README.md", io.BytesIO(card.format(rows).encode()))
    with zipfile.ZipFile(io.BytesIO(client.get(f"/api/models/{name}/adapter").content)) as archive:
        assert archive.read("README.md").decode() == card.format("training.jsonl")


def test_a_downloaded_adapter_names_its_base_as_requests_do(
    service: Service, client: TestClient, tmp_path: Path
) -> None:
    name, folder = add_model(service, "a"), "models/default/ftjob-a"
    put_adapter(service, "a", tmp_path)
    base = str(tmp_path / "base")
    rows = service.settings.root / "runs" / "default" / "ftjob-a" / "data" / "training.jsonl"
    header = f'base_model: {json.dumps(base)}\ntags:\n- "alto"\n- "base_model:adapter:{base}"\n'
    card = f"---\n{header}---\ntuned on `{rows}`\n\n```python\nfrom_pretrained({base!r})\n```\n"
    service.artefacts.write(f"{folder}/README.md", io.BytesIO(card.encode()))
    with service.store.writing() as session:
        session.add(
            FileRow(
                id="file-1",
                tenant="default",
                filename="support.jsonl",
                purpose="fine-tune",
                num_bytes=1,
                sha256="",
                created_at=1,
                status="processed",
            )
        )
    with zipfile.ZipFile(io.BytesIO(client.get(f"/api/models/{name}/adapter").content)) as archive:
        assert archive.testzip() is None
        assert json.loads(archive.read("adapter_config.json"))["base_model_name_or_path"] == "base"
        assert archive.read("README.md").decode() == (
            '---\ntags:\n- "alto"\n---\ntuned on `support.jsonl`\n\n'
            "`base` is the name of the base model in the service. In the code below and in `adapter_config.json`, "
            "replace it by the hub id or the folder of the same model.\n\n```python\nfrom_pretrained('base')\n```\n"
        )
        assert len(archive.read("adapter_model.safetensors")) > 1000
    with service.artefacts.open(f"{folder}/adapter_config.json") as kept:
        assert json.load(kept)["base_model_name_or_path"] == base, "the service still finds it"


@pytest.mark.parametrize("path", ["", "/adapter", "/merged"])
def test_models_of_other_tenants_are_not_there(service: Service, client: TestClient, path: str) -> None:
    name = add_model(service, "a", tenant="alpha")
    answers = [
        client.get(f"/api/models/{name}{path}", headers={"Authorization": f"Bearer {key_of(service, tenant)}"})
        for tenant in ("alpha", "beta")
    ]
    assert [answer.json()["error"]["code"] for answer in answers[1:]] == ["model_not_found"]
    assert path == "/merged" or answers[0].status_code == 200
    listed = client.get("/api/models", headers={"Authorization": f"Bearer {key_of(service, 'beta')}"})
    assert listed.json()["data"] == []


@pytest.mark.parametrize("path", ["merged", "push"])
def test_exports_need_a_key_that_may_write(service: Service, client: TestClient, path: str) -> None:
    name = add_model(service, "a", tenant="alpha")
    key = key_of(service, "alpha", "read", "chat")
    answer = client.post(
        f"/api/models/{name}/{path}", json={"repository": "a/b"}, headers={"Authorization": f"Bearer {key}"}
    )
    assert answer.json()["error"]["code"] == "insufficient_scope"


def test_merged_weights_are_written_and_come_as_a_zip_file(
    service: Service, client: TestClient, tmp_path: Path
) -> None:
    name = add_model(service, "a")
    put_adapter(service, "a", tmp_path)
    assert client.get(f"/api/models/{name}/merged").json()["error"]["code"] == "merged_not_found"
    answer = client.post(f"/api/models/{name}/merged")
    assert (answer.status_code, answer.json()["status"] in ("running", "ready")) == (202, True)
    wait_for(lambda: bool(messages_of(service, "a")))
    assert messages_of(service, "a") == [f"Merged weights of {name} can be downloaded: /api/models/{name}/merged"]
    with zipfile.ZipFile(io.BytesIO(client.get(f"/api/models/{name}/merged").content)) as archive:
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(archive.namelist())
        assert not {".complete"} & set(archive.namelist())
        assert json.loads(archive.read("config.json"))["architectures"] == ["LlamaForCausalLM"]
        assert str(tmp_path) not in archive.read("README.md").decode()
    assert client.post(f"/api/models/{name}/merged").json()["status"] == "ready"
    assert len(messages_of(service, "a")) == 1
    assert client.delete(f"/v1/models/{name}").status_code == 200
    assert service.artefacts.names("merged") == []
    assert not list((service.settings.root / "exports").iterdir())


def test_what_is_wrong_with_an_adapter_is_an_event_without_paths(service: Service, client: TestClient) -> None:
    name = add_model(service, "a")
    assert client.post(f"/api/models/{name}/merged").status_code == 202
    wait_for(lambda: bool(messages_of(service, "a")))
    (message,) = messages_of(service, "a")
    assert message.startswith("Expected merged weights to be written, found: ")
    assert str(service.settings.root) not in message
    assert client.get(f"/api/models/{name}/merged").status_code == 404


def test_the_hub_is_closed_unless_it_is_switched_on(service: Service, client: TestClient) -> None:
    answer = client.post(f"/api/models/{add_model(service, 'a')}/push", json={"repository": "org/name"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "hub_push_disabled")


@pytest.fixture
def pushing(tmp_path: Path) -> Iterator[Service]:
    settings = ServiceSettings(data_dir=str(tmp_path / "data"), models={"base": BASE}, hub_push=True)
    with opened_service(settings) as found:
        yield found


def test_an_adapter_is_uploaded_to_the_hub(pushing: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api = create_autospec(HfApi, instance=True)
    api.create_repo.return_value = RepoUrl("https://huggingface.co/org/name")
    sent: list[set[str]] = []
    api.upload_folder.side_effect = lambda **call: sent.append({path.name for path in call["folder_path"].iterdir()})
    monkeypatch.setattr(winner, "HfApi", lambda: api)
    monkeypatch.setattr(winner, "get_token", lambda: "token of the service")
    name = add_model(pushing, "a")
    put_adapter(pushing, "a", tmp_path)
    client = TestClient(create_app(pushing), base_url="http://localhost")
    answer = client.post(f"/api/models/{name}/push", json={"repository": "org/name"})
    assert (answer.status_code, answer.json()["repository"]) == (202, "org/name")
    wait_for(lambda: bool(messages_of(pushing, "a")))
    assert messages_of(pushing, "a") == [f"The adapter of {name} was uploaded to https://huggingface.co/org/name"]
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md"} <= sent[0]


def test_a_hub_that_refuses_is_an_event(pushing: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winner, "get_token", lambda: None)
    name = add_model(pushing, "a")
    client = TestClient(create_app(pushing), base_url="http://localhost")
    client.post(f"/api/models/{name}/push", json={"repository": "org/name"})
    wait_for(lambda: bool(messages_of(pushing, "a")))
    assert "expected a token of the Hugging Face hub, found none" in messages_of(pushing, "a")[0]


@pytest.mark.parametrize("repository", ["name", "a/b/c", "../b", "a/..", "", 1])
def test_repositories_have_an_owner_and_a_name(pushing: Service, repository: object) -> None:
    client = TestClient(create_app(pushing), base_url="http://localhost")
    answer = client.post(f"/api/models/{add_model(pushing, 'a')}/push", json={"repository": repository})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "repository")


def test_exports_wait_for_each_other_up_to_a_limit(
    service: Service, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, begun = Event(), Event()

    def export(*_: object, **__: object) -> None:
        begun.set()
        may_end.wait()

    monkeypatch.setattr(models.Engine, "export", export)
    first, *others = [add_model(service, f"j{number}") for number in range(18)]
    client.post(f"/api/models/{first}/merged")
    assert begun.wait(60)
    assert client.get(f"/api/models/{first}").json()["merged"] == "running"
    assert [client.post(f"/api/models/{name}/merged").status_code for name in others] == [202] * 16 + [429]
    assert client.post(f"/api/models/{others[0]}/merged").status_code == 202  # it waits already
    may_end.set()
    wait_for(lambda: bool(messages_of(service, "j16")))
