"""PEFT's default target modules by architecture, used if a configuration names none.

Source: PEFT 0.21, ``TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING``, and ``LoraModel._prepare_adapter_config``.
"""

from __future__ import annotations

from collections.abc import Mapping

from alto.errors import TargetModuleError

__all__ = ["DEFAULT_TARGETS", "default_targets"]

DEFAULT_TARGETS: Mapping[str, str | tuple[str, ...]] = {
    **dict.fromkeys(("bart", "gpt_neo", "gptj", "opt", "stablelm"), ("q_proj", "v_proj")),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "llama", "llama4"), ("q_proj", "v_proj")),
    **dict.fromkeys(("mistral", "mixtral", "qwen2", "qwen3"), ("q_proj", "v_proj")),
    **dict.fromkeys(("RefinedWeb", "RefinedWebModel", "bloom", "chatglm", "falcon"), ("query_key_value",)),
    "gpt_neox": ("query_key_value",),
    **dict.fromkeys(("bert", "electra", "layoutlm", "roberta", "xlm-roberta"), ("query", "value")),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    **dict.fromkeys(("mt5", "t5"), ("q", "v")),
    "blip-2": ("q", "v", "q_proj", "v_proj"),
    "btlm": ("c_proj", "c_attn"),
    "codegen": ("qkv_proj",),
    "deberta": ("in_proj",),
    "deberta-v2": ("query_proj", "value_proj"),
    "gemma4": r".*language_model\..*\.(q_proj|v_proj)",
    "mpt": ("Wqkv",),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "rwkv": ("key", "value", "receptance", "output"),
    "rwkv7": ("r_proj", "k_proj", "v_proj", "o_proj", "key", "value"),
}
"""By model type: names, or a regular expression."""


def default_targets(model_type: str, *, has_parameters: bool = False) -> str | tuple[str, ...]:
    """Return the ``target_modules`` that PEFT chooses for models of ``model_type``.

    Args:
        model_type: ``model_type`` in the model's ``config.json``.
        has_parameters: Whether ``target_parameters`` is set; if PEFT has no default, it then trains only these
            parameters.

    Raises:
        TargetModuleError: PEFT has no default for this model type.
    """
    found = DEFAULT_TARGETS.get(model_type, () if has_parameters else None)
    if found is None:
        raise TargetModuleError(
            "target_modules: expected a model of a type for which PEFT has default modules, found "
            f"{model_type!r}, for which it has none; name the modules in target_modules, or write 'all-linear'"
        )
    return found
