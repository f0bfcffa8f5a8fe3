"""The frozen base model: loading, padding-free attention, chunked loss head."""

from alto.backbone.backbone import Backbone
from alto.backbone.load import SHIPPED_MODELS, load_backbone, load_network, load_tokenizer, resolve_model
from alto.backbone.memory import is_out_of_memory, release_memory

__all__ = [
    "SHIPPED_MODELS",
    "Backbone",
    "is_out_of_memory",
    "load_backbone",
    "load_network",
    "load_tokenizer",
    "release_memory",
    "resolve_model",
]
