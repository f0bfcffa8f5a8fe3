"""Merging of an adapter into its base model with PEFT; the merged model is compared with the unmerged adapter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from alto.artifacts.winner import Winner
from alto.backbone import classifier_of, dequantised, load_config, load_network
from alto.errors import ModelError, UnsupportedError
from alto.lora import compared_logits, silent_peft

_TOLERANCE = 1e-4
"""Tolerance of the relative difference of float32 logits, in norm.

Merging rounds every weight once, which causes a difference below 1e-5.
"""


def check_mergeable() -> None:
    """Check that adapters can be merged here."""
    try:
        with silent_peft():
            import peft  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"export: expected peft, which merges the adapter, found that it cannot be imported ({error}); pip install "
            "peft, or export the adapter as it is"
        ) from None


def dtype_on_disk(winner: Winner) -> torch.dtype:
    """Return the dtype of the base model's files; float32 if its configuration names none."""
    found: Any = load_config(winner.base).dtype
    named = getattr(torch, found) if isinstance(found, str) else found
    return named if isinstance(named, torch.dtype) else torch.float32


def merged_model(winner: Winner) -> tuple[PreTrainedModel, float]:
    """Merge the adapter of ``winner`` into its base model, in float32 on the CPU.

    A quantised base model is dequantised first, to the weights that its layers compute with. If the output head shares
    its weight with the embeddings and the adapter changes one of them, they get separate weights.

    Returns:
        The merged model, and the relative difference, in norm, between its logits for a few tokens and those of the
        adapter on its base model.

    Raises:
        ModelError: The base model cannot be loaded, or the logits of the merged model differ.
    """
    from peft import PeftModel

    base = replace(winner.base, dtype="float32", torch_compile=False)
    network = dequantised(load_network(base), trust_remote_code=base.trust_remote_code)
    if winner.labels is not None:
        network = classifier_of(network, winner.labels)
    _untie(network, winner)
    vocabulary = network.config.get_text_config().vocab_size
    with torch.no_grad(), torch.random.fork_rng(devices=[]), silent_peft():
        try:
            adapted = PeftModel.from_pretrained(network, str(winner.adapter.folder), torch_device="cpu").eval()
            expected = compared_logits(adapted, vocabulary)
            merged: PreTrainedModel = adapted.merge_and_unload().requires_grad_(False)
        except (ValueError, RuntimeError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
            raise ModelError(
                f"{winner.adapter.folder}: expected an adapter that PEFT merges into {winner.base.id}, found "
                f"{type(error).__name__}: {error}; name the model it was trained on with --base"
            ) from error
        merged_logits = compared_logits(merged, vocabulary)
    difference = float((merged_logits - expected).norm() / expected.norm())
    if not difference <= _TOLERANCE:
        raise ModelError(
            f"{winner.adapter.folder}: expected a merged model with the logits of the adapter, found that they differ "
            f"by {difference:.1e} (relative), so nothing was written; export the adapter as it is, and report this as "
            "a bug"
        )
    return merged, difference


def _untie(network: Any, winner: Winner) -> None:
    """Give the output head its own weight if it is tied to the embeddings and the adapter changes either of them."""
    head, embeddings = network.get_output_embeddings(), network.get_input_embeddings()
    if head is None or getattr(head, "weight", None) is not embeddings.weight:
        return
    changed = {*winner.adapter.weights, *(name.removesuffix(".weight") for name in winner.adapter.weights.extras)}
    names = {name for name, module in network.named_modules() if module is head or module is embeddings}
    if changed.isdisjoint(names):
        return
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for config in (network.config, network.config.get_text_config()):
        config.tie_word_embeddings = False
