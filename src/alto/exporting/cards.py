"""Model cards of exported folders.

The hub refuses a card whose base model is none of its own, so that a folder of this machine is named in the text alone.
"""

from __future__ import annotations

from alto.backbone import loading_class
from alto.export.card import adapter_tags, card_header, without_header
from alto.exporting.winner import Winner, is_hub_id
from alto.records import ExportForm

__all__ = ["adapter_card", "model_card"]

_PIPELINES = {"AutoModelForImageTextToText": "image-text-to-text"}
_BY = "[ALTO](https://pypi.org/project/alto-lora/)"


def adapter_card(winner: Winner, form: ExportForm) -> str:
    """The card of an adapter: the text of the one beside it, which a run's best adapter has, or a new one.

    Args:
        winner: The adapter.
        form: ``adapter`` or ``per_expert``.
    """
    base = winner.base_model if is_hub_id(winner.base_model) else ""
    header = card_header(base, library="peft", pipeline=_pipeline(winner), tags=adapter_tags(base))
    file = winner.adapter.folder / "README.md"
    if form == "adapter" and file.is_file():
        text = without_header(file.read_text(encoding="utf-8"))
        return f"{header}\n{text.replace(winner.adapter.base_model or winner.base_model, winner.base_model)}"
    how = (
        "Every expert's matrices are by themselves, as vLLM reads them; PEFT does not load this form."
        if form == "per_expert"
        else f"Load it with `peft.PeftModel.from_pretrained(base, folder)` on `{winner.base_model}`."
    )
    return f"""{header}
# {winner.name}

LoRA adapter for `{winner.base_model}`, rank {winner.adapter.rank}, exported by {_BY}. {how}
"""


def model_card(winner: Winner, form: ExportForm, difference: float, what: str) -> str:
    """The card of a merged model.

    Args:
        winner: The adapter that was merged.
        form: ``merged`` or ``gguf``.
        difference: Between its logits in float32 and those of the adapter on its base, relative.
        what: The file, or files, in words.
    """
    base = winner.base_model if is_hub_id(winner.base_model) else ""
    library = "gguf" if form == "gguf" else "transformers"
    header = card_header(base, library=library, pipeline=_pipeline(winner), tags=["alto", "lora"])
    return f"""{header}
# {winner.name}

`{winner.base_model}` with a LoRA adapter of rank {winner.adapter.rank} merged into its weights by {_BY}: {what}.
Merged in float32, its logits differ from those of the adapter on its base by {difference:.1e} (relative).
"""


def _pipeline(winner: Winner) -> str:
    if winner.adapter.has_head:
        return "text-classification"
    return _PIPELINES.get(loading_class(winner.base), "text-generation")
