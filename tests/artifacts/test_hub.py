"""Uploads: the folder that was written, to a private repository; without a token nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
from exported import save_adapter, save_base
from huggingface_hub import HfApi, RepoUrl

import alto
from alto.artifacts import winner
from alto.errors import HubError, SpecError

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return save_adapter(save_base(tmp_path / "base"), tmp_path / "mine")


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The client of the hub, with the signatures of the real one, logged in as ``ann``."""
    found = create_autospec(HfApi, instance=True)
    found.create_repo.return_value = RepoUrl("https://huggingface.co/ann/mine")
    monkeypatch.setattr(winner, "HfApi", lambda: found)
    monkeypatch.setattr(winner, "get_token", lambda: "hf_token")
    return found


def test_the_finished_folder_is_uploaded_to_a_private_repository(adapter: Path, api: Any, tmp_path: Path) -> None:
    uploaded: list[list[str]] = []

    def upload(**given: Any) -> None:
        uploaded.append(sorted(map(str, Path(given["folder_path"]).iterdir())))

    api.upload_folder.side_effect = upload
    result = alto.Engine().export(adapter, tmp_path / "out", push_to_hub="ann/mine")
    assert result.url == "https://huggingface.co/ann/mine"
    assert uploaded == [[str(tmp_path / "out" / name) for name in result.files]]
    api.create_repo.assert_called_once_with("ann/mine", private=True, exist_ok=True)
    assert api.upload_folder.call_args.kwargs["repo_id"] == "ann/mine"


def test_without_a_token_nothing_is_written(
    adapter: Path, api: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winner, "get_token", lambda: None)
    with pytest.raises(HubError, match="a token of the Hugging Face hub, found none; log in with: hf auth login"):
        alto.Engine().export(adapter, tmp_path / "out", push_to_hub="ann/mine")
    assert not (tmp_path / "out").exists()
    assert not api.method_calls


def test_a_token_that_the_hub_does_not_accept_is_found_before_anything_is_written(
    adapter: Path, api: Any, tmp_path: Path
) -> None:
    api.whoami.side_effect = OSError("401 Unauthorized")
    with pytest.raises(HubError, match="expected a hub that accepts the token, found: 401 Unauthorized"):
        alto.Engine().export(adapter, tmp_path / "out", push_to_hub="ann/mine")
    assert not (tmp_path / "out").exists()
    with pytest.raises(SpecError, match="expected a repository such as name or owner/name, found 'a/b/c'"):
        alto.Engine().export(adapter, tmp_path / "out", push_to_hub="a/b/c")


def test_a_folder_that_cannot_be_uploaded_stays(adapter: Path, api: Any, tmp_path: Path) -> None:
    api.upload_folder.side_effect = OSError("connection lost")
    with pytest.raises(HubError, match=r"found: connection lost; the folder is complete: .*hf upload ann/mine"):
        alto.Engine().export(adapter, tmp_path / "out", push_to_hub="ann/mine")
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
