"""Output heads and token embeddings, trained by low-rank matrices and whole: in PEFT, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import SIZES, build_tiny
from peft import PeftModel
from peft_adapters import edit_config, logits_of, save_with_peft, write_random
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM

from alto.backbone import Backbone
from alto.errors import SpecError, TargetModuleError, UnsupportedError
from alto.evaluation import PeftCheck
from alto.executor import model_notes
from alto.kernels import TokenSchedule
from alto.lora import (
    AdapterBank,
    AdapterShape,
    BankLayout,
    ExtraTensor,
    adapter_shape,
    heads,
    initial_values,
    inject,
    read_saved_adapter,
)
from alto.lora import shape as lora_shape
from alto.records import LabelSet
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
    return float((found - expected).detach().double().norm() / expected.detach().double().norm()) <= tolerance


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("trained", TRAINED.values(), ids=TRAINED)
class TestInPeft:
    """Gemma 3's head is its embeddings, which it scales."""

    @torch.no_grad()
    def test_an_export_has_altos_logits_there_merged_too(
        self, name: str, trained: dict[str, Any], tmp_path: Path
    ) -> None:
        write_random(build_tiny(name), tmp_path, JobConfig(r=4, lora_alpha=8, **trained))
        found = logits_of(Backbone(build_tiny(name), None, "tiny"), IDS, tmp_path)
        assert not near(found, build_tiny(name)(input_ids=IDS).logits, 0.05), "the adapter changes the logits"
        assert near(found, PeftModel.from_pretrained(build_tiny(name), tmp_path).eval()(input_ids=IDS).logits)
        base: Any = build_tiny(name)
        if name == "gemma3" and "modules_to_save" not in trained:
            # A weight that is used twice cannot be merged for one use only.
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


BOTH = ["embed_tokens", "lm_head"]


def written(folder: Path) -> None:
    config = JobConfig(r=4, lora_alpha=8, target_modules=["v_proj"], modules_to_save=BOTH)
    write_random(build_tiny("llama"), folder, config)


@torch.no_grad()
def test_adapters_with_and_without_them_act_side_by_side(tmp_path: Path) -> None:
    written(tmp_path / "whole")
    save_with_peft(build_tiny("llama"), tmp_path / "plain")
    for folders in ([tmp_path / "whole", tmp_path / "plain"], [None, tmp_path / "whole"]):
        found = logits_of(Backbone(build_tiny("llama"), None, "tiny"), IDS, *folders)
        for row, folder in enumerate(folders):
            model: Any = build_tiny("llama")
            model = model if folder is None else PeftModel.from_pretrained(model, folder).eval()
            assert near(found[row], model(input_ids=IDS[row][None]).logits[0])


def test_the_description_names_them_in_full(tmp_path: Path) -> None:
    written(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["model.embed_tokens", "lm_head"]
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert {key for key in tensors if ".lora_" not in key} == {
        "base_model.model.lm_head.weight",
        "base_model.model.model.embed_tokens.weight",
    }


def test_padded_rows_read_their_own_table() -> None:
    """A model that computes a padded row per sequence."""
    torch.manual_seed(0)
    backbone = Backbone(MambaForCausalLM(MambaConfig(**SIZES, state_size=8)).eval(), None, "tiny")
    assert backbone.is_padded
    extra = ExtraTensor(name="backbone.embeddings.weight", shape=(97, 32))
    initial = initial_values(backbone.model, [extra])
    bank = AdapterBank(BankLayout(modules=(), max_rank=0, extras=(extra,)), 2, initial=initial)
    context = inject(backbone.model, bank, backbone.rows_in_pass)
    bank.occupy(0, AdapterShape(rank=0, targets=(), extras=(extra,)))
    bank.occupy(1, AdapterShape(rank=0, targets=()))
    bank.initialise(0, 0)
    ids = torch.randint(2, 90, (16,), generator=torch.Generator().manual_seed(1))
    lengths = [5, 2, 9]
    positions = torch.cat([torch.arange(length) for length in lengths])
    bare = backbone.hidden_states(ids, positions, lengths).detach()
    schedule = TokenSchedule.build([0, 1], [7, 9], [1.0, 1.0])
    with context.use(schedule):
        assert torch.equal(backbone.hidden_states(ids, positions, lengths), bare), "it begins with the frozen one"
    bank.params_ZP[0].mul_(1.5)
    with context.use(schedule):
        found = backbone.hidden_states(ids, positions, lengths)
        found.sum().backward()
    assert not near(found[:7], bare[:7], 1e-2)
    assert torch.equal(found[7:], bare[7:])
    (gradient_VH,) = bank.read(0, bank.grads_ZP).extras.values()
    assert set(gradient_VH.any(1).nonzero().flatten().tolist()) == set(ids[:7].tolist()) - {0}


class TestRefused:
    @pytest.mark.parametrize(
        ("settings", "error", "message"),
        [
            ({"modules_to_save": ["norm"]}, UnsupportedError, "found 'norm', which is model.norm, a LlamaRMSNorm"),
            ({"modules_to_save": ["q_proj"]}, UnsupportedError, "a Linear; ALTO cannot train this module in full"),
            ({"modules_to_save": ["wte"]}, TargetModuleError, "none under 'wte'; use model.embed_tokens or lm"),
            (
                {"modules_to_save": ["lm_head"], "target_modules": ["lm_head"]},
                TargetModuleError,
                "found lm_head, which is also in target_modules",
            ),
        ],
    )
    def test_other_modules(self, settings: dict[str, Any], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=f"^modules_to_save: .*{message}"):
            adapter_shape(build_tiny("llama"), JobConfig(**settings))

    def test_a_head_with_a_bias(self) -> None:
        with pytest.raises(UnsupportedError, match=r"expected model\.embed_tokens, found 'lm_head'"):
            adapter_shape(build_tiny("phi"), JobConfig(modules_to_save=["lm_head"]))

    def test_a_classifiers_head_is_another(self) -> None:
        labels = LabelSet(problem_type="single_label_classification", names=("a", "b"))
        with pytest.raises(UnsupportedError, match="which a classification head replaces"):
            adapter_shape(build_tiny("llama"), JobConfig(modules_to_save=["lm_head"]), labels)
        shape = adapter_shape(build_tiny("llama"), JobConfig(modules_to_save=["embed_tokens"]), labels)
        assert [extra.name for extra in shape.extras] == ["model.embed_tokens.weight", "score.weight"]

    @pytest.mark.parametrize("settings", [{"modules_to_save": BOTH}, {"target_modules": BOTH}])
    def test_a_base_that_is_sharded_over_gpus(self, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (lora_shape, heads):  # as with FSDP
            monkeypatch.setattr(module, "DTensor", torch.nn.Parameter)
        with pytest.raises(UnsupportedError, match="num_gpus"):
            adapter_shape(build_tiny("llama"), JobConfig(**settings))

    @pytest.mark.parametrize("names", [r".*(head|embed).*", ["lm_head", "lm_head"], 3])
    def test_what_is_no_list_of_names(self, names: Any) -> None:
        with pytest.raises(SpecError, match=r"^modules_to_save"):
            JobConfig(modules_to_save=names)

    def test_a_folder_without_the_weight_that_it_names(self, tmp_path: Path) -> None:
        save_with_peft(build_tiny("llama"), tmp_path)
        edit_config(tmp_path, modules_to_save=["lm_head"])
        with pytest.raises(UnsupportedError, match="modules_to_save, found none for lm_head"):
            read_saved_adapter(tmp_path)

    def test_what_peft_saved_of_other_modules(self, tmp_path: Path) -> None:
        save_with_peft(build_tiny("llama"), tmp_path, modules_to_save=["model.norm"])
        with pytest.raises(TargetModuleError, match=r"found model\.norm\.weight"):
            logits_of(Backbone(build_tiny("llama"), None, "tiny"), IDS, tmp_path)


@pytest.mark.parametrize("key", ["modules_to_save", "additional_target", "lora_modules_to_save"])
def test_it_is_written_as_elsewhere_too(key: str) -> None:
    assert JobConfig(**{key: ["lm_head", "embed_tokens"]}).modules_to_save == ("embed_tokens", "lm_head")
    assert JobConfig(**{key: "lm_head"}).modules_to_save == ("lm_head",)
    assert JobConfig(**{key: []}).modules_to_save is None


def test_tied_weights_come_with_a_note() -> None:
    (note,) = model_notes(build_tiny("smollm"), [JobConfig(modules_to_save=["lm_head"])], "sft")
    assert note.startswith("The output head and the embeddings of the base model are one weight")
    assert note.endswith("After a merge with PEFT, they are two weights.")
    assert model_notes(build_tiny("llama"), [JobConfig(modules_to_save=["lm_head"])], "sft") == ()
