"""Writes an export folder: an adapter, a merged model, a GGUF file, or the configuration of another trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from alto.errors import SpecError
from alto.exporting.adapter import is_stacked, save_tokenizer, write_adapter_folder
from alto.exporting.cards import gguf_card, merged_card
from alto.exporting.folder import check_free, new_folder
from alto.exporting.gguf_model import GgufModel, check_writable
from alto.exporting.hub import check_pushable, push
from alto.exporting.merge import check_mergeable, dtype_on_disk, merged_model
from alto.exporting.serving import adapter_command, gguf_command, model_command
from alto.exporting.tool_config import write_tool_config
from alto.exporting.winner import Winner
from alto.records import ExportForm, ExportResult, ForeignTool, GgufType

__all__ = ["ExportSettings", "check_before", "write_export"]

_CHOICES: Mapping[str, Any] = {"gguf": GgufType, "config": ForeignTool}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """Settings of an export; without any of the first four, the adapter is copied as it is.

    Attributes:
        merged: Write a model with the adapter merged, in safetensors.
        gguf: Write a model with the adapter merged, in one GGUF file with matrices of this type.
        per_expert: Write the adapter with separate matrices for every expert.
        config: Write a configuration of this trainer.
        push_to_hub: Repository on the hub to which the folder is uploaded.

    Raises:
        SpecError: More than one of the first four is set, or a value is unknown.
    """

    merged: bool = False
    gguf: GgufType | None = None
    per_expert: bool = False
    config: ForeignTool | None = None
    push_to_hub: str | None = None

    def __post_init__(self) -> None:
        for key, choice in _CHOICES.items():
            value, allowed = getattr(self, key), get_args(choice)
            if value is not None and value not in allowed:
                raise SpecError(f"{key}: expected one of {', '.join(allowed)}, found {value!r}; write one of these")
        chosen = [name for name in ("merged", "gguf", "per_expert", "config") if getattr(self, name)]
        if len(chosen) > 1:
            raise SpecError(
                f"export: expected one of merged, gguf, per_expert and config, found {' and '.join(chosen)}; write "
                "each into a separate folder"
            )

    @property
    def form(self) -> ExportForm:
        """The form of the exported files."""
        if self.merged:
            return "merged"
        if self.gguf is not None:
            return "gguf"
        if self.config is not None:
            return "config"
        return "per_expert" if self.per_expert else "adapter"


def check_before(folder: Path, settings: ExportSettings) -> None:
    """Check the folder, access to the hub, and the needed packages before an adapter is read.

    Raises:
        RunExistsError: ``folder`` has files.
        SpecError: ``push_to_hub`` is not a valid repository name.
        HubError: There is no token for the hub, or the hub does not accept it.
        UnsupportedError: A needed package is not installed.
    """
    check_free(folder)
    if settings.push_to_hub is not None:
        check_pushable(settings.push_to_hub)
    if settings.form in ("merged", "gguf"):
        check_mergeable()
    if settings.form == "gguf":
        check_writable()


def write_export(winner: Winner, folder: Path, settings: ExportSettings) -> ExportResult:
    """Write ``folder``, completely or not at all, and upload it if requested.

    Args:
        folder: An absolute path that :func:`check_before` accepts.

    Raises:
        RunExistsError: ``folder`` has files; nothing was done.
        RunWriteError: The disk is full or cannot be written; the incomplete folder was removed.
        HubError: The hub rejects the finished folder.
        UnsupportedError: The adapter or its base model cannot be exported in this form.
        ModelError: The base model cannot be used, or the logits of the merged model differ from those of the adapter.
        SpecError: A configuration of another trainer is requested, and the adapter does not come from a run.
    """
    write = {"merged": _write_merged, "gguf": _write_gguf, "config": _write_config}.get(settings.form, _write_adapter)
    result = write(winner, folder, settings)
    result = replace(result, files=tuple(sorted(path.name for path in folder.iterdir())))
    if settings.push_to_hub is None:
        return result
    return replace(result, url=push(folder, settings.push_to_hub))


def _write_adapter(winner: Winner, folder: Path, settings: ExportSettings) -> ExportResult:
    with new_folder(folder) as fresh:
        write_adapter_folder(winner, settings.form, fresh)
    stacked = settings.form == "adapter" and is_stacked(winner)
    command, notes = adapter_command(winner, folder, is_stacked=stacked)
    return ExportResult(form=settings.form, folder=str(folder), files=(), command=command, notes=notes)


def _write_merged(winner: Winner, folder: Path, settings: ExportSettings) -> ExportResult:
    dtype = dtype_on_disk(winner)
    model, difference = merged_model(winner)
    what = f"`model.safetensors` in {str(dtype).removeprefix('torch.')}, for transformers and vLLM"
    with new_folder(folder) as fresh:
        cast: Any = model
        cast.to(dtype).save_pretrained(fresh)
        card = merged_card(winner, difference, what, save_tokenizer(winner, fresh))
        (fresh / "README.md").write_text(card, encoding="utf-8")
    return ExportResult(
        form="merged", folder=str(folder), files=(), command=model_command(winner, folder), difference=difference
    )


def _write_gguf(winner: Winner, folder: Path, settings: ExportSettings) -> ExportResult:
    assert settings.gguf is not None
    described = GgufModel.of(winner, settings.gguf)
    model, difference = merged_model(winner)
    tensors = described.tensors(model)
    with new_folder(folder) as fresh:
        described.write(fresh / described.file_name, tensors)
        (fresh / "README.md").write_text(gguf_card(winner, difference, described.file_name), encoding="utf-8")
    return ExportResult(
        form="gguf",
        folder=str(folder),
        files=(),
        command=gguf_command(folder / described.file_name),
        difference=difference,
        notes=described.notes,
    )


def _write_config(winner: Winner, folder: Path, settings: ExportSettings) -> ExportResult:
    assert settings.config is not None
    with new_folder(folder) as fresh:
        command, notes = write_tool_config(winner, settings.config, fresh, folder)
    return ExportResult(form="config", folder=str(folder), files=(), command=command, notes=notes)
