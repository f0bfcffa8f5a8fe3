"""Reading and writing of adapters in PEFT's format (``adapter_config.json``, ``adapter_model.safetensors``), without
depending on PEFT.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from alto.lora.heads import HEAD, whole_weights
from alto.lora.layout import AdapterWeights
from alto.lora.peft_targets import ModuleNames, PeftTargets, expert_names_of, peft_targets, wrapper_names
from alto.spec import JobConfig

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
ENDINGS = (".lora_A.weight", ".lora_B.weight")
"""Endings of PEFT's names for the two matrices of a linear layer."""

EMBEDDING_ENDINGS = (".lora_embedding_A", ".lora_embedding_B")
"""Endings of PEFT's names for the two matrices of embeddings."""

PREFIX = "base_model.model."
"""Prefix that PEFT adds to the names of the base model's modules."""

_OF_THE_BASE = ("bias",)
"""Parameters of an adapted module that belong to its base layer, if they are trained."""


def lora_scale(r: int, lora_alpha: float, *, use_rslora: bool) -> float:
    """Return the scale of an adapter's output: ``lora_alpha / r``, or ``lora_alpha / √r`` with ``use_rslora``."""
    return lora_alpha / (math.sqrt(r) if use_rslora else r)


def adapter_scale(config: JobConfig) -> float:
    """Return :func:`lora_scale` of the adapter that a job trains."""
    return lora_scale(config.r, config.lora_alpha, use_rslora=config.use_rslora)


def module_of(name: str) -> str:
    """Return the base model's name of the module that PEFT calls ``name``."""
    return name.removeprefix(PREFIX)


def write_adapter(
    folder: Path, weights: AdapterWeights, config: JobConfig, base_model: str, model: ModuleNames
) -> None:
    """Write one adapter so that ``peft.PeftModel.from_pretrained(base, folder)`` can load it.

    Args:
        folder: Created if absent; files of an earlier adapter are replaced.
        base_model: The argument of ``from_pretrained`` for the base model.
        model: Names of the base model's modules, to name the targets so that PEFT finds them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a_RK, b_NR) in as_in_peft(weights).items():
        of_a, of_b = EMBEDDING_ENDINGS if name in model.embeddings else ENDINGS
        tensors[f"{PREFIX}{name}{of_a}"] = a_RK
        tensors[f"{PREFIX}{name}{of_b}"] = b_NR
    for name, tensor in weights.extras.items():
        tensors[extra_in_peft(name, weights)] = tensor
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    description = _adapter_config(
        config,
        base_model,
        peft_targets(weights, model, experts=weights.experts),
        is_transposed=not model.transposed.isdisjoint(weights),
        has_head=HEAD in weights.extras,
        whole=whole_weights(weights.extras),
    )
    (folder / CONFIG_FILE).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def as_in_peft(weights: AdapterWeights) -> dict[str, tuple[Tensor, Tensor]]:
    """Return ``A`` as ``[r, K]`` and ``B`` as ``[N, r]`` by PEFT's module name, without PEFT's prefix.

    For ``E`` experts in one parameter, the rows of ``A`` are ordered by expert, ``[E · r, K]``, and the columns of
    ``B`` by rank, ``[N, r · E]`` (PEFT 0.21, ``ParamWrapper.get_delta_weight``).
    """
    names, found = wrapper_names(weights.experts), {}
    for name, (a, b) in weights.items():
        if name in names:
            found[names[name]] = (
                a.transpose(1, 2).flatten(0, 1).contiguous(),
                b.permute(2, 1, 0).flatten(1).contiguous(),
            )
        else:
            found[name] = (a.T.contiguous(), b.T.contiguous())
    return found


def read_adapter(folder: Path) -> AdapterWeights:
    """Return the weights that :func:`write_adapter` (or PEFT) wrote into ``folder``."""
    tensors = load_file(folder / WEIGHTS_FILE)
    description = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    rank, weights = description["r"], {}
    extras = {
        module_of(key).replace(".base_layer.", "."): tensor
        for key, tensor in tensors.items()
        if not key.endswith((*ENDINGS, *EMBEDDING_ENDINGS))
    }
    modules = {
        module_of(key.removesuffix(of_a)): (key, key.removesuffix(of_a) + of_b)
        for of_a, of_b in (ENDINGS, EMBEDDING_ENDINGS)
        for key in sorted(tensors)
        if key.endswith(of_a)
    }
    parameters = expert_names_of(modules, description.get("target_parameters") or ())
    for module, (of_a, of_b) in modules.items():
        a_RK, b_NR = tensors[of_a], tensors[of_b]
        if module in parameters:
            a_EKR = a_RK.view(-1, rank, a_RK.shape[1]).transpose(1, 2)
            weights[parameters[module]] = (
                a_EKR.contiguous(),
                b_NR.view(len(b_NR), rank, -1).permute(2, 1, 0).contiguous(),
            )
        else:
            weights[module] = (a_RK.T.contiguous(), b_NR.T.contiguous())
    return AdapterWeights(weights, extras)


def extra_in_peft(name: str, adapted: Collection[str]) -> str:
    """Return PEFT's full name of an extra tensor; a bias of an adapted module belongs to PEFT's ``base_layer``.

    Args:
        name: Name as in :class:`alto.lora.layout.ExtraTensor`.
        adapted: Names of the modules with matrices.
    """
    module, _, leaf = name.rpartition(".")
    return f"{PREFIX}{module}.base_layer.{leaf}" if module in adapted and leaf in _OF_THE_BASE else f"{PREFIX}{name}"


def _adapter_config(
    config: JobConfig,
    base_model: str,
    targets: PeftTargets,
    *,
    is_transposed: bool,
    has_head: bool,
    whole: list[str],
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if has_head else "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "target_modules": targets.modules,
        "bias": config.bias,
        "fan_in_fan_out": is_transposed,
        "init_lora_weights": True if config.init_lora_weights == "default" else config.init_lora_weights,
        "inference_mode": True,
    }
    for key in ("rank_pattern", "alpha_pattern"):
        if pattern := getattr(config, key):
            described[key] = dict(pattern)
    if has_head or whole:
        described["modules_to_save"] = [*whole, *([HEAD.removesuffix(".weight")] if has_head else [])]
    if targets.parameters:
        # PEFT refuses dropout together with target_parameters; dropout matters only in training.
        described |= {"target_parameters": targets.parameters, "lora_dropout": 0.0}
    return described


NUM_COMPARED = 16
"""Number of tokens whose logits are compared with those of PEFT."""


@contextmanager
def silent_peft() -> Iterator[None]:
    """Silence warnings of PEFT about tied or renamed weights, and of bitsandbytes, which it imports; results are
    compared instead."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def compared_logits(model: Callable[..., Any], vocabulary: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the logits of ``model`` for a few random tokens, in float32."""
    generator = torch.Generator().manual_seed(0)
    input_ids_1T = torch.randint(0, vocabulary, (1, NUM_COMPARED), generator=generator).to(device)
    logits: Tensor = model(input_ids=input_ids_1T, use_cache=False).logits[0]
    return logits.float()
