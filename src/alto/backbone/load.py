"""Finding and loading the frozen base model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from alto.backbone.backbone import Backbone
from alto.errors import ModelError, ModelNotFoundError

__all__ = ["SHIPPED_MODELS", "load_backbone", "load_network", "load_tokenizer", "resolve_model"]

SHIPPED_MODELS = ("alto-tiny",)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_model(model: str) -> str:
    """What ``from_pretrained`` takes for ``model``: a shipped model's folder, a local folder, or a hub id as it is."""
    if model in SHIPPED_MODELS:
        return str(resources.files("alto") / "assets" / model)
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


def load_backbone(
    model: str, *, dtype: str = "auto", device: torch.device | str = "cpu", gradient_checkpointing: bool = False
) -> Backbone:
    """Load a causal LM and its tokenizer, freeze it, and make its forward pass padding-free.

    Args:
        model: ``alto-tiny``, a local folder, or a Hugging Face hub id.
        dtype: ``float32``, ``bfloat16``, ``float16``; ``auto`` is float32 on the CPU and the model's own on CUDA.
        gradient_checkpointing: Recompute each layer's activations in the backward pass.

    Raises:
        ModelNotFoundError: Nothing is there under that name.
        ModelError: What is there is not a causal LM with a tokenizer.
        UnsupportedModelError: The padding-free pass would differ from the model's own forward pass.
    """
    tokenizer = load_tokenizer(model)
    network = load_network(model, dtype=dtype, device=device)
    return Backbone(network, tokenizer, resolve_model(model), gradient_checkpointing=gradient_checkpointing)


def load_tokenizer(model: str) -> Any:
    """The tokenizer of ``model``; no weights are read. Raises as :func:`load_backbone` does."""
    with _loading(model) as path:
        return AutoTokenizer.from_pretrained(path)


def load_network(model: str, *, dtype: str = "auto", device: torch.device | str = "cpu") -> PreTrainedModel:
    """The model itself on ``device``, its forward pass as it comes. Arguments and errors as :func:`load_backbone`."""
    device = torch.device(device)
    wanted: Any = _DTYPES.get(dtype, torch.float32 if device.type == "cpu" else "auto")
    with _loading(model) as path:
        network: Any = AutoModelForCausalLM.from_pretrained(path, dtype=wanted, use_safetensors=True)
    network.to(device)
    loaded: PreTrainedModel = network
    return loaded


@contextlib.contextmanager
def _loading(model: str) -> Iterator[str]:
    """What ``from_pretrained`` takes for ``model``; its errors are said in ALTO's words."""
    path = resolve_model(model)
    try:
        with _no_progress_bar() if Path(path).is_dir() else contextlib.nullcontext():
            yield path
    except OSError as error:
        raise ModelNotFoundError(
            f"model: expected one of {', '.join(SHIPPED_MODELS)}, a local folder or a hub id, found {model!r}, "
            f"which could not be read ({_first_line(error)}); check the spelling, or download it first"
        ) from error
    except (ValueError, KeyError, SafetensorError) as error:
        raise ModelError(
            f"model: expected a causal language model with a tokenizer, found {model!r} ({_first_line(error)})"
        ) from error


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """For local models: read in a moment, their bar would stand between a program's own lines. Downloads show it."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
