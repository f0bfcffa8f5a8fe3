"""LoRA adapters: the bank that stores them, the layers that apply them, their optimizers and their files."""

from alto.lora.bank import ADAPTER_DTYPES, AdapterBank
from alto.lora.biases import bias_notes, is_bias
from alto.lora.fit import check_fit, initial_values
from alto.lora.heads import HEAD, BankHeads, is_whole, module_of_whole
from alto.lora.injection import eject, inject
from alto.lora.layout import AdapterShape, AdapterWeights, BankLayout, ExtraTensor, TargetModule
from alto.lora.linear import ForwardContext, MultiLoraLinear
from alto.lora.magnitudes import is_magnitude
from alto.lora.optimizer import BankOptimizer, OptimizerState, SlotUpdate, compile_kernels
from alto.lora.peft_format import (
    NUM_COMPARED,
    PREFIX,
    adapter_scale,
    as_in_peft,
    compared_logits,
    extra_in_peft,
    module_of,
    read_adapter,
    silent_peft,
    write_adapter,
)
from alto.lora.peft_targets import ModuleNames, untrained_notes
from alto.lora.per_expert import is_read_per_expert, write_per_expert
from alto.lora.row_optimizers import bank_bytes, check_optimizer
from alto.lora.saved import (
    SavedAdapter,
    adapter_base_model,
    is_adapter,
    read_saved_adapter,
    saved_settings,
    vllm_classifier_obstacle,
    vllm_obstacle,
    vllm_rank,
)
from alto.lora.served import ServedAdapters, serving
from alto.lora.shape import adapter_shape, rank_notes, tying_notes
from alto.lora.targets import adaptable, default_targets, find_shared_inputs, find_targets, linear_modules

__all__ = [
    "ADAPTER_DTYPES",
    "HEAD",
    "NUM_COMPARED",
    "PREFIX",
    "AdapterBank",
    "AdapterShape",
    "AdapterWeights",
    "BankHeads",
    "BankLayout",
    "BankOptimizer",
    "ExtraTensor",
    "ForwardContext",
    "ModuleNames",
    "MultiLoraLinear",
    "OptimizerState",
    "SavedAdapter",
    "ServedAdapters",
    "SlotUpdate",
    "TargetModule",
    "adaptable",
    "adapter_base_model",
    "adapter_scale",
    "adapter_shape",
    "as_in_peft",
    "bank_bytes",
    "bias_notes",
    "check_fit",
    "check_optimizer",
    "compared_logits",
    "compile_kernels",
    "default_targets",
    "eject",
    "extra_in_peft",
    "find_shared_inputs",
    "find_targets",
    "initial_values",
    "inject",
    "is_adapter",
    "is_bias",
    "is_magnitude",
    "is_read_per_expert",
    "is_whole",
    "linear_modules",
    "module_of",
    "module_of_whole",
    "rank_notes",
    "read_adapter",
    "read_saved_adapter",
    "saved_settings",
    "serving",
    "silent_peft",
    "tying_notes",
    "untrained_notes",
    "vllm_classifier_obstacle",
    "vllm_obstacle",
    "vllm_rank",
    "write_adapter",
    "write_per_expert",
]
