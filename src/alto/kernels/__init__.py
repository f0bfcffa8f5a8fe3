"""Kernels for many adapters on one frozen base: reference, backends and autograd functions."""

from alto.kernels.backend import choose_backend, layer_functions_on
from alto.kernels.dora import (
    FrozenMatrix,
    adapted_norms,
    dropped_inputs,
    frozen_product,
    scaled_by_magnitude,
)
from alto.kernels.dropout import DropoutKey, NoiseKey, TokenNoise, send
from alto.kernels.forward_table import upload
from alto.kernels.function import GroupedLinear, added_linear, grouped_lora_linear
from alto.kernels.layer_reference import NormKind
from alto.kernels.operands import (
    VECTOR_SIZE,
    GradientSteps,
    GradientTiles,
    GroupGradients,
    LoraOperands,
    RowParts,
    RowStep,
)
from alto.kernels.schedule import HeadTokens, Segment, TokenSchedule
from alto.kernels.slot_embedding import slot_embedding_change, slot_embeddings
from alto.kernels.slot_tensors import SlotTensors, slot_bias_change
from alto.kernels.stochastic_rounding import rounding_key

__all__ = [
    "VECTOR_SIZE",
    "DropoutKey",
    "FrozenMatrix",
    "GradientSteps",
    "GradientTiles",
    "GroupGradients",
    "GroupedLinear",
    "HeadTokens",
    "LoraOperands",
    "NoiseKey",
    "NormKind",
    "RowParts",
    "RowStep",
    "Segment",
    "SlotTensors",
    "TokenNoise",
    "TokenSchedule",
    "adapted_norms",
    "added_linear",
    "choose_backend",
    "dropped_inputs",
    "frozen_product",
    "grouped_lora_linear",
    "layer_functions_on",
    "rounding_key",
    "scaled_by_magnitude",
    "send",
    "slot_bias_change",
    "slot_embedding_change",
    "slot_embeddings",
    "upload",
]
