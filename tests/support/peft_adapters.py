"""Adapters on disk, as PEFT writes them, and with random values as ALTO writes them, for tests that compare the two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.evaluation.target import loaded_adapters
from alto.lora import AdapterWeights, ModuleNames, adapter_shape, read_saved_adapter, write_adapter
from alto.records import LabelSet
from alto.spec import JobConfig

PLAIN: dict[str, Any] = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def save_with_peft(model: PreTrainedModel, folder: Path, *, seed: int = 1, **changes: Any) -> Path:
    """Save a random adapter, with both of its matrices far from zero, and its vectors far from those of the base. This
    changes ``model``."""
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(**(PLAIN | {"init_lora_weights": False} | changes)))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad and parameter.ndim == 1:  # biases and magnitudes
                parameter.mul_(1 + torch.rand_like(parameter))
    adapted.save_pretrained(folder)
    # With init_lora_weights False PEFT would redraw the weights before it reads them; the read weights are equal.
    edit_config(folder, init_lora_weights=True)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of the folder's adapter_config.json."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_random(
    model: PreTrainedModel, folder: Path, config: JobConfig, labels: LabelSet | None = None, *, divisor: float = 6.0
) -> AdapterWeights:
    """Write an adapter of ``config`` whose matrices and extra tensors are normal draws over ``divisor``."""
    shape, generator = adapter_shape(model, config, labels), torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator) / divisor

    ranks = zip(shape.targets, shape.ranks, strict=True)
    weights = AdapterWeights(
        {module.name: (draw(module.in_features, rank), draw(rank, module.out_features)) for module, rank in ranks},
        {extra.name: draw(*extra.shape) for extra in shape.extras},
    )
    write_adapter(folder, weights, config, "some/base", ModuleNames.of(model))
    return weights


@torch.no_grad()
def logits_of(backbone: Backbone, ids: torch.Tensor, *folders: Path | None) -> torch.Tensor:
    """Return logits of the adapters in ``folders``, each on an equal number of rows of ``ids``; for None, those of the
    base."""
    adapters = [None if folder is None else read_saved_adapter(folder) for folder in folders]
    with (
        loaded_adapters(backbone, adapters, "tiny") as served,
        backbone.own_attention(),
        served.use(served.schedule([ids.numel() // len(folders)] * len(folders))),
    ):
        found: torch.Tensor = backbone.model(input_ids=ids, use_cache=False).logits
    return found
