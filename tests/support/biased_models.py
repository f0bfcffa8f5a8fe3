"""Small models with biases, packed and with padded rows. Unlike those of new models, their biases are not zero."""

from __future__ import annotations

from typing import Any

import torch
from architectures import SIZES, build_tiny
from resident_jobs import VOCABULARY
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

__all__ = ["bloom", "gpt2", "llama", "mamba", "starcoder2"]

_SIZES: dict[str, Any] = {**SIZES, "vocab_size": VOCABULARY}


def _with_random_biases(model: PreTrainedModel) -> PreTrainedModel:
    """Set random biases, because otherwise a forgotten bias would not be noticed."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def llama() -> PreTrainedModel:
    """Return a model with biases on all linear layers."""
    return build_tiny("llama-bias", vocab_size=VOCABULARY)


def starcoder2() -> PreTrainedModel:
    """Return a model with biases on all linear layers and on LayerNorm."""
    torch.manual_seed(0)
    config = Starcoder2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
        sliding_window=None,
        initializer_range=0.3,
        residual_dropout=0.0,
        embedding_dropout=0.0,
    )
    return _with_random_biases(Starcoder2ForCausalLM(config))


def gpt2() -> PreTrainedModel:
    """Return a model with transposed weights, and with biases of keys, whose gradient is zero up to rounding."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=None,
        eos_token_id=1,
        initializer_range=0.3,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return _with_random_biases(GPT2LMHeadModel(config))


def bloom() -> PreTrainedModel:
    """Return a model with padded rows, and with biases on all linear layers and on LayerNorm."""
    torch.manual_seed(0)
    return _with_random_biases(BloomForCausalLM(BloomConfig(**_SIZES, n_layer=2, n_head=4)))


def mamba() -> PreTrainedModel:
    """Return a model with padded rows, whose only biases are those of convolutions and of projections that get no
    adapter."""
    torch.manual_seed(0)
    return MambaForCausalLM(MambaConfig(**_SIZES, state_size=8)).eval()
