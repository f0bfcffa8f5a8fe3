"""Output heads and token embeddings in PEFT, as adapters train them by low-rank matrices and whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build_tiny
from peft import PeftModel
from peft_adapters import logits_of, save_with_peft, write_random
from safetensors.torch import load_file, save_file
from torch import Tensor

from alto.backbone import Backbone
from alto.evaluation import PeftCheck
from alto.spec import JobConfig

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning"),
]

IDS = torch.tensor([[3, 5, 8, 13, 21], [34, 55, 89, 1, 2]])
TRAINED: dict[str, dict[str, Any]] = {
    "head": {"target_modules": ["v_proj", "lm_head"], "rank_pattern": {"lm_head": 3}},
    "embeddings": {"target_modules": ["embed_tokens"], "rank_pattern": {"embed_tokens": 3}},
    "both": {"target_modules": ["embed_tokens", "lm_head", "v_proj"], "rank_pattern": {"embed_tokens": 3}},
    "whole-head": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "whole-embeddings": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
    "both-whole": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


def near(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    return float((found - expected).double().norm() / expected.double().norm()) <= tolerance


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("trained", TRAINED.values(), ids=TRAINED)
class TestInPeft:
    """Gemma 3's head is its embeddings, which it multiplies."""

    @torch.no_grad()
    def test_an_export_has_altos_logits_there_merged_too(
        self, name: str, trained: dict[str, Any], tmp_path: Path
    ) -> None:
        write_random(build_tiny(name), tmp_path, JobConfig(r=4, lora_alpha=8, **trained))
        found = logits_of(Backbone(build_tiny(name), None, "tiny"), IDS, tmp_path)
        assert not near(found, build_tiny(name)(input_ids=IDS).logits, 0.05), "the adapter matters"
        assert near(found, PeftModel.from_pretrained(build_tiny(name), tmp_path).eval()(input_ids=IDS).logits)
        base: Any = build_tiny(name)
        if name == "gemma3" and "modules_to_save" not in trained:
            # One weight cannot be merged into for one of its two uses.
            base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.clone())
            base.config.tie_word_embeddings = False
        merged = PeftModel.from_pretrained(base, tmp_path).merge_and_unload().eval()
        assert near(found, merged(input_ids=IDS).logits)

    def test_the_check_finds_it_equal_and_the_model_is_as_it_was(
        self, name: str, trained: dict[str, Any], tmp_path: Path
    ) -> None:
        backbone = Backbone(build_tiny(name), None, "tiny")
        write_random(backbone.model, tmp_path, JobConfig(r=4, lora_alpha=8, **trained))
        before = dict(backbone.model.named_modules())
        values = {key: value.clone() for key, value in backbone.model.state_dict().items()}
        found = PeftCheck(backbone)(tmp_path)
        assert (found.status, found.why) == ("equal", "")
        assert dict(backbone.model.named_modules()) == before
        assert all(torch.equal(value, values[key]) for key, value in backbone.model.state_dict().items())
        assert not any(parameter.requires_grad for parameter in backbone.model.parameters())

    @torch.no_grad()
    def test_what_peft_saves_is_read(self, name: str, trained: dict[str, Any], tmp_path: Path) -> None:
        save_with_peft(build_tiny(name), tmp_path, **trained)
        path = tmp_path / "adapter_model.safetensors"
        tensors = load_file(path)
        if "modules_to_save" in trained:  # begins with the values of the base
            moves = {key: tensor + 0.1 * torch.randn_like(tensor) for key, tensor in tensors.items()}
            save_file({key: tensor if ".lora_" in key else moves[key] for key, tensor in tensors.items()}, path)
        elif "embed_tokens" in trained["target_modules"]:
            assert "base_model.model.model.embed_tokens.base_layer.weight" in tensors, "PEFT saves the base's with it"
        expected = PeftModel.from_pretrained(build_tiny(name), tmp_path).eval()(input_ids=IDS).logits
        assert near(logits_of(Backbone(build_tiny(name), None, "tiny"), IDS, tmp_path), expected)
