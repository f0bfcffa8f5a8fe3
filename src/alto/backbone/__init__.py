"""The frozen base model: loading, padding-free attention, chunked loss head."""

from alto.backbone.backbone import Backbone, changed_embeddings, limits_of
from alto.backbone.borrowing import borrowed
from alto.backbone.classifier import LOGIT_TOLERANCES, check_classifier, classifier_of
from alto.backbone.fingerprint import (
    base_differences,
    base_fingerprint,
    model_folder,
    object_fingerprint,
    tokenizer_fingerprint,
)
from alto.backbone.load import (
    SHIPPED_MODELS,
    end_tokens,
    load_backbone,
    load_config,
    load_network,
    load_tokenizer,
    loading_class,
    resolve_model,
)
from alto.backbone.memory import device_name, is_out_of_memory, release_memory
from alto.backbone.named_base import build_skeleton, find_named_base
from alto.backbone.quantised import dequantised
from alto.backbone.router_loss import (
    check_router_loss,
    recorded_routers,
    router_coefficient,
    router_notes,
    router_sums,
)
from alto.backbone.training_notes import config_notes

__all__ = [
    "LOGIT_TOLERANCES",
    "SHIPPED_MODELS",
    "Backbone",
    "base_differences",
    "base_fingerprint",
    "borrowed",
    "build_skeleton",
    "changed_embeddings",
    "check_classifier",
    "check_router_loss",
    "classifier_of",
    "config_notes",
    "dequantised",
    "device_name",
    "end_tokens",
    "find_named_base",
    "is_out_of_memory",
    "limits_of",
    "load_backbone",
    "load_config",
    "load_network",
    "load_tokenizer",
    "loading_class",
    "model_folder",
    "object_fingerprint",
    "recorded_routers",
    "release_memory",
    "resolve_model",
    "router_coefficient",
    "router_notes",
    "router_sums",
    "tokenizer_fingerprint",
]
