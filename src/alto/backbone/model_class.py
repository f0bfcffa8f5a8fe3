"""Chooses transformers' class that loads a base model."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from alto.errors import ModelError

__all__ = ["auto_class", "check_is_causal"]

_NAMES = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()}


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' factory for the model that ``config`` describes: the factory of causal language models, or,
    for a model that also reads images and has no class for text alone, that of vision-language models. The latter are
    tuned on rows of text."""
    is_visual = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if is_visual else AutoModelForCausalLM


def check_is_causal(model: str, config: PreTrainedConfig) -> None:
    """Refuse a classifier or an encoder: transformers would load its body and add a new language-model head.

    Args:
        model: Name of the model, for messages.
        config: Its configuration.

    Raises:
        ModelError: The model is a classifier or an encoder.
    """
    for name in config.architectures or ():
        if hasattr(transformers, name) and name not in _NAMES:
            raise ModelError(
                f"model: expected config.json of {model!r} to name the architecture of a causal language model, found "
                f"{name}; use a base model that generates text"
            )
