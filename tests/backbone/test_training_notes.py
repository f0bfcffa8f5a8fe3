"""Dropout and jitter of a base model that jobs train without are reported, each with its number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import SIZES
from transformers import (
    AutoModelForCausalLM,
    GPTBigCodeConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    SeedOssConfig,
)

from alto.backbone import config_notes

IDS = torch.tensor([[3, 5, 8, 13, 21, 34, 55, 2]])
SMALL: dict[str, Any] = {
    "opt": (OPTConfig, {"ffn_dim": 48, "word_embed_proj_dim": 32}, ["dropout 0.1"]),
    "gpt_bigcode": (
        GPTBigCodeConfig,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        ["resid_pdrop 0.1", "embd_pdrop 0.1", "attn_pdrop 0.1"],
    ),
    "seed_oss": (SeedOssConfig, {"head_dim": 8}, ["attention_dropout 0.1", "residual_dropout 0.1"]),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "router_jitter_noise": 0.2}, ["router_jitter_noise 0.2"]),
}


def small(name: str, **changes: Any) -> PreTrainedConfig:
    config_class, settings, _ = SMALL[name]
    config: PreTrainedConfig = config_class(**(SIZES | settings | changes))
    return config


@torch.no_grad()
def is_random(config: PreTrainedConfig) -> bool:
    """Return whether the model computes something else in training mode than in evaluation mode."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    expected = model.eval()(input_ids=IDS, use_cache=False).logits
    return not torch.allclose(model.train()(input_ids=IDS, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_what_makes_training_mode_random_is_named(name: str) -> None:
    named = SMALL[name][2]
    assert is_random(small(name))
    first = config_notes(small(name))[0]
    assert first.startswith(f"{', '.join(named)} of the base model: not applied")
    off = {key.split()[0]: 0.0 for key in named}
    assert not is_random(small(name, **off))
    assert not any("not applied" in note for note in config_notes(small(name, **off)))


def test_a_model_without_any_needs_no_note() -> None:
    assert config_notes(LlamaConfig(**SIZES)) == ()
