"""Model cards of exported folders.

The hub rejects a card whose base model is not on the hub, so a local base model is named in the text only.
"""

from __future__ import annotations

from pathlib import Path

from alto.export.card import ModelUse, adapter_tags, card_header, with_code, without_header
from alto.exporting.serving import adapter_command, gguf_command
from alto.exporting.winner import Winner, is_hub_id
from alto.records import ExportForm

__all__ = ["adapter_card", "gguf_card", "merged_card"]

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


def merged_card(winner: Winner, difference: float, what: str, use: ModelUse) -> str:
    """Return the card of a merged model for transformers.

    Args:
        winner: The adapter that was merged.
        difference: Relative difference between the merged model's logits in float32 and those of the adapter on its
            base model.
        what: A description of the files.
    """
    text = _merged_text(winner, difference, what)
    return f"{_model_header(winner, 'transformers', use.pipeline)}{text}\n{use.merged_code()}"


def gguf_card(winner: Winner, difference: float, file_name: str) -> str:
    """Return the card of a merged model in a GGUF file; ``difference`` is the same as in :func:`merged_card`."""
    text = _merged_text(winner, difference, f"`{file_name}`, for llama.cpp")
    return f"{_model_header(winner, 'gguf', 'text-generation')}{text}\n{_shell(gguf_command(Path(file_name)))}"


def _model_header(winner: Winner, library: str, pipeline: str) -> str:
    base = winner.base_model if is_hub_id(winner.base_model) else ""
    return card_header(base, library=library, pipeline=pipeline, tags=["alto", "lora"])


def _merged_text(winner: Winner, difference: float, what: str) -> str:
    return f"""
# {winner.name}

`{winner.base_model}` with a LoRA adapter of rank {winner.adapter.rank} merged into its weights by {_BY}: {what}.
Merged in float32; the logits differ from those of the base model with the adapter by {difference:.1e} (relative).
"""


def _shell(command: str) -> str:
    return f"```bash\n{command}\n```\n"
