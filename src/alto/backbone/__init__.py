"""The frozen base model: loading, padding-free attention, chunked loss head."""

from alto.backbone.backbone import Backbone
from alto.backbone.load import load_backbone, load_network, load_tokenizer, resolve_model

__all__ = ["Backbone", "load_backbone", "load_network", "load_tokenizer", "resolve_model"]
