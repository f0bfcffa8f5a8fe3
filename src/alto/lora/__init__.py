"""Adapters: the bank that owns them, the layers that serve them, their optimizer, their files."""

from alto.lora.bank import ADAPTER_DTYPES, AdapterBank, AdapterWeights
from alto.lora.eight_bit import check_optimizer
from alto.lora.footprint import bank_bytes
from alto.lora.injection import eject, inject
from alto.lora.layout import AdapterShape, BankLayout, TargetModule
from alto.lora.linear import ForwardContext, MultiLoraLinear
from alto.lora.optimizer import OptimizerState, SlotAdamW, SlotUpdate
from alto.lora.peft_format import read_adapter, write_adapter
from alto.lora.peft_targets import ModuleNames
from alto.lora.served import ServedAdapters, serving
from alto.lora.shared_inputs import find_shared_inputs
from alto.lora.targets import find_targets, linear_modules
from alto.lora.untrained import untrained_notes

__all__ = [
    "ADAPTER_DTYPES",
    "AdapterBank",
    "AdapterShape",
    "AdapterWeights",
    "BankLayout",
    "ForwardContext",
    "ModuleNames",
    "MultiLoraLinear",
    "OptimizerState",
    "ServedAdapters",
    "SlotAdamW",
    "SlotUpdate",
    "TargetModule",
    "bank_bytes",
    "check_optimizer",
    "eject",
    "find_shared_inputs",
    "find_targets",
    "inject",
    "linear_modules",
    "read_adapter",
    "serving",
    "untrained_notes",
    "write_adapter",
]
