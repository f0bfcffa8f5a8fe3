"""Fingerprints of base models: equal for the same model, different for others."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from alto.backbone import base_differences, base_fingerprint, fingerprint, resolve_model
from alto.errors import ModelError, ModelNotFoundError
from alto.spec import BaseModelSpec

ASSET = Path(resolve_model("alto-tiny"))
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(ASSET, tmp_path / "base")


def differences(folder: Path) -> list[str]:
    return base_differences(
        base_fingerprint(BaseModelSpec(id="alto-tiny")), base_fingerprint(BaseModelSpec(id=str(folder)))
    )


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_copy_written_at_another_time_is_the_same_model(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    edit_config(folder, transformers_version="9.9", _name_or_path="elsewhere")
    found = base_fingerprint(BaseModelSpec(id=str(folder)))
    assert base_differences(base_fingerprint(BaseModelSpec(id="alto-tiny")), found) == []
    assert found["files"][WEIGHTS] == [(folder / WEIGHTS).stat().st_size, 10**18]
    assert json.loads(json.dumps(found)) == found


def test_the_same_weights_in_other_files_are_the_same_model(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(weights)}
    for file in set(names.values()):
        save_file({name: weights[name] for name in weights if names[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "left_over.safetensors").write_bytes(b"read by nobody")
    assert differences(folder) == []


@pytest.mark.parametrize("name", [0, 7, -1])
def test_other_numbers_in_any_tensor_are_another_model(name: int, folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    weights[sorted(weights)[name]].view(-1)[0] += 1
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    assert differences(folder) == ["other weights"]


def test_tensors_of_another_shape_are_reported_with_their_files(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    name = sorted(weights)[0]
    weights[name] = torch.cat([weights[name], weights[name]])
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (message,) = differences(folder)
    assert message.startswith(f"other weights: {WEIGHTS} (")
    edit_config(folder, vocab_size=1)
    assert differences(folder)[1:] == ["a different config.json"]


@pytest.mark.parametrize("config", ["config.json", "tokenizer_config.json"])
def test_other_code_is_another_model_where_code_is_run(config: str, folder: Path) -> None:
    path = folder / config
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoModelForCausalLM": "modeling.Own"}}))
    found = []
    for text in ("a = 1", "a = 2"):
        (folder / "modeling.py").write_text(text)
        found.append(
            [base_fingerprint(BaseModelSpec(id=str(folder), trust_remote_code=trusts)) for trusts in (True, False)]
        )
    (trusted, untrusted), (trusted_other, untrusted_other) = found
    assert base_differences(trusted, trusted_other) == ["different Python code next to its config.json"]
    assert base_differences(untrusted, untrusted_other) == []
    assert base_differences(trusted, untrusted) == ["different Python code next to its config.json"]


def test_unused_code_changes_no_model(folder: Path) -> None:
    (folder / "train.py").write_text("import alto")
    assert (
        base_differences(
            base_fingerprint(BaseModelSpec(id="alto-tiny")),
            base_fingerprint(BaseModelSpec(id=str(folder), trust_remote_code=True)),
        )
        == []
    )


def test_a_large_tensor_is_read_in_windows_from_end_to_end(tmp_path: Path, folder: Path) -> None:
    large = torch.zeros(fingerprint.WHOLE_BYTES, dtype=torch.float32)
    for changed, is_seen in ((None, False), (0, True), (-1, True), (len(large) // 2, False)):
        numbers = large.clone()
        if changed is not None:
            numbers[changed] = 1.0
        save_file({"a": large}, folder / WEIGHTS)
        before = base_fingerprint(BaseModelSpec(id=str(folder)))
        save_file({"a": numbers}, folder / WEIGHTS)
        assert bool(base_differences(before, base_fingerprint(BaseModelSpec(id=str(folder))))) is is_seen
    num_read = sum(size for _, size in fingerprint._windows(large.nbytes))
    assert num_read == fingerprint.NUM_WINDOWS * fingerprint.WINDOW_BYTES < large.nbytes / 10


def test_pickle_files_are_compared_by_their_checksums(tiny_model: Callable[..., PreTrainedModel], folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    weights = {"a": torch.zeros(1000), "b": torch.ones(10)}
    torch.save(weights, folder / "pytorch_model.bin")
    before = base_fingerprint(BaseModelSpec(id=str(folder), use_safetensors=False))
    torch.save(weights, folder / "pytorch_model.bin")
    assert base_differences(before, base_fingerprint(BaseModelSpec(id=str(folder), use_safetensors=False))) == []
    weights["a"][500] = 1e-3
    torch.save(weights, folder / "pytorch_model.bin")
    found = base_fingerprint(BaseModelSpec(id=str(folder), use_safetensors=False))
    assert base_differences(before, found) == ["other weights"]


def test_a_revision_of_the_hub_with_the_same_files_is_the_same_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = tmp_path / "models--org--name" / "snapshots"
    found = {}
    for commit in ("aaa", "bbb", "ccc"):
        shutil.copytree(folder, snapshots / commit)
        if commit == "ccc":
            edit_config(snapshots / commit, rope_theta=5.0)
        config = str(snapshots / commit / "config.json")
        monkeypatch.setattr(fingerprint, "cached_file", lambda model, name, config=config, **_: config)
        found[commit] = base_fingerprint(BaseModelSpec(id="org/name"))
    assert found["aaa"]["commit"] == "aaa"
    assert base_differences(found["aaa"], found["bbb"]) == []
    assert base_differences(found["aaa"], found["ccc"]) == ["a different config.json", "revision ccc instead of aaa"]


def test_a_revision_that_is_downloaded_further_is_the_same_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = shutil.copytree(folder, tmp_path / "models--org--name" / "snapshots" / "aaa")
    edit_config(snapshot, auto_map={"AutoModelForCausalLM": "modeling.Own"})
    monkeypatch.setattr(fingerprint, "cached_file", lambda model, name, **_: str(snapshot / "config.json"))
    before = base_fingerprint(BaseModelSpec(id="org/name", trust_remote_code=True))
    (snapshot / "modeling.py").write_text("pass")
    assert base_differences(before, base_fingerprint(BaseModelSpec(id="org/name", trust_remote_code=True))) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ends after 0 bytes, within its header"),
        (b"\x10\0\0", "ends after 3 bytes, within its header"),
        (b"\xff" * 16, "ends after 16 bytes, within its header"),
        (b"\x02\0\0\0\0\0\0\0[]", "something else"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a pointer of Git LFS"),
        (None, "within model"),
    ],
)
def test_damaged_weights_are_an_error(content: bytes | None, message: str, folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1] if content is None else content)
    with pytest.raises(ModelError, match=message):
        base_fingerprint(BaseModelSpec(id=str(folder)))


def test_a_damaged_archive_is_an_error(folder: Path) -> None:
    path = folder / "pytorch_model.bin"
    torch.save({"a": torch.zeros(1000)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-60] + b"\xff" * 10 + whole[-50:])
    with pytest.raises(ModelError, match="something else"):
        base_fingerprint(BaseModelSpec(id=str(folder), use_safetensors=False))


def test_unreadable_files_are_an_error(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    with pytest.raises(ModelError, match="the files that it was loaded from"):
        base_fingerprint(BaseModelSpec(id=str(folder)))
    (folder / "config.json").unlink()
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelNotFoundError):
        base_fingerprint(BaseModelSpec(id=str(folder)))
