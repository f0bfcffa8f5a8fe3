"""``target_modules`` means the same as in PEFT, for every architecture and every form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from alto.errors import TargetModuleError
from alto.lora import AdapterBank, BankLayout, TargetModule, default_targets, find_targets, inject, linear_modules
from alto.lora.targets import DEFAULT_TARGETS
from alto.spec import JobConfig

# PEFT reads a transformers property by its deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LEAVES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ModelFactory = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def llama(tiny_model: ModelFactory) -> PreTrainedModel:
    return tiny_model("llama")


def names_of(found: tuple[TargetModule, ...]) -> list[str]:
    return [module.name for module in found]


def leaves(found: tuple[TargetModule, ...]) -> list[str]:
    return [name.rsplit(".", 1)[-1] for name in names_of(found)]


def chosen_by_peft(model: PreTrainedModel, target_modules: str | list[str] | None) -> list[str]:
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=target_modules, task_type="CAUSAL_LM"))
    return [
        name.removeprefix("base_model.model.") for name, module in peft.named_modules() if hasattr(module, "lora_A")
    ]


def test_all_linear_is_every_linear_module_but_the_head(llama: PreTrainedModel) -> None:
    found = find_targets(llama, "all-linear")
    assert found == linear_modules(llama)
    assert leaves(found) == LEAVES * 2
    sizes = {module.name.rsplit(".", 1)[-1]: (module.in_features, module.out_features) for module in found}
    assert (sizes["k_proj"], sizes["up_proj"], sizes["down_proj"]) == ((32, 16), (32, 48), (48, 32))


@pytest.mark.parametrize(
    "target_modules",
    [
        "all-linear",
        "ALL-LINEAR",
        ["q_proj", "v_proj"],
        ["self_attn.k_proj", "model.layers.1.mlp.up_proj"],
        r".*\.(q|v)_proj",
        r"model\.layers\.1\..*_proj",
        r".*[01]\.mlp\.(up|gate)_proj",
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "smollm3"])
def test_the_choice_is_pefts(tiny_model: ModelFactory, architecture: str, target_modules: str | list[str]) -> None:
    meant = JobConfig(target_modules=target_modules).target_modules
    found = names_of(find_targets(tiny_model(architecture), meant))
    assert found == chosen_by_peft(tiny_model(architecture), target_modules)


def test_defaults_are_those_of_peft() -> None:
    theirs = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    assert {kind: names if isinstance(names, str) else list(names) for kind, names in DEFAULT_TARGETS.items()} == theirs


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi", "gpt2"])
def test_the_default_is_pefts(tiny_model: ModelFactory, architecture: str) -> None:
    def build() -> PreTrainedModel:
        if architecture != "gpt2":
            return tiny_model(architecture)
        return GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=2, vocab_size=9, bos_token_id=0, eos_token_id=0))

    model = build()
    assert names_of(find_targets(model, default_targets(model.config.model_type))) == chosen_by_peft(build(), None)


def test_a_type_without_a_default_is_refused_as_peft_does(tiny_model: ModelFactory) -> None:
    with pytest.raises(ValueError, match="Please specify `target_modules`"):
        chosen_by_peft(tiny_model("phi3"), None)
    with pytest.raises(TargetModuleError, match=r"found 'phi3', which has none; name the modules in target_modules"):
        default_targets("phi3")
    assert default_targets("phi3", has_parameters=True) == ()


@pytest.mark.parametrize("target_modules", ["all-linear", ["dense", "fc1"], r".*(k|q)_proj", ["qkv_proj"]])
@pytest.mark.parametrize("architecture", ["phi", "phi3"])
def test_the_choice_is_pefts_where_modules_have_other_names(
    tiny_model: ModelFactory, architecture: str, target_modules: str | list[str]
) -> None:
    config = JobConfig(target_modules=target_modules)
    try:
        expected = chosen_by_peft(tiny_model(architecture), target_modules)
    except ValueError:  # PEFT found nothing
        with pytest.raises(TargetModuleError):
            find_targets(tiny_model(architecture), config.target_modules)
    else:
        assert names_of(find_targets(tiny_model(architecture), config.target_modules)) == expected


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["q_proj"], ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]),
        (["1.mlp.up_proj", "0.self_attn.v_proj"], ["model.layers.0.self_attn.v_proj", "model.layers.1.mlp.up_proj"]),
        (["v_proj", "model.layers.0.self_attn.v_proj"], [f"model.layers.{i}.self_attn.v_proj" for i in (0, 1)]),
        (r".*1\.self_attn\.[kv]_proj", [f"model.layers.1.self_attn.{x}_proj" for x in "kv"]),
    ],
)
def test_names_match_whole_or_from_a_dot_and_patterns_match_whole(
    llama: PreTrainedModel, names: str | list[str], found: list[str]
) -> None:
    assert names_of(find_targets(llama, names)) == found


@pytest.mark.parametrize("name", ["proj", "query", "layers.2.mlp.up_proj", "self_attn", "all_linear"])
def test_a_name_that_matches_nothing_is_answered_with_the_models_names(llama: PreTrainedModel, name: str) -> None:
    with pytest.raises(TargetModuleError) as caught:
        find_targets(llama, ["q_proj", name])
    assert repr(name) in str(caught.value)
    assert ", ".join(sorted(LEAVES)) in str(caught.value)
    assert "'model.layers.0.self_attn.q_proj'" in str(caught.value)
    assert "'all-linear'" in str(caught.value)


def test_a_misspelt_name_is_answered_with_the_nearest(llama: PreTrainedModel) -> None:
    with pytest.raises(TargetModuleError, match=r"found none under 'qproj'; did you mean 'q_proj'\?"):
        find_targets(llama, ["qproj"])


@pytest.mark.parametrize("pattern", ["_proj", r"model\.layers\.0\.self_attn\.q", r"layers\.0.*_proj", r"(q|v)_proj"])
def test_a_pattern_has_to_match_the_whole_name(llama: PreTrainedModel, pattern: str) -> None:
    with pytest.raises(TargetModuleError, match="found none under"):
        find_targets(llama, pattern)
    with pytest.raises(ValueError, match="not found"):
        chosen_by_peft(llama, pattern)


@pytest.mark.parametrize(
    ("meant", "also"),
    [
        (["q_proj", "norm"], "none under 'norm'"),
        (r".*(_proj|norm)", r"also matches 'model\.layers\.0\.input_layernorm', a LlamaRMSNorm"),
        (r".*self_attn.*", r"also matches 'model\.layers\.0\.self_attn', a LlamaAttention"),
    ],
)
def test_what_is_not_a_linear_module_is_refused(llama: PreTrainedModel, meant: str | list[str], also: str) -> None:
    with pytest.raises(TargetModuleError, match=also):
        find_targets(llama, meant)


def test_a_model_without_linear_modules_is_refused(tiny_model: ModelFactory) -> None:
    """An adapter on none of its modules would train nothing."""
    model = tiny_model("llama")
    for name in [module.name for module in linear_modules(model)]:
        model.set_submodule(name, torch.nn.Identity())
    for names in ("all-linear", ["q_proj"]):
        with pytest.raises(TargetModuleError, match="found none"):
            find_targets(model, names)


def test_injection_changes_no_choice(tiny_model: ModelFactory) -> None:
    model = tiny_model("llama")
    modules = linear_modules(model)
    choices = ("all-linear", ["up_proj"], r".*\.0\..*(q|down)_proj")
    before = [find_targets(model, choice) for choice in choices]
    inject(model, AdapterBank(BankLayout(modules=modules[::2], max_rank=2), 1))
    assert linear_modules(model) == modules
    assert [find_targets(model, choice) for choice in choices] == before
