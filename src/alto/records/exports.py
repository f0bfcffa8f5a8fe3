"""What an export wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["ExportForm", "ExportResult", "ForeignTool", "GgufType"]

ExportForm: TypeAlias = Literal["adapter", "per_expert", "merged", "gguf", "config"]
"""An adapter in PEFT's format; one with every expert's matrices by themselves; a model with the adapter merged, in
safetensors, or in one GGUF file; the configuration of another trainer."""

GgufType: TypeAlias = Literal["f16", "q8_0"]
"""Type of the matrices in a GGUF file."""

ForeignTool: TypeAlias = Literal["trl", "axolotl", "llamafactory"]
"""Trainers whose configurations are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """A folder that :meth:`alto.Engine.export` wrote.

    Attributes:
        form: What it holds.
        folder: Its path.
        files: Names of its files, sorted.
        command: The command that serves it, or trains it again; empty where ``notes`` say why there is none.
        difference: Of a merged model: between its logits and those of the adapter on its base, of a few tokens in
            float32, relative, in norm; None of the others.
        notes: Notices, as sentences.
        url: Of its repository on the hub; empty where it was not pushed.
    """

    form: ExportForm
    folder: str
    files: tuple[str, ...]
    command: str = ""
    difference: float | None = None
    notes: tuple[str, ...] = ()
    url: str = ""
