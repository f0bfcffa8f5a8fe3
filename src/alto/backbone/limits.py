"""The limits of a model's rows, from its configuration."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from alto.records import ModelLimits

__all__ = ["LengthLimit", "length_limit", "limits_of"]


class LengthLimit(NamedTuple):
    """The length of the longest sequence whose result does not depend on the rest of the forward pass, in tokens, and
    the reason why longer sequences do."""

    num_tokens: int
    why: str


def length_limit(config: PreTrainedConfig) -> LengthLimit | None:
    """Return the limit of the model that ``config`` describes; None if it has no limit."""
    text = config.get_text_config()
    limits = []
    rope = getattr(text, "rope_parameters", None) or {}
    rescales = "rescales the positions of a whole pass by its longest sequence"
    for settings in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if settings.get("rope_type") == "longrope":
            limits.append(LengthLimit(int(settings["original_max_position_embeddings"]), rescales))
        elif settings.get("rope_type") == "dynamic":
            limits.append(LengthLimit(int(text.max_position_embeddings), rescales))
    if num_selected := getattr(text, "index_topk", None):
        why = "attends to index_topk tokens, and its choice among equal scores depends on the padding of the pass"
        limits.append(LengthLimit(int(num_selected), why))
    return min(limits, default=None)


def limits_of(config: PreTrainedConfig) -> ModelLimits:
    """Return the limits of the model that ``config`` describes.

    The number of positions is ``max_position_embeddings`` (transformers maps other names, such as ``n_positions``, to
    it). OPT's table has two more rows, which are not positions. A model with rotary positions also runs on longer rows,
    but was not trained on them, so the configured limit holds there too. YaRN multiplies the limit by its factor. The
    number is None if the configuration has no limit: ALiBi, state space models.
    """
    text: Any = config.get_text_config()
    said = getattr(text, "max_position_embeddings", None)
    positions = said if isinstance(said, int) and said > 0 else None
    if positions is not None:
        positions = max(positions, _stretched(text))
    padding = getattr(text, "pad_token_id", None)
    return ModelLimits(
        max_positions=positions,
        vocab_size=getattr(text, "vocab_size", None),
        pad_token_id=padding if isinstance(padding, int) else None,
    )


def _stretched(config: Any) -> int:
    rope = getattr(config, "rope_parameters", None) or {}
    if not isinstance(rope, dict) or rope.get("rope_type") != "yarn":
        return 0
    return int((rope.get("original_max_position_embeddings") or 0) * (rope.get("factor") or 0))
