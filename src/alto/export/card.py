"""The header of a model card, as the Hugging Face hub reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence

__all__ = ["adapter_tags", "card_header", "without_header"]

_LIMIT = "---\n"


def card_header(base_model: str, *, library: str, pipeline: str, tags: Sequence[str]) -> str:
    """The header of a card, with the keys that PEFT 0.21 and transformers write.

    Args:
        base_model: What ``from_pretrained`` takes; empty leaves the key out.
        library, pipeline: ``library_name`` and ``pipeline_tag``.
        tags: In any order.
    """
    lines = [f"base_model: {json.dumps(base_model)}"] if base_model else []
    lines += [f"library_name: {library}", f"pipeline_tag: {pipeline}", "tags:"]
    lines += [f"- {json.dumps(tag)}" for tag in sorted(tags)]
    return _LIMIT + "".join(f"{line}\n" for line in lines) + _LIMIT


def adapter_tags(base_model: str) -> list[str]:
    """The tags of an adapter: those of PEFT, the base model's among them where it has a name, and ALTO's."""
    return ["alto", "lora", "transformers", *([f"base_model:adapter:{base_model}"] if base_model else [])]


def without_header(card: str) -> str:
    """The text of a card behind its header, if it has one."""
    if not card.startswith(_LIMIT):
        return card
    _, found, text = card.removeprefix(_LIMIT).partition(f"\n{_LIMIT}")
    return text.lstrip("\n") if found else card
