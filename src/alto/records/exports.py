"""The result of an export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["ExportForm", "ExportResult", "ForeignTool", "GgufType"]

ExportForm: TypeAlias = Literal["adapter", "per_expert", "merged", "gguf", "config"]
"""In this order: an adapter in PEFT's format; an adapter with separate matrices for every expert; a model with the
adapter merged, in safetensors, or in one GGUF file; the configuration of another trainer."""

GgufType: TypeAlias = Literal["f16", "q8_0"]
"""The data type of the matrices in a GGUF file."""

ForeignTool: TypeAlias = Literal["trl", "axolotl", "llamafactory"]
"""The trainers for which an export can write configurations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """A folder that :meth:`alto.Engine.export` wrote.

    Attributes:
        form: The content of the folder.
        folder: Path of the folder.
        files: Names of its files, sorted.
        command: The command that serves the result, or trains with the exported configuration; empty if ``notes`` say
            why there is none.
        difference: For a merged model, the relative difference in norm between its logits and those of the adapter on
            its base model, for a few tokens in float32; None for other forms.
        notes: Notices, as sentences.
        url: Address of the repository on the hub; empty if it was not pushed.
    """

    form: ExportForm
    folder: str
    files: tuple[str, ...]
    command: str = ""
    difference: float | None = None
    notes: tuple[str, ...] = ()
    url: str = ""
