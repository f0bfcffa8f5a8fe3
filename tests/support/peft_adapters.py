"""Adapters as PEFT writes them, for tests that compare with PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

PLAIN: dict[str, Any] = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def save_with_peft(model: PreTrainedModel, folder: Path, *, seed: int = 1, **changes: Any) -> Path:
    """A random adapter, both of its matrices far from zero, and its vectors from those of the base; ``model`` is
    changed by it."""
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(**(PLAIN | {"init_lora_weights": False} | changes)))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad and parameter.ndim == 1:  # biases and magnitudes
                parameter.mul_(1 + torch.rand_like(parameter))
    adapted.save_pretrained(folder)
    # With init_lora_weights False PEFT would draw the weights again before it reads them; what it then reads is equal.
    edit_config(folder, init_lora_weights=True)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of the folder's adapter_config.json."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
