"""Text files of downloaded models, in which the name that requests use replaces a local path of the base model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from alto.service.context import Service
from alto.service.store.tables import ModelRow

__all__ = ["texts_without_paths"]

_CONFIG = "adapter_config.json"
_TEXTS = frozenset({_CONFIG, "README.md", "config.json"})


def texts_without_paths(service: Service, model: ModelRow, folder: str, names: Iterable[str]) -> dict[str, bytes]:
    """Return contents by name that replace the stored files which contain paths of this machine.

    The stored files stay unchanged, because merged weights and vLLM need these paths.

    Args:
        model: The model that the files belong to.
        folder: Artefact folder of the files.
        names: Names of the files, relative to ``folder``.
    """
    with service.artefacts.open(f"{model.adapter}/{_CONFIG}") as file:
        named = json.load(file).get("base_model_name_or_path") or ""
    found = {named, service.settings.models.get(model.base_model, "")}
    paths = sorted((text for text in found if _is_path(text)), key=len, reverse=True)
    texts: dict[str, bytes] = {}
    for name in _TEXTS.intersection(names) if paths else ():
        with service.artefacts.open(f"{folder}/{name}") as file:
            text = file.read().decode()
        for path in paths:
            # As written in plain text, and as escaped in JSON.
            for form in (path, json.dumps(path)[1:-1]):
                text = text.replace(form, model.base_model)
        texts[name] = text.encode()
    return texts


def _is_path(text: str) -> bool:
    """Return whether ``text`` is a folder, and neither a shipped name nor a hub id."""
    return "/" in text and (text.startswith(("/", "~", ".")) or Path(text).is_dir())
