"""A base model without its weights: its modules and their shapes."""

from __future__ import annotations

from transformers import PreTrainedModel

from alto.backbone.load import load_config, load_network, resolve_model
from alto.backbone.model_class import auto_class
from alto.backbone.reading import reading
from alto.backbone.sharded_load import parameters_on_meta
from alto.spec import BaseModelSpec

__all__ = ["build_skeleton"]


def build_skeleton(spec: BaseModelSpec) -> PreTrainedModel:
    """Build the modules of a base model; weights are not read and take no memory. Return a model given as an object
    itself.

    Raises:
        ModelNotFoundError: There is no model of that name, or its configuration is missing.
        ModelError: Its configuration is not that of a causal LM, or needs ``trust_remote_code``.
    """
    if spec.objects is not None:
        return load_network(spec)
    config, path = load_config(spec), resolve_model(spec.id)
    what = "config.json of a causal language model"
    with reading(spec.id, path, what, "use a base model that transformers supports"), parameters_on_meta():
        network: PreTrainedModel = auto_class(config).from_config(config, trust_remote_code=spec.trust_remote_code)
    return network.requires_grad_(False)
