"""Translates the errors of reading a model into ALTO's errors, which name the file, the expectation and a remedy."""

from __future__ import annotations

import contextlib
import pickle
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import has_file

from alto.errors import ModelError, ModelNotFoundError

_MAX_REASON_CHARS = 240

_NOT_READABLE = (
    ValueError,  # includes invalid JSON
    KeyError,
    TypeError,
    AttributeError,
    ImportError,
    SyntaxError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    SafetensorError,
    StrictDataclassError,
)


@contextlib.contextmanager
def reading(model: str, path: str, what: str, remedy: str) -> Iterator[None]:
    """Translate the errors of ``from_pretrained``.

    Args:
        model: Name of the model, as the user wrote it.
        what: The thing that is read, and its files, for the message.
        remedy: Advice for a model that exists but cannot be used.

    Raises:
        ModelNotFoundError: A file, or everything under that name, is missing.
        ModelError: The model exists but cannot be used.
    """
    is_local = Path(path).is_dir()
    try:
        with _no_progress_bar() if is_local else contextlib.nullcontext():
            yield
    except ModelError:
        raise
    except OSError as error:
        if not is_local and model.startswith((".", "/", "~")):
            raise ModelNotFoundError(
                f"model: expected {what} in {model!r}, found no such folder; check the path"
            ) from error
        remedy = remedy if is_local else "check the spelling, or download it first"
        raise ModelNotFoundError(
            f"model: expected {what} in {model!r}, found that it cannot be read ({_short(error)}); {remedy}"
        ) from error
    except _NOT_READABLE as error:
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"model: expected {what} that transformers itself can read, found that {model!r} brings its own "
                f"Python code, which would run with all your rights; review it, then set 'trust_remote_code: true', or "
                f"use another base model"
            ) from error
        raise ModelError(
            f"model: expected {what} in {model!r}, found something else ({_short(error)}); {remedy}"
        ) from error


def has_pickle_weights(path: str) -> bool:
    """Return whether there are weights in PyTorch's own format, a pickle."""
    return any(has_file(path, name) for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME))


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hide transformers' progress bar; local models are read quickly."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {textwrap.shorten(str(error), _MAX_REASON_CHARS)}"


_NAMES = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()}


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' factory for the model that ``config`` describes. This is the factory of causal language
    models. A model that also reads images and has no class for text alone needs the factory of vision-language models;
    it is tuned on rows of text."""
    is_visual = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if is_visual else AutoModelForCausalLM


def check_is_causal(model: str, config: PreTrainedConfig) -> None:
    """Refuse a classifier or an encoder: transformers would load its body and add a new language-model head.

    Args:
        model: Name of the model, for messages.

    Raises:
        ModelError: The model is a classifier or an encoder.
    """
    for name in config.architectures or ():
        if hasattr(transformers, name) and name not in _NAMES:
            raise ModelError(
                f"model: expected config.json of {model!r} to name the architecture of a causal language model, found "
                f"{name}; use a base model that generates text"
            )
