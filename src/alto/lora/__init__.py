"""Adapters: the bank that owns them, the layers that serve them, their optimizer, their files."""

from alto.lora.bank import AdapterBank, AdapterShape, AdapterWeights
from alto.lora.layout import BankLayout, TargetModule, find_targets, linear_modules
from alto.lora.linear import MultiLoraLinear, PassContext, inject
from alto.lora.optimizer import OptimizerState, SlotAdamW, SlotUpdate
from alto.lora.peft_format import read_adapter, write_adapter

__all__ = [
    "AdapterBank",
    "AdapterShape",
    "AdapterWeights",
    "BankLayout",
    "MultiLoraLinear",
    "OptimizerState",
    "PassContext",
    "SlotAdamW",
    "SlotUpdate",
    "TargetModule",
    "find_targets",
    "inject",
    "linear_modules",
    "read_adapter",
    "write_adapter",
]
