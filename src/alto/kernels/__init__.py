"""The arithmetic of many adapters on one frozen base: reference, backends, autograd function."""

from alto.kernels.backend import choose_backend
from alto.kernels.function import LoraOperands, grouped_lora_linear
from alto.kernels.schedule import DropoutKey, Segment, TokenSchedule

__all__ = ["DropoutKey", "LoraOperands", "Segment", "TokenSchedule", "choose_backend", "grouped_lora_linear"]
