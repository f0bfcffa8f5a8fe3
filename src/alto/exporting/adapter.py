"""Export of adapters without merging, with tokenizer, chat template and model card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from alto.backbone import load_config, load_tokenizer, loading_class
from alto.export.card import ModelUse
from alto.exporting.cards import adapter_card
from alto.exporting.winner import Winner
from alto.lora import is_read_per_expert, write_per_expert
from alto.records import ExportForm
from alto.spec.labels import LABELS_NAME
from alto.spec.outside import read_json

__all__ = ["is_stacked", "save_tokenizer", "write_adapter_folder"]

_FILES = ("adapter_config.json", "adapter_model.safetensors")
_KEPT = ("metrics.json", LABELS_NAME)
_CONFIG, _BASE = "adapter_config.json", "base_model_name_or_path"


def write_adapter_folder(winner: Winner, form: ExportForm, folder: Path) -> None:
    """Write the adapter of ``winner`` into ``folder``.

    Args:
        form: ``adapter``: a copy that names the base model as ``winner`` does; or ``per_expert``.
        folder: An existing folder.

    Raises:
        UnsupportedError: ``form`` is ``per_expert``, and the adapter cannot be, or need not be, written in this form.
        ModelError: The base model's configuration or tokenizer cannot be read.
    """
    source = winner.adapter.folder
    for name in _KEPT if form == "per_expert" else (*_FILES, *_KEPT):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if form == "per_expert":
        write_per_expert(winner.adapter, _model_type(winner), folder)
    config = read_json(folder / _CONFIG)
    if config.get(_BASE) != winner.base_model:
        text = json.dumps(config | {_BASE: winner.base_model}, indent=2)
        (folder / _CONFIG).write_text(f"{text}\n", encoding="utf-8")
    use = save_tokenizer(winner, folder)
    (folder / "README.md").write_text(adapter_card(winner, form, use), encoding="utf-8")


def save_tokenizer(winner: Winner, folder: Path) -> ModelUse:
    """Write the base model's tokenizer with the chat template that the adapter was trained with.

    Returns:
        Facts that decide how the adapter, or the merged model, is loaded and prompted.
    """
    tokenizer = load_tokenizer(winner.base)
    tokenizer.save_pretrained(folder)
    return ModelUse(
        model_class=loading_class(winner.base),
        has_template=bool(tokenizer.chat_template),
        labels=winner.labels,
        rows=winner.data,
        trust_remote_code=winner.base.trust_remote_code,
    )


def is_stacked(winner: Winner) -> bool:
    """Return whether the adapter has stacked experts that vLLM can read only as separate matrices."""
    return winner.adapter.has_experts and is_read_per_expert(winner.adapter, _model_type(winner))


def _model_type(winner: Winner) -> str:
    model_type: str = load_config(winner.base).get_text_config().model_type
    return model_type
