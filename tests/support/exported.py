"""Bases and adapters of every kind, for tests of exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from moe_models import build_mixture
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import load_tokenizer, random_llama
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

IDS = torch.tensor([[3, 5, 8, 13, 21, 34, 55, 2, 7, 100, 9]])
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def _gpt2(num_tokens: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=num_tokens, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=None)
    return GPT2LMHeadModel(config)


def _qwen2(num_tokens: int) -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=num_tokens, tie_word_embeddings=False, **SIZES))


MODELS: dict[str, Callable[[int], PreTrainedModel]] = {
    "llama": random_llama,
    "gpt2": _gpt2,
    "qwen2": _qwen2,
    "mixtral": lambda num_tokens: build_mixture("mixtral", vocab_size=num_tokens, max_position_embeddings=128),
}


def save_base(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    """Save a random model and its tokenizer; biases and norms are random too."""
    tokenizer = load_tokenizer()
    model = MODELS[name](len(tokenizer))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_adapter(base: Path, folder: Path, **changes: Any) -> Path:
    """Save an adapter with PEFT, with noise on all of its trained tensors."""
    settings = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]} | changes
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(**settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    return model.eval()(input_ids=IDS).logits.float()


def base_logits(base: Path) -> Tensor:
    return logits_of(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))


def adapter_logits(base: Path, adapter: Path) -> Tensor:
    """Return the logits that PEFT computes with the adapter on its base, in float32."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return logits_of(PeftModel.from_pretrained(model, adapter))


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
