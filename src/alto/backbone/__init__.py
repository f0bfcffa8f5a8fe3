"""The frozen base model: loading, padding-free attention, chunked loss head."""

from alto.backbone.backbone import Backbone
from alto.backbone.load import SHIPPED_MODELS, load_backbone, load_network, load_tokenizer, resolve_model

__all__ = ["SHIPPED_MODELS", "Backbone", "load_backbone", "load_network", "load_tokenizer", "resolve_model"]
