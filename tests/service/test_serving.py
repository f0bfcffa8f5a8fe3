"""Registration of fine-tuned models with a vLLM server: probes, names that move, restarts, and deleted models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="needs the extra 'service'")

from fake_vllm import BASE, KEY, FakeVllm, fake_vllm
from fastapi.testclient import TestClient
from served_models import add_model, row_of
from services import wait_for

from alto.errors import SpecError
from alto.service.context import Service
from alto.service.files import Artefacts
from alto.service.serve import create_app, opened_service
from alto.service.settings import ServiceSettings, VllmSettings
from alto.service.store.jobs import events_of
from alto.service.vllm import Registrar, registering

_INTERVAL_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    with fake_vllm() as found:
        yield found


def settings_of(root: Path, server: FakeVllm, **own: object) -> ServiceSettings:
    return ServiceSettings(
        **{
            "data_dir": str(root),
            "models": {"base": BASE, "other": "other-base"},
            "vllm": VllmSettings(
                url=server.url, api_key=KEY, base_model=BASE, probe_interval_s=_INTERVAL_S, timeout_s=3600
            ),
            **own,
        }
    )


@pytest.fixture
def service(tmp_path: Path, vllm: FakeVllm) -> Iterator[Service]:
    with opened_service(settings_of(tmp_path, vllm)) as found:
        yield found


@dataclass
class Turns:
    """A registrar whose turns tests take."""

    registrar: Registrar
    clock: Clock

    def after(self, seconds: float = 0.0) -> None:
        self.clock.now_s += seconds
        self.registrar.turn()


@pytest.fixture
def turns(service: Service) -> Turns:
    clock = Clock()
    return Turns(Registrar(service, clock), clock)


@pytest.fixture
def names(service: Service) -> Callable[[], list[str]]:
    """A function that returns the ids of the models listed to clients."""
    app = TestClient(create_app(service), base_url="http://localhost")
    return lambda: [model["id"] for model in app.get("/v1/models").json()["data"]]


def delete(service: Service, model: str) -> None:
    answer = TestClient(create_app(service), base_url="http://localhost").delete(f"/v1/models/{model}")
    assert answer.status_code == 200, answer.text


def test_a_new_model_is_loaded_from_its_folder_and_ready_after_a_token(
    service: Service, vllm: FakeVllm, turns: Turns
) -> None:
    name = add_model(service, "a")
    turns.after()
    assert row_of(service, name).serving == "ready"
    assert vllm.adapters == {name: str(service.settings.root / "artefacts/models/default/ftjob-a")}
    probes = [body for _, path, body, _ in vllm.requests if path == "/v1/chat/completions"]
    assert [(probe["model"], probe["max_tokens"]) for probe in probes] == [(name, 1)]
    assert vllm.paths().index("/v1/load_lora_adapter") < vllm.paths().index("/v1/chat/completions")


def test_an_adapter_that_vllm_cannot_serve_is_not_sent_to_it_and_the_merged_weights_are_named(
    service: Service, vllm: FakeVllm, turns: Turns
) -> None:
    name = add_model(service, "a", use_dora=True, modules_to_save=["lm_head"])
    other = add_model(service, "b", bias="none", rank_pattern={"q_proj": 4}, alpha_pattern={"q_proj": 2})
    turns.after()
    row = row_of(service, name)
    assert row.serving == "failed"
    assert row.serving_details is not None
    assert "found one with use_dora and modules_to_save" in row.serving_details
    assert f"POST /api/models/{name}/merged" in row.serving_details
    assert list(vllm.adapters) == [other]
    assert row_of(service, other).serving == "ready"


def test_adapters_in_another_store_are_fetched_to_this_machine(
    tmp_path: Path, service: Service, vllm: FakeVllm
) -> None:
    remote = replace(service, artefacts=Artefacts(f"memory://{tmp_path.name}"))
    name = add_model(remote, "a")
    clock = Clock()
    turns = Turns(Registrar(remote, clock), clock)
    turns.after()
    folder = tmp_path / "serving" / "ftjob-a"
    assert vllm.adapters == {name: str(folder)}
    assert (folder / "adapter_model.safetensors").read_bytes() == b"a" * 1000
    delete(remote, name)
    turns.after()
    assert not folder.exists()


def test_a_turn_without_changes_sends_no_request_before_the_next_probe_is_due(
    service: Service, vllm: FakeVllm, turns: Turns
) -> None:
    add_model(service, "a")
    turns.after()
    before = len(vllm.requests)
    turns.after(_INTERVAL_S - 1)
    assert len(vllm.requests) == before
    turns.after(1)
    assert vllm.paths()[before:] == ["/v1/models"]


def test_a_model_without_a_chat_template_is_probed_by_a_continuation(
    service: Service, vllm: FakeVllm, turns: Turns
) -> None:
    name = add_model(service, "a")
    vllm.answer = (400, {"error": {"message": "no chat template"}})
    turns.after()
    assert row_of(service, name).serving == "failed"
    assert vllm.paths()[-3:] == ["/v1/chat/completions", "/v1/completions", "/v1/unload_lora_adapter"]


@pytest.mark.parametrize("answer", [(200, {"choices": []}), (200, "fine"), (404, {})])
def test_an_answer_without_a_token_is_no_proof(
    service: Service, vllm: FakeVllm, turns: Turns, answer: tuple[int, object]
) -> None:
    name = add_model(service, "a")
    vllm.answer = answer
    turns.after()
    assert row_of(service, name).serving == "failed"
    assert name not in vllm.adapters


def test_a_model_that_fails_its_probe_is_unloaded_and_tried_again_later(
    service: Service, vllm: FakeVllm, turns: Turns
) -> None:
    name = add_model(service, "a")
    vllm.fails_probe.add(name)
    turns.after()
    row = row_of(service, name)
    assert (row.serving, name in vllm.adapters) == ("failed", False)
    assert "CUDA error" in str(row.serving_details)
    vllm.fails_probe.clear()
    turns.after(_INTERVAL_S - 1)
    assert row_of(service, name).serving == "failed"
    turns.after(1)
    assert row_of(service, name).serving == "ready"
    assert row_of(service, name).serving_details is None


def test_pauses_between_attempts_grow(service: Service, vllm: FakeVllm, turns: Turns) -> None:
    name = add_model(service, "a")
    vllm.refuses_load.add(name)
    attempts = []
    for _ in range(16):
        turns.after()
        attempts.append(len(vllm.loads()))
        turns.clock.now_s += _INTERVAL_S
    assert attempts == [1, 2, 2, 3, 3, 3, 3, *[4] * 8, 5]


def test_the_reason_of_a_refused_adapter_shows_no_path_of_this_machine(
    service: Service, vllm: FakeVllm, turns: Turns
) -> None:
    name = add_model(service, "a")
    vllm.refuses_load.add(name)
    turns.after()
    details = str(row_of(service, name).serving_details)
    assert "max_lora_rank 16" in details
    assert str(service.settings.root) not in details


def test_an_adapter_that_is_gone_fails(service: Service, vllm: FakeVllm, turns: Turns) -> None:
    name = add_model(service, "a")
    service.artefacts.delete("models/default/ftjob-a")
    turns.after()
    assert row_of(service, name).serving == "failed"
    assert vllm.loads() == []


def test_a_name_moves_only_to_models_that_have_passed_their_probe(
    service: Service, vllm: FakeVllm, turns: Turns, names: Callable[[], list[str]]
) -> None:
    alias = "ft:base:default:sums"
    first = add_model(service, "a", suffix="sums")
    assert alias not in names()
    turns.after()
    app = TestClient(create_app(service), base_url="http://localhost")
    assert app.get(f"/v1/models/{alias}").json()["root"] == first
    second = add_model(service, "b", suffix="sums")
    vllm.fails_probe.add(second)
    turns.after()
    assert app.get(f"/v1/models/{alias}").json()["root"] == first
    vllm.fails_probe.clear()
    turns.after(_INTERVAL_S)
    assert app.get(f"/v1/models/{alias}").json()["root"] == second
    assert names() == ["base", "other", second, first, alias]
    with service.store.reading() as session:
        assert [event.message for event in events_of(session, "ftjob-b", since=1, limit=10)] == [
            f"Requests to {alias} are answered by {second} from now on"
        ]


def test_a_name_does_not_go_back_to_an_older_model_that_is_ready_later(
    service: Service, vllm: FakeVllm, turns: Turns, names: Callable[[], list[str]]
) -> None:
    first, second = add_model(service, "a", suffix="sums"), add_model(service, "b", suffix="sums")
    vllm.fails_probe.add(first)
    turns.after()
    vllm.fails_probe.clear()
    turns.after(_INTERVAL_S)
    assert {row_of(service, name).serving for name in (first, second)} == {"ready"}
    app = TestClient(create_app(service), base_url="http://localhost")
    assert app.get("/v1/models/ft:base:default:sums").json()["root"] == second


def test_names_are_of_one_tenant_base_and_suffix(
    service: Service, turns: Turns, names: Callable[[], list[str]]
) -> None:
    mine = add_model(service, "a", suffix="sums")
    add_model(service, "b", suffix="sums", tenant="other")
    other_suffix = add_model(service, "c", suffix="texts")
    without = add_model(service, "d")
    turns.after()
    aliases = ["ft:base:default:sums", "ft:base:default:texts"]
    assert names() == ["base", "other", without, other_suffix, mine, *aliases]
    app = TestClient(create_app(service), base_url="http://localhost")
    assert app.get(f"/v1/models/{aliases[0]}").json()["root"] == mine
    assert app.get("/v1/models/ft:base:other:sums").status_code == 404
    refused = app.delete(f"/v1/models/{aliases[0]}")
    assert (refused.status_code, mine in refused.text) == (400, True)


def test_a_deleted_model_is_unloaded_and_its_name_moves_to_the_one_before(
    service: Service, vllm: FakeVllm, turns: Turns, names: Callable[[], list[str]]
) -> None:
    first, second = add_model(service, "a", suffix="sums"), add_model(service, "b", suffix="sums")
    turns.after()
    delete(service, second)
    turns.after()
    assert (list(vllm.adapters), row_of(service, second).serving) == ([first], "none")
    assert names() == ["base", "other", first, "ft:base:default:sums"]
    delete(service, first)
    turns.after()
    assert (vllm.adapters, names()) == ({}, ["base", "other"])


def test_a_deleted_model_is_unloaded_once_the_server_is_back(service: Service, vllm: FakeVllm, turns: Turns) -> None:
    name = add_model(service, "a")
    turns.after()
    vllm.is_away = True
    delete(service, name)
    turns.after()
    assert (list(vllm.adapters), row_of(service, name).serving) == ([name], "ready")
    vllm.is_away = False
    turns.after(_INTERVAL_S)
    assert (vllm.adapters, row_of(service, name).serving) == ({}, "none")


def test_all_models_are_registered_again_after_a_restart(service: Service, vllm: FakeVllm, turns: Turns) -> None:
    first, second = add_model(service, "a", suffix="sums"), add_model(service, "b", suffix="sums")
    turns.after()
    assert vllm.loads() == [second, first]  # the newest first
    vllm.restart()
    vllm.adapters["of somebody else"] = "/elsewhere"
    turns.after(_INTERVAL_S)
    assert set(vllm.adapters) == {first, second, "of somebody else"}
    assert [row_of(service, name).serving for name in (first, second)] == ["ready", "ready"]
    app = TestClient(create_app(service), base_url="http://localhost")
    assert app.get("/v1/models/ft:base:default:sums").json()["root"] == second


def test_a_restart_lets_failed_models_be_tried_at_once(service: Service, vllm: FakeVllm, turns: Turns) -> None:
    good, bad = add_model(service, "a"), add_model(service, "b")
    vllm.refuses_load.add(bad)
    turns.after()
    turns.after(_INTERVAL_S)  # the next attempt is two intervals away
    vllm.refuses_load.clear()
    vllm.restart()
    turns.after(_INTERVAL_S)
    assert set(vllm.adapters) == {good, bad}


def test_a_server_that_is_away_changes_nothing_and_is_left_alone_for_a_while(
    service: Service, vllm: FakeVllm, turns: Turns
) -> None:
    name = add_model(service, "a")
    vllm.is_away = True
    turns.after()
    turns.after(_INTERVAL_S - 1)
    assert (len(vllm.requests), row_of(service, name).serving) == (1, "none")
    vllm.is_away = False
    turns.after(1)
    assert row_of(service, name).serving == "ready"


def test_one_adapter_that_the_server_stumbles_over_does_not_keep_others_waiting(
    service: Service, vllm: FakeVllm, turns: Turns
) -> None:
    good = add_model(service, "a")
    bad = add_model(service, "b")
    vllm.drops.add("/v1/load_lora_adapter")
    turns.after()
    row = row_of(service, bad)
    assert (row.serving, row_of(service, good).serving) == ("pending", "none")
    assert "failed before the answer was complete" in str(row.serving_details)
    turns.after(_INTERVAL_S)  # tries the same one again, and then waits longer
    vllm.drops.clear()
    turns.after(_INTERVAL_S)
    assert (row_of(service, bad).serving, row_of(service, good).serving) == ("pending", "ready")
    turns.after(_INTERVAL_S)
    assert row_of(service, bad).serving == "ready"


def test_models_of_another_base_are_left_out(service: Service, vllm: FakeVllm, turns: Turns) -> None:
    name = add_model(service, "a", base="other")
    turns.after()
    row = row_of(service, name)
    assert (row.serving, vllm.loads()) == ("none", [])
    assert "a different base model than other" in str(row.serving_details)
    before = len(vllm.requests)
    turns.after(1)
    assert len(vllm.requests) == before


def test_the_base_model_of_the_server(tmp_path: Path, vllm: FakeVllm) -> None:
    settings = settings_of(tmp_path, vllm)
    assert settings.is_served("base")
    assert not settings.is_served("other")
    assert settings_of(tmp_path, vllm, models={BASE: "elsewhere", "b": "c"}).is_served(BASE)
    assert settings_of(tmp_path, vllm, models={"alone": "elsewhere"}).is_served("alone")
    assert not settings_of(tmp_path, vllm, models={"alone": "elsewhere"}, hub_models=True).is_served("alone")
    assert not settings_of(tmp_path, vllm, vllm=None).is_served("base")


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:b@c", "http://a:port", "http://a/?q=1", "http://a b"])
def test_addresses_of_servers_are_checked(url: str) -> None:
    with pytest.raises(SpecError):
        VllmSettings(url=url, base_model=BASE)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://gpu-1.example/v1/", "http://[::1]:80"])
def test_addresses_of_servers_are_taken(url: str) -> None:
    assert VllmSettings(url=url, base_model=BASE).url == url


def test_without_a_server_nothing_is_done(tmp_path: Path, vllm: FakeVllm) -> None:
    with opened_service(settings_of(tmp_path, vllm, vllm=None)) as service:
        name = add_model(service, "a")
        Registrar(service).turn()
        with registering(service):
            pass
        assert (row_of(service, name).serving, vllm.requests) == ("none", [])


def test_the_thread_registers_and_ends_while_the_server_hangs(service: Service, vllm: FakeVllm) -> None:
    with registering(service):
        name = add_model(service, "a")
        wait_for(lambda: row_of(service, name).serving == "ready")
    registrar = Registrar(service)
    vllm.hangs.add("/v1/models")
    before = len(vllm.requests)
    registrar.start()
    wait_for(lambda: len(vllm.requests) > before)
    registrar.stop()
    assert not registrar._thread.is_alive()


def test_the_page_has_every_key_and_every_state() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    keys = {*VllmSettings.model_fields, "none", "pending", "ready", "failed"}
    assert {key for key in keys if f"\n| `{key}` |" not in page} == set()
