"""Requests to models, forwarded to a vLLM server: by the real client, through a real server."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy", reason="needs the extra 'service'")

import openai
from fake_vllm import BASE, KEY, PIECES, FakeVllm, fake_vllm
from served_models import add_model, key_of, row_of
from services import Served, served, wait_for

from alto.service.settings import VllmSettings
from alto.service.vllm import Registrar

_MESSAGES: Any = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    with fake_vllm() as found:
        found.headers["X-Secret"] = "of the upstream"
        yield found


@pytest.fixture
def service(tmp_path: Path, vllm: FakeVllm) -> Iterator[Served]:
    settings = VllmSettings(url=vllm.url, api_key=KEY, base_model=BASE, timeout_s=3600)  # longer than any test waits
    with served(tmp_path, models={"base": BASE, "other": "other-base"}, vllm=settings) as found:
        yield found


@pytest.fixture
def impatient(tmp_path: Path, vllm: FakeVllm) -> Iterator[Served]:
    """A service that waits for a fifth of a second."""
    settings = VllmSettings(url=vllm.url, api_key=KEY, base_model=BASE, timeout_s=0.2)
    with served(tmp_path, models={"base": BASE}, vllm=settings) as found:
        yield found


def ready_model(service: Served, job: str, **own: Any) -> str:
    name = add_model(service.service, job, **own)
    Registrar(service.service).turn()
    assert row_of(service.service, name).serving == "ready"
    return name


def last_completion(vllm: FakeVllm) -> tuple[Any, dict[str, str]]:
    """Return body and headers of the newest request for a completion."""
    return next((body, headers) for _, path, body, headers in reversed(vllm.requests) if path.endswith("completions"))


def post(service: Served, path: str, content: bytes, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    request = urllib.request.Request(
        f"{service.url}{path}", content, {"Content-Type": "application/json", **headers}, method="POST"
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), dict(error.headers)


def test_models_and_their_names_answer(service: Served, vllm: FakeVllm) -> None:
    client = service.client("a key of the caller", organization="the caller's")
    name = ready_model(service, "a", suffix="sums")
    for asked, answers in ((name, name), ("ft:base:default:sums", name), ("base", BASE)):
        found = client.chat.completions.create(model=asked, messages=_MESSAGES, temperature=0.5)
        assert (found.choices[0].message.content, found.model) == (f"I am {answers}", answers)
        body, headers = last_completion(vllm)
        assert body == {"model": answers, "messages": _MESSAGES, "temperature": 0.5}
        assert headers["authorization"] == f"Bearer {KEY}"
        assert "caller" not in json.dumps(headers)
        assert client.completions.create(model=asked, prompt="Who?").choices[0].text == f"I am {answers}"


def test_the_address_may_have_a_path(tmp_path: Path, vllm: FakeVllm) -> None:
    settings = VllmSettings(url=f"{vllm.url}/v1/", api_key=KEY, base_model=BASE)
    with served(tmp_path, models={"base": BASE}, vllm=settings) as service:
        service.client().completions.create(model="base", prompt="Who?")
    assert vllm.paths() == ["/v1/completions"]


def test_a_stream_comes_as_it_is(service: Served, vllm: FakeVllm) -> None:
    stream = service.client().chat.completions.create(model="base", messages=_MESSAGES, stream=True)
    assert [chunk.choices[0].delta.content for chunk in stream] == ["one", "two"]
    body = json.dumps({"model": "base", "messages": _MESSAGES, "stream": True}).encode()
    status, content, headers = post(service, "/v1/chat/completions", body)
    assert (status, content) == (200, b"".join(PIECES))
    assert headers["content-type"].startswith("text/event-stream")
    assert "X-Secret" not in headers


def test_headers_of_the_server_stay_there(service: Served) -> None:
    body = json.dumps({"model": "base", "messages": _MESSAGES}).encode()
    status, _, headers = post(service, "/v1/chat/completions", body)
    assert (status, headers["content-type"], "X-Secret" in headers) == (200, "application/json", False)


def test_a_model_of_another_tenant_is_not_there(service: Served, vllm: FakeVllm) -> None:
    name = ready_model(service, "a", tenant="alpha", suffix="sums")
    alpha, beta = (service.client(key_of(service.service, tenant)) for tenant in ("alpha", "beta"))
    assert alpha.chat.completions.create(model=name, messages=_MESSAGES).model == name
    num_requests = len(vllm.requests)
    for requests in (name, "ft:base:alpha:sums", "ft:base:alpha:none"):
        with pytest.raises(openai.NotFoundError) as caught:
            beta.chat.completions.create(model=requests, messages=_MESSAGES)
        assert caught.value.code == "model_not_found"
    assert len(vllm.requests) == num_requests
    reader = service.client(key_of(service.service, "alpha", "read", "write"))
    with pytest.raises(openai.PermissionDeniedError):
        reader.chat.completions.create(model=name, messages=_MESSAGES)


def test_a_model_that_is_not_ready_says_what_to_do(service: Served, vllm: FakeVllm) -> None:
    name = add_model(service.service, "a")
    client = service.client()
    vllm.fails_probe.add(name)
    for words in ("not registered", "CUDA error"):
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            client.chat.completions.create(model=name, messages=_MESSAGES)
        assert caught.value.code == "model_not_ready"
        assert f"/api/models/{name}" in caught.value.message
        Registrar(service.service).turn()
    with pytest.raises(openai.BadRequestError, match="tiny-base") as caught:
        client.chat.completions.create(model="other", messages=_MESSAGES)
    assert caught.value.code == "model_not_ready"


def test_an_adapter_that_the_server_has_lost_is_not_ready(service: Served, vllm: FakeVllm) -> None:
    name = ready_model(service, "a")
    vllm.restart()
    with pytest.raises(openai.BadRequestError, match="registered again") as caught:
        service.client().chat.completions.create(model=name, messages=_MESSAGES)
    assert caught.value.code == "model_not_ready"


def test_without_a_server_the_error_says_how_to_serve_by_hand(tmp_path: Path) -> None:
    with served(tmp_path, models={"base": BASE, "local": str(tmp_path)}) as service:
        name = add_model(service.service, "a")
        with pytest.raises(openai.BadRequestError) as caught:
            service.client().chat.completions.create(model=name, messages=_MESSAGES)
        assert caught.value.code == "no_serving"
        assert f"/api/models/{name}/adapter" in caught.value.message
        command = f"vllm serve {BASE} --enable-lora --max-lora-rank 32 --lora-modules {name}=adapter"
        assert command in caught.value.message
        with pytest.raises(openai.BadRequestError, match="vllm serve tiny-base"):
            service.client().completions.create(model="base", prompt="Who?")
        with pytest.raises(openai.BadRequestError, match="vllm serve local"):  # clients see no folders of the service
            service.client().completions.create(model="local", prompt="Who?")
        with pytest.raises(openai.NotFoundError):
            service.client().completions.create(model="ft:base:default::none", prompt="Who?")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_server_that_hangs_is_a_bad_gateway(impatient: Served, vllm: FakeVllm, path: str) -> None:
    vllm.hangs.add(path)
    status, content, headers = post(impatient, path, b'{"model": "base"}')
    assert (status, json.loads(content)["error"]["code"]) == (502, "upstream_timeout")
    assert headers["x-should-retry"] == "false"


def test_a_server_that_is_gone_is_a_bad_gateway(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nobody listens there
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with served(tmp_path, models={"base": BASE}, vllm=VllmSettings(url=url, base_model=BASE)) as service:
            with pytest.raises(openai.InternalServerError) as caught:
                service.client().chat.completions.create(model="base", messages=_MESSAGES)
            assert (caught.value.status_code, caught.value.code) == (502, "upstream_error")


@pytest.mark.parametrize("answer", [(500, {"error": {"message": "at 10.0.0.7"}}), (401, {}), (403, {}), (418, {})])
def test_other_errors_of_the_server_are_bad_gateways_without_its_words(
    service: Served, vllm: FakeVllm, answer: tuple[int, object]
) -> None:
    vllm.answer = answer
    with pytest.raises(openai.InternalServerError) as caught:
        service.client().chat.completions.create(model="base", messages=_MESSAGES)
    assert (caught.value.status_code, caught.value.code) == (502, "upstream_error")
    assert "10.0.0.7" not in caught.value.message


def test_errors_of_the_server_are_passed_on_unchanged(service: Served, vllm: FakeVllm) -> None:
    vllm.answer = (400, {"error": {"message": "max_tokens is too large"}})
    with pytest.raises(openai.BadRequestError, match="max_tokens is too large"):
        service.client().chat.completions.create(model="base", messages=_MESSAGES)


def test_a_redirect_is_refused(service: Served, vllm: FakeVllm) -> None:
    with fake_vllm() as elsewhere:
        vllm.redirects_to = f"{elsewhere.url}/v1/chat/completions"
        with pytest.raises(openai.InternalServerError) as caught:
            service.client().chat.completions.create(model="base", messages=_MESSAGES)
        assert caught.value.status_code == 502
        name = add_model(service.service, "a")
        Registrar(service.service).turn()
        assert (elsewhere.requests, row_of(service.service, name).serving) == ([], "none")


def test_a_stream_that_breaks_ends_with_an_error(service: Served, vllm: FakeVllm) -> None:
    vllm.breaks_streams = True
    stream = service.client().chat.completions.create(model="base", messages=_MESSAGES, stream=True)
    assert next(stream).choices[0].delta.content == "one"
    with pytest.raises(openai.APIError, match="failed before the answer was complete"):
        next(stream)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"model": 1}', b"{" * 10_000, b'{"messages": []}'])
def test_a_body_that_names_no_model_is_refused(service: Served, vllm: FakeVllm, content: bytes) -> None:
    status, answer, _ = post(service, "/v1/chat/completions", content)
    assert (status, json.loads(answer)["error"]["type"]) == (400, "invalid_request_error")
    assert vllm.requests == []


def test_the_connection_to_the_server_ends_with_that_of_the_caller(service: Served, vllm: FakeVllm) -> None:
    vllm.hangs.add("/v1/chat/completions")
    body = json.dumps({"model": "base", "messages": _MESSAGES}).encode()
    address = service.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as caller:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        caller.sendall(head.encode() + body)
        wait_for(lambda: "/v1/chat/completions" in vllm.paths())
    wait_for(lambda: vllm.num_gone == 1)
