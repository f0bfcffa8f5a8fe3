"""Writes an export folder: an adapter, a merged model, a GGUF file, or the configuration of another trainer."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from safetensors import SafetensorError

from alto.artifacts.card import ModelUse, adapter_tags, card_header, with_code, without_header
from alto.artifacts.gguf import GgufAdapter, GgufModel, check_writable
from alto.artifacts.merge import check_mergeable, dtype_on_disk, merged_model
from alto.artifacts.modelfile import MODELFILE_NAME, modelfile
from alto.artifacts.tool_config import write_tool_config
from alto.artifacts.winner import Winner, check_pushable, is_hub_id, push
from alto.backbone import load_config, load_tokenizer, loading_class
from alto.base import read_json, sync_folder, write_error
from alto.errors import AltoError, RunExistsError, SpecError
from alto.lora import (
    is_read_per_expert,
    vllm_classifier_obstacle,
    vllm_obstacle,
    vllm_rank,
    write_per_expert,
)
from alto.records import ExportForm, ExportResult, ForeignTool, GgufType
from alto.runs import METRICS_NAME
from alto.spec import LABELS_NAME, TEMPLATE_NAME, TOOLS_TEMPLATE, chat_template_text


def adapter_command(winner: Winner, folder: Path, *, is_stacked: bool) -> tuple[str, tuple[str, ...]]:
    """Return the command that serves an adapter on its base model with vLLM.

    Args:
        is_stacked: Whether the adapter has stacked experts that vLLM can read only as separate matrices.

    Returns:
        The command, and notices as sentences. If vLLM cannot serve the adapter, the command is empty and a notice has
        the reason.
    """
    obstacle = vllm_obstacle(winner.adapter, _model_type(winner))
    if obstacle is not None:
        expected, found = obstacle
        return "", (
            f"vLLM cannot serve the adapter: expected {expected}, found {found}; --merged writes a model that vLLM "
            "serves.",
        )
    if is_stacked:
        return "", (
            "vLLM cannot serve the adapter in this form: for this base model, it reads every expert separately; "
            "--per-expert writes the adapter in that form.",
        )
    notes = []
    if winner.base.quantisation != "none":
        notes.append(
            f"The adapter was trained on the base model in {winner.base.quantisation.removesuffix('bit')} bits; the "
            "command serves it on the base model as stored on disk."
        )
    options = ["--enable-lora", "--max-lora-rank", str(vllm_rank(winner.adapter.rank))]
    if winner.base.chat_template is not None:
        options += ["--chat-template", str(folder / TEMPLATE_NAME)]
    options += [*_calls(winner), *_trust(winner)]
    command = ["vllm", "serve", winner.base_model, *options, "--lora-modules", f"{winner.name}={folder}"]
    return shlex.join(command), tuple(notes)


def request_command(model: str, *, is_chat: bool, port: int = 8000) -> str:
    """Return the command that asks a server on this machine for one answer.

    Args:
        model: Name of the adapter or model in the server.
        port: The default is vLLM's.
    """
    content = {"messages": [{"role": "user", "content": "Hello"}]} if is_chat else {"prompt": "Hello"}
    address = f"http://127.0.0.1:{port}/v1/{'chat/completions' if is_chat else 'completions'}"
    body = json.dumps({"model": model, **content}, ensure_ascii=False)
    return shlex.join(["curl", address, "-H", "Content-Type: application/json", "-d", body])


def gguf_command(file: Path) -> str:
    """Return the command that serves a GGUF file with llama.cpp."""
    return shlex.join(["llama-server", "--jinja", "-m", str(file)])


def _lora_command(file: Path) -> str:
    """Return the command that serves an adapter in a GGUF file with llama.cpp; ``base.gguf`` is a placeholder for the
    base."""
    return shlex.join(["llama-server", "--jinja", "-m", "base.gguf", "--lora", str(file)])


def _calls(winner: Winner) -> list[str]:
    """Return vLLM's options for tool calls if the chat template is ALTO's own; other templates may use any form."""
    if winner.base.chat_template != chat_template_text(TOOLS_TEMPLATE):
        return []
    return ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


def _trust(winner: Winner) -> list[str]:
    return ["--trust-remote-code"] if winner.base.trust_remote_code else []


def check_free(folder: Path) -> None:
    """Check that ``folder`` does not exist or is an empty folder."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise RunExistsError(
            f"{folder}: expected a folder that does not exist yet, or an empty one, found a file; name a folder; "
            "ALTO names the files in it"
        )
    count = sum(1 for _ in folder.iterdir())
    if count:
        raise RunExistsError(
            f"{folder}: expected a folder that does not exist yet, or an empty one, found a folder with {count} "
            f"file{'' if count == 1 else 's'}; name another folder, or remove this one"
        )


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder; rename it to ``folder`` when the block ends, or remove it on an error.

    Raises:
        RunExistsError: ``folder`` has files.
        RunWriteError: The disk is full or cannot be written.
    """
    check_free(folder)
    fresh = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.new")
    try:
        fresh.mkdir(parents=True)
        yield fresh
        check_free(folder)
        if folder.is_dir():
            folder.rmdir()
        fresh.rename(folder)
        sync_folder(folder.parent)
    except AltoError:
        raise
    except (OSError, SafetensorError) as error:  # safetensors wraps OS errors in its own class
        failure = error if isinstance(error, OSError) else OSError(str(error))
        raise write_error(folder, failure, "free disk space, or name another folder") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


# Model cards of exported folders.
#
# The hub rejects a card whose base model is not on the hub, so a local base model is named in the text only.

_BY = "[ALTO](https://pypi.org/project/alto-lora/)"


def adapter_card(winner: Winner, form: ExportForm, use: ModelUse) -> str:
    """Return the card of an adapter: a copy of the existing card, which a run's best adapter has, or a new card.

    Args:
        form: ``adapter`` or ``per_expert``.
    """
    base = winner.base_model if is_hub_id(winner.base_model) else ""
    header = card_header(base, library="peft", pipeline=use.pipeline, tags=adapter_tags(base))
    code = use.adapter_code(winner.base_model, "folder")
    file = winner.adapter.folder / "README.md"
    if form == "adapter" and file.is_file():
        text = without_header(file.read_text(encoding="utf-8"))
        text = text.replace(winner.adapter.base_model or winner.base_model, winner.base_model)
        return f"{header}\n{with_code(text, code)}"
    how = f"\n\n{code}"
    if form == "per_expert":
        command, _ = adapter_command(winner, Path("path/to/this/folder"), is_stacked=False)
        how = " The matrices of every expert are stored separately, as vLLM reads them; PEFT does not load this form.\n"
        how += f"\n{_shell(command)}" if command else ""
    return f"""{header}
# {winner.name}

LoRA adapter for `{winner.base_model}`, rank {winner.adapter.rank}, exported by {_BY}.{how}"""


def merged_card(winner: Winner, difference: float, what: str, *, library: str, pipeline: str, how: str) -> str:
    """Return the card of a merged model.

    Args:
        difference: Relative difference between the merged model's logits in float32 and those of the adapter on its
            base model.
        what: A description of the files.
        library, pipeline: See :func:`card_header`.
        how: How the model is run, in a block of code.
    """
    base = winner.base_model if is_hub_id(winner.base_model) else ""
    return f"""{card_header(base, library=library, pipeline=pipeline, tags=["alto", "lora"])}
# {winner.name}

`{winner.base_model}` with a LoRA adapter of rank {winner.adapter.rank} merged into its weights by {_BY}: {what}.
Merged in float32; the logits differ from those of the base model with the adapter by {difference:.1e} (relative).

{how}"""


def _shell(command: str) -> str:
    return f"```bash\n{command}\n```\n"


_FILES = ("adapter_config.json", "adapter_model.safetensors")
_KEPT = (METRICS_NAME, LABELS_NAME)
_CONFIG, _BASE = "adapter_config.json", "base_model_name_or_path"


def write_adapter_folder(winner: Winner, form: ExportForm, folder: Path) -> None:
    """Write the adapter of ``winner`` into ``folder``.

    Args:
        form: ``adapter``: a copy that names the base model as ``winner`` does; or ``per_expert``.
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
    return use_of(winner, tokenizer)


def use_of(winner: Winner, tokenizer: Any) -> ModelUse:
    """Return the facts that decide how the adapter, or the merged model, is loaded and prompted."""
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


_FORMS: tuple[ExportForm, ...] = ("merged", "gguf", "per_expert", "config")
_CHOICES: Mapping[str, Any] = {"gguf": GgufType, "config": ForeignTool}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """Settings of an export; without any of the first four, the adapter is copied as it is.

    Attributes:
        merged: Write a model with the adapter merged, in safetensors.
        gguf: Write one GGUF file, with a Modelfile for Ollama: a model with the adapter merged, with matrices of this
            type; or ``adapter``: the adapter alone.
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
                raise SpecError(f"{key}: expected one of {', '.join(allowed)}, found {value!r}; use one of these")
        chosen = [name for name in _FORMS if getattr(self, name)]
        if len(chosen) > 1:
            raise SpecError(
                f"export: expected one of merged, gguf, per_expert and config, found {' and '.join(chosen)}; export "
                "each into a separate folder"
            )

    @property
    def form(self) -> ExportForm:
        """The form of the exported files."""
        return next((name for name in _FORMS if getattr(self, name)), "adapter")


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
    if settings.form == "merged" or settings.gguf not in (None, "adapter"):
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
    command, difference, notes = write(winner, folder, settings)
    request = ""
    if command.startswith(("vllm ", "llama-server ")) and not winner.adapter.has_head:
        model = str(folder) if settings.form == "merged" else winner.name
        is_chat = use_of(winner, load_tokenizer(winner.base)).is_chat
        request = request_command(model, is_chat=is_chat, port=8080 if settings.form == "gguf" else 8000)
    return ExportResult(
        form=settings.form,
        folder=str(folder),
        files=tuple(sorted(path.name for path in folder.iterdir())),
        command=command,
        request=request,
        difference=difference,
        notes=notes,
        url="" if settings.push_to_hub is None else push(folder, settings.push_to_hub),
    )


_Written = tuple[str, float | None, tuple[str, ...]]
"""The command that uses the files, the relative difference of logits after merging, and notices."""


def _write_adapter(winner: Winner, folder: Path, settings: ExportSettings) -> _Written:
    with new_folder(folder) as fresh:
        write_adapter_folder(winner, settings.form, fresh)
    stacked = settings.form == "adapter" and is_stacked(winner)
    command, notes = adapter_command(winner, folder, is_stacked=stacked)
    return command, None, notes


def _write_merged(winner: Winner, folder: Path, settings: ExportSettings) -> _Written:
    dtype = dtype_on_disk(winner)
    model, difference = merged_model(winner)
    what = f"`model.safetensors` in {str(dtype).removeprefix('torch.')}, for transformers and vLLM"
    with new_folder(folder) as fresh:
        cast: Any = model
        cast.to(dtype).save_pretrained(fresh)
        use = save_tokenizer(winner, fresh)
        card = merged_card(
            winner, difference, what, library="transformers", pipeline=use.pipeline, how=use.merged_code()
        )
        (fresh / "README.md").write_text(card, encoding="utf-8")
    obstacle = vllm_classifier_obstacle(_model_type(winner)) if winner.adapter.has_head else None
    if obstacle is not None:
        expected, found = obstacle
        note = f"vLLM cannot serve the merged model: expected {expected}, found {found}; load it with transformers."
        return "", difference, (note,)
    return shlex.join(["vllm", "serve", str(folder), *_calls(winner), *_trust(winner)]), difference, ()


def _write_gguf(winner: Winner, folder: Path, settings: ExportSettings) -> _Written:
    assert settings.gguf is not None
    if settings.gguf == "adapter":
        return _write_gguf_adapter(winner, folder)
    described = GgufModel.of(winner, settings.gguf)
    model, difference = merged_model(winner)
    tensors = described.tensors(model)
    file = described.file_name
    what, how = f"`{file}`, for llama.cpp", _shell(gguf_command(Path(file)))
    tokenizer = load_tokenizer(winner.base)
    ollama, ollama_notes = modelfile(winner, tokenizer, use_of(winner, tokenizer), [f"FROM ./{file}"])
    with new_folder(folder) as fresh:
        described.write(fresh / file, tensors)
        (fresh / MODELFILE_NAME).write_text(ollama, encoding="utf-8")
        card = merged_card(winner, difference, what, library="gguf", pipeline="text-generation", how=how)
        (fresh / "README.md").write_text(card, encoding="utf-8")
    return gguf_command(folder / file), difference, (*described.notes, *ollama_notes, _ollama_note(winner, folder))


def _write_gguf_adapter(winner: Winner, folder: Path) -> _Written:
    described, base, tokenizer = GgufAdapter.of(winner), winner.base_model, load_tokenizer(winner.base)
    files = [f"# The name of {base} in Ollama, or the path of its GGUF file:", f"FROM {base}"]
    files.append(f"ADAPTER ./{described.file_name}")
    ollama, notes = modelfile(winner, tokenizer, use_of(winner, tokenizer), files)
    with new_folder(folder) as fresh:
        described.write(fresh / described.file_name)
        (fresh / MODELFILE_NAME).write_text(ollama, encoding="utf-8")
        header = card_header(
            base if is_hub_id(base) else "", library="gguf", pipeline="text-generation", tags=["alto", "lora"]
        )
        command = _shell(_lora_command(Path(described.file_name)))
        text = f"LoRA adapter for `{base}`, rank {winner.adapter.rank}, for llama.cpp and Ollama, exported by {_BY}."
        (fresh / "README.md").write_text(f"{header}\n# {winner.name}\n\n{text}\n\n{command}", encoding="utf-8")
    note = _ollama_note(winner, folder, before="name the base model in the Modelfile, then ")
    return _lora_command(folder / described.file_name), None, (*notes, note)


def _ollama_note(winner: Winner, folder: Path, before: str = "") -> str:
    name = shlex.quote(winner.name)
    create = shlex.join(["ollama", "create", winner.name, "-f", str(folder / MODELFILE_NAME)])
    return f"With Ollama: {before}{create} && ollama run {name}"


def _write_config(winner: Winner, folder: Path, settings: ExportSettings) -> _Written:
    assert settings.config is not None
    with new_folder(folder) as fresh:
        command, notes = write_tool_config(winner, settings.config, fresh, folder)
    return command, None, notes
