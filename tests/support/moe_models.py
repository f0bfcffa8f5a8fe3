"""Tiny random-weight mixtures of experts of transformers' own classes; most have dense layers or shared experts too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from architectures import SIZES
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from alto.lora import AdapterWeights, ModuleNames, adaptable, find_targets, write_adapter
from alto.spec import JobConfig

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe-shared": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24, "mlp_only_layers": []},
    ),
    "qwen3-moe-dense": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {**EXPERTS, "num_experts": 4, "head_dim": 16, "mlp_only_layers": [0]},
    ),
    "deepseek-v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            **EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 8,
        },
    ),
}


def build_mixture(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a new float32 model; ``changes`` go into its config."""
    model_class, config_class, extras = MIXTURES[name]
    torch.manual_seed(seed)
    model: PreTrainedModel = model_class(config_class(**(SIZES | extras | changes))).eval()
    return model


def build_gpt_oss(**changes: Any) -> PreTrainedModel:
    """Return a model with interleaved gate and up, transposed weights and biases; its rows are padded."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 5}
    model: PreTrainedModel = GptOssForCausalLM(GptOssConfig(**(SIZES | sizes | changes), rope_parameters=rope)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def build_olmoe(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return OlmoeForCausalLM(OlmoeConfig(**(SIZES | {"num_experts": 4, "num_experts_per_tok": 2} | changes))).eval()


MODELS: dict[str, Callable[..., PreTrainedModel]] = {name: partial(build_mixture, name) for name in MIXTURES}
MODELS |= {"gpt-oss": build_gpt_oss, "olmoe": build_olmoe}
"""All mixtures of this module, by name."""


def config_of(model: PreTrainedModel, rank: int, scale: float) -> JobConfig:
    """Return a job with adapters on queries, all experts and all routers."""
    targets = adaptable(model)
    attention = [target.name for target in targets if target.name.endswith("q_proj")]
    experts = [target.name for target in targets if target.num_experts]
    experts += [f"{target.name}.weight" for target in targets if target.is_router]
    return JobConfig(r=rank, lora_alpha=scale * rank, target_modules=attention, target_parameters=experts)


def random_adapter(model: PreTrainedModel, folder: Path, config: JobConfig | None = None) -> Path:
    """Write an adapter of random matrices as ALTO does, by default on queries, experts and routers."""
    config, generator = config or config_of(model, 3, 2.0), torch.Generator().manual_seed(1)
    matrices = {}
    for target in find_targets(model, config.target_modules, target_parameters=config.target_parameters or ()):
        experts = (target.num_experts,) if target.num_experts else ()
        shapes = ((*experts, target.in_features, config.r), (*experts, config.r, target.out_features))
        a, b = (torch.randn(shape, generator=generator) * 0.1 for shape in shapes)
        matrices[target.name] = (a, b)
    write_adapter(folder, AdapterWeights(matrices), config, "tiny", ModuleNames.of(model))
    return folder
