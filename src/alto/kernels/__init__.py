"""The arithmetic of many adapters on one frozen base: reference, backends, autograd function."""

from alto.kernels.backend import choose_backend
from alto.kernels.dropout import DropoutKey
from alto.kernels.forward_table import upload
from alto.kernels.function import FrozenLayer, grouped_lora_linear
from alto.kernels.noise import NoiseKey, TokenNoise
from alto.kernels.operands import VECTOR_SIZE, LoraOperands
from alto.kernels.schedule import Segment, TokenSchedule

__all__ = [
    "VECTOR_SIZE",
    "DropoutKey",
    "FrozenLayer",
    "LoraOperands",
    "NoiseKey",
    "Segment",
    "TokenNoise",
    "TokenSchedule",
    "choose_backend",
    "grouped_lora_linear",
    "upload",
]
