"""A base model without its weights: its modules and their shapes."""

from __future__ import annotations

from transformers import AutoModelForCausalLM, PreTrainedModel

from alto.backbone.load import load_config, resolve_model
from alto.backbone.reading import reading
from alto.backbone.sharded_load import parameters_on_meta

__all__ = ["build_skeleton"]


def build_skeleton(model: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The modules of ``model``; no weights are read, and none take memory.

    Raises:
        ModelNotFoundError: Nothing is there under that name, or its configuration is missing.
        ModelError: What is there is not the configuration of a causal LM, or needs ``trust_remote_code``.
    """
    config, path = load_config(model, trust_remote_code=trust_remote_code), resolve_model(model)
    what = "config.json of a causal language model"
    with reading(model, path, what, "use a base model that transformers knows"), parameters_on_meta():
        network: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return network.requires_grad_(False)
