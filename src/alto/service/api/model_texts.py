"""Texts of downloaded models: they name the base model as requests do, where the service has it in a folder."""

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
    """Contents by name, in place of those that are kept, which have paths of this machine.

    What is kept stays as it is: merged weights and vLLM need these paths.

    Args:
        service: The service.
        model: Whose files they are.
        folder: Of these files, among the artefacts.
        names: Of the files.
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
            # As it stands in texts, and in JSON.
            for form in (path, json.dumps(path)[1:-1]):
                text = text.replace(form, model.base_model)
        texts[name] = text.encode()
    return texts


def _is_path(text: str) -> bool:
    """Whether it is a folder, and neither a shipped name nor an id of the hub."""
    return "/" in text and (text.startswith(("/", "~", ".")) or Path(text).is_dir())
