"""The base model that a process keeps: the one on disk, or none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from alto.backbone import Backbone, resolve_model
from alto.engine.resident_base import ResidentBase
from alto.errors import RunBusyError
from alto.executor import Ranks
from alto.spec import BaseModelSpec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(resolve_model("alto-tiny"), tmp_path / "base")


@pytest.fixture
def load(folder: Path) -> Callable[[ResidentBase], Backbone]:
    def load(base: ResidentBase) -> Backbone:
        return base.load(BaseModelSpec(id=str(folder)), torch.device("cpu"), Ranks(), gradient_checkpointing=False)

    return load


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}), encoding="utf-8")


def test_it_is_loaded_once(load: Callable[[ResidentBase], Backbone]) -> None:
    base = ResidentBase()
    assert load(base) is load(base)


def test_a_chat_template_that_has_changed_is_read(folder: Path, load: Callable[[ResidentBase], Backbone]) -> None:
    base = ResidentBase()
    before = load(base)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit(folder / "tokenizer_config.json", chat_template="{{ messages }} as changed")
    with base.used(), pytest.raises(RunBusyError, match="a different id, different settings or different files"):
        load(base)
    found = load(base)
    assert found is not before
    assert found.tokenizer.chat_template == "{{ messages }} as changed"


@pytest.mark.parametrize("what", ["config", "weights"])
def test_a_model_that_has_changed_is_loaded(what: str, folder: Path, load: Callable[[ResidentBase], Backbone]) -> None:
    base = ResidentBase()
    before = load(base)
    if what == "config":
        edit(folder / "config.json", rms_norm_eps=0.1)
    else:
        weights = {name: tensor + 0.5 for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert load(base) is not before


def test_a_model_is_loaded_again_to_recompute_activations(
    folder: Path, load: Callable[[ResidentBase], Backbone]
) -> None:
    base = ResidentBase()
    before = load(base)
    assert not before.is_checkpointed
    assert base.load(
        BaseModelSpec(id=str(folder)), torch.device("cpu"), Ranks(), gradient_checkpointing=True
    ).is_checkpointed
    assert not load(base).is_checkpointed
