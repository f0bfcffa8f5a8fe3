"""Settings of a service that are misspelt."""

from __future__ import annotations

from pathlib import Path

import pytest

from alto.errors import UnknownKeyError
from alto.service.settings import load_settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prt: 1", "the settings file has the unknown key 'prt'. Did you mean 'port'?"),
        ("colour: red", "the settings file has the unknown key 'colour'. Known keys are artefacts, cluster, "),
        ("vllm: {urll: 'http://a', base_model: b}", "vllm has the unknown key 'urll'. Did you mean 'url'?"),
    ],
)
def test_an_unknown_key_is_answered_with_those_that_there_are(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(text)
    with pytest.raises(UnknownKeyError) as caught:
        load_settings(path, {})
    assert str(caught.value).startswith(message)


def test_settings_of_a_server_are_read(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text("port: 1\nvllm: {url: 'http://a', base_model: b}")
    found = load_settings(path, {"port": 2})
    assert (found.port, found.vllm and found.vllm.url) == (2, "http://a")
