"""Adapters of experts written for vLLM: each expert's own matrices give the logits that PEFT gives."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_models import MODELS, config_of, random_adapter
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from alto.errors import UnsupportedError
from alto.lora import read_saved_adapter, write_per_expert

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

IDS = torch.tensor([[3, 5, 8, 13, 21, 34, 55, 2]])
RANK, ALPHA = 3, 6.0
LEAVES = {"mixtral": ("w1", "w3", "w2")}
PER_EXPERT = [name for name in MODELS if name != "gpt-oss"]


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def merged(model: PreTrainedModel, folder: Path, leaves: tuple[str, str, str]) -> PreTrainedModel:
    """Return ``model`` with the matrices in ``folder`` added to the weights that they name in its checkpoint, as vLLM
    stacks them (``PackedLoRALayerWeights.pack_moe``)."""
    tensors = load_file(folder / "adapter_model.safetensors")
    description = json.loads((folder / "adapter_config.json").read_text())
    scale = description["lora_alpha"] / description["r"]
    model = copy.deepcopy(model)
    weights = dict(model.named_parameters())
    gate, up, down = leaves
    seen = set()
    for key in [key for key in tensors if key.endswith(".lora_A.weight")]:
        delta = scale * tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight").replace("block_sparse_moe", "mlp")
        expert = re.fullmatch(rf"(.*\.experts)\.(\d+)\.({gate}|{up}|{down})", name)
        with torch.no_grad():
            if expert is None:
                weights[f"{name}.weight"] += delta
                continue
            owner, number, leaf = expert[1], int(expert[2]), expert[3]
            seen.add((owner, number, leaf))
            stacked = weights[f"{owner}.{'down_proj' if leaf == down else 'gate_up_proj'}"][number]
            half = stacked.shape[0] // 2
            place = stacked if leaf == down else stacked[:half] if leaf == gate else stacked[half:]
            place += delta
    owners = {owner for owner, _, _ in seen}
    assert seen == {(owner, number, leaf) for owner in owners for number in range(4) for leaf in leaves}
    return model


@pytest.mark.parametrize("which", ["all", "gate_up_proj", "down_proj"])
@pytest.mark.parametrize("name", PER_EXPERT)
def test_matrices_of_every_expert_give_the_logits_of_peft(name: str, which: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    config = config_of(model, RANK, ALPHA / RANK)
    if which != "all":
        parameters = [target for target in config.target_parameters or () if target.endswith(which)]
        config = config.replace(target_parameters=parameters)
    folder = random_adapter(model, tmp_path / "adapter", config)
    write_per_expert(read_saved_adapter(folder), model.config.model_type, tmp_path / "vllm")
    expected = logits(PeftModel.from_pretrained(copy.deepcopy(model), str(folder)))
    found = logits(merged(model, tmp_path / "vllm", LEAVES.get(name, ("gate_proj", "up_proj", "down_proj"))))
    assert (expected - logits(model)).norm() / expected.norm() > 1e-2
    assert (found - expected).norm() / expected.norm() < 1e-5
    description = json.loads((tmp_path / "vllm" / "adapter_config.json").read_text())
    assert "target_parameters" not in description
    assert (description["r"], description["lora_alpha"]) == (RANK, ALPHA)
    keys = load_file(tmp_path / "vllm" / "adapter_model.safetensors")
    assert set(description["target_modules"]) == {key.split(".lora_")[0].rpartition(".")[2] for key in keys}
    block = "block_sparse_moe" if name == "mixtral" else "mlp"
    assert any(f".{block}.experts.3." in key for key in keys)


@pytest.mark.parametrize("name", MODELS)
def test_the_usual_export_is_what_vllm_reads_where_experts_are_stacked(name: str, tmp_path: Path) -> None:
    """vLLM's reshapes of PEFT's file (``LoRAModelManager._stack_moe_lora_weights``) give every expert's product."""
    model = MODELS[name]()
    folder = random_adapter(model, tmp_path, config_of(model, RANK, ALPHA / RANK))
    tensors, weights = load_file(folder / "adapter_model.safetensors"), read_saved_adapter(folder).weights
    owners = {target.rpartition(".")[0] for target in weights if target.endswith(".gate_up_proj")}
    assert owners
    for owner in owners:
        for wrapper, key in ((f"{owner}.base_layer", "gate_up_proj"), (owner, "down_proj")):
            a, b = (tensors[f"base_model.model.{wrapper}.lora_{which}.weight"] for which in "AB")
            a_ERK = a.reshape(4, -1, a.shape[-1])
            b_ENR = b.reshape(b.shape[0], -1, 4).permute(2, 0, 1)
            a_EKR, b_ERN = weights[f"{owner}.{key}"]
            torch.testing.assert_close(b_ENR @ a_ERK, (a_EKR @ b_ERN).transpose(1, 2))


class TestRefusals:
    def refused(self, name: str, tmp_path: Path, message: str, **changes: Any) -> None:
        model = MODELS[name]()
        folder = random_adapter(model, tmp_path / "adapter", config_of(model, RANK, 2.0).replace(**changes))
        with pytest.raises(UnsupportedError, match=message):
            write_per_expert(read_saved_adapter(folder), model.config.model_type, tmp_path / "vllm")
        assert not (tmp_path / "vllm").exists()

    def test_an_adapter_without_experts(self, tmp_path: Path) -> None:
        self.refused("mixtral", tmp_path, "found none; serve the folder as it is", target_parameters=None)

    def test_a_model_whose_checkpoint_has_its_experts_stacked(self, tmp_path: Path) -> None:
        self.refused("gpt-oss", tmp_path, "found model type 'gpt_oss'; serve the folder as it is")
