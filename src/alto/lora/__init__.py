"""Adapters: the bank that owns them, the layers that apply them, their optimizer, their files."""

from alto.lora.bank import ADAPTER_DTYPES, AdapterBank, AdapterWeights
from alto.lora.eight_bit import check_optimizer
from alto.lora.footprint import bank_bytes
from alto.lora.injection import eject, inject
from alto.lora.layout import AdapterShape, BankLayout, TargetModule
from alto.lora.linear import ForwardContext, MultiLoraLinear
from alto.lora.optimizer import OptimizerState, SlotAdamW, SlotUpdate
from alto.lora.peft_format import adapter_scale, as_in_peft, module_of, read_adapter, write_adapter
from alto.lora.peft_targets import ModuleNames
from alto.lora.saved import SavedAdapter, adapter_base_model, is_adapter, read_saved_adapter
from alto.lora.served import ServedAdapters, serving
from alto.lora.shape import adapter_shape, rank_notes
from alto.lora.shared_inputs import find_shared_inputs
from alto.lora.targets import adaptable, find_targets, linear_modules
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
    "SavedAdapter",
    "ServedAdapters",
    "SlotAdamW",
    "SlotUpdate",
    "TargetModule",
    "adaptable",
    "adapter_base_model",
    "adapter_scale",
    "adapter_shape",
    "as_in_peft",
    "bank_bytes",
    "check_optimizer",
    "eject",
    "find_shared_inputs",
    "find_targets",
    "inject",
    "is_adapter",
    "linear_modules",
    "module_of",
    "rank_notes",
    "read_adapter",
    "read_saved_adapter",
    "serving",
    "untrained_notes",
    "write_adapter",
]
