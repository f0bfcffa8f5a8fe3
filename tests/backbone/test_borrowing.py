"""A base model given as an object is unchanged when it is given back; a model that cannot be trained is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import load_tokenizer, random_llama
from torch import Tensor, nn
from transformers import PreTrainedModel

from alto.backbone import borrowed, load_backbone
from alto.errors import ModelError, RunBusyError, UnsupportedError
from alto.spec import BaseModelSpec
from alto.spec.base_model import BaseObjects

CPU = torch.device("cpu")
NAME = "<LlamaForCausalLM object>"


def make_objects(model: Any = None, tokenizer: Any = None) -> BaseObjects:
    tokenizer = load_tokenizer() if tokenizer is None else tokenizer
    model = random_llama(len(tokenizer)) if model is None else model
    return BaseObjects(model=model, tokenizer=tokenizer, name=NAME)


def facts_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return everything about a model that a user can see, except the values of its weights."""
    return {
        "modules": [(name, type(module), id(module), module.training) for name, module in model.named_modules()],
        "attributes": {
            name: {key: repr(value) for key, value in vars(module).items() if isinstance(value, int | float | str)}
            for name, module in model.named_modules()
        },
        "names": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "parameters": [
            (name, id(one), one.requires_grad, one.dtype, one.device, one.grad is None)
            for name, one in model.named_parameters()
        ],
        "hooks": [(len(one._forward_hooks), len(one._forward_pre_hooks)) for one in model.modules()],
        "config": model.config.to_dict() | {"attention": model.config._attn_implementation},
        "generation": model.generation_config.to_dict(),
    }


def numbers_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def logits_of(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(2, 14)[None]).logits


def change(objects: BaseObjects, *, fails: bool = False) -> None:
    """Change a model as training does; fail in the middle if ``fails``."""
    backbone = load_backbone(BaseModelSpec(id=NAME, objects=objects), gradient_checkpointing=True)
    model = backbone.model
    assert model is objects.model
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == "alto_varlen"
    model.set_submodule("model.layers.0.mlp.up_proj", nn.Identity())
    assert not model.get_input_embeddings()._forward_hooks, "no gradient of the inputs is computed"
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: None)
    if fails:
        raise KeyError("half-way")


def mode(model: PreTrainedModel, name: str) -> None:
    """Put the model into a state that a user may have it in."""
    match name:
        case "training":
            model.train()
        case "frozen":
            model.eval().requires_grad_(False)
        case "recomputed":
            model.train()
            model.activation_checkpointing_enable()
        case "some of it":
            model.eval()
            model.model.layers[0].train()
            model.lm_head.requires_grad_(False)
            model.model.layers[1].mlp.gate_proj.weight.grad = torch.ones_like(
                model.model.layers[1].mlp.gate_proj.weight
            )
            model.generation_config.max_length = 7


@pytest.mark.parametrize("state", ["training", "frozen", "some of it", "recomputed"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_it_was(state: str, fails: bool) -> None:
    objects = make_objects()
    model = objects.model
    mode(model, state)
    facts, numbers, logits = facts_of(model), numbers_of(model), logits_of(model)
    with pytest.raises(KeyError, match="half-way") if fails else nullcontext(), borrowed(objects, CPU):
        change(objects, fails=fails)
    assert facts_of(model) == facts
    assert all(torch.equal(numbers[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(logits_of(model), logits)


def test_a_hook_of_the_users_still_can_be_removed() -> None:
    objects, seen = make_objects(), []
    hook = objects.model.lm_head.register_forward_hook(lambda *_: seen.append(1))
    with borrowed(objects, CPU):
        change(objects)
    logits_of(objects.model)
    assert seen[-1:] == [1]
    hook.remove()
    count = len(seen)
    logits_of(objects.model)
    assert len(seen) == count


def test_the_tokenizer_is_not_changed() -> None:
    objects = make_objects()
    before = objects.tokenizer.chat_template
    with borrowed(objects, CPU):
        backbone = load_backbone(BaseModelSpec(id=NAME, objects=objects, chat_template="{{ messages }}"))
    assert backbone.tokenizer.chat_template == "{{ messages }}"
    assert objects.tokenizer.chat_template == before


def test_one_task_at_a_time() -> None:
    objects = make_objects()
    with borrowed(objects, CPU), pytest.raises(RunBusyError, match="no other task trains on"), borrowed(objects, CPU):
        pass
    with borrowed(objects, CPU):
        pass


def half_on_meta(model: PreTrainedModel) -> PreTrainedModel:
    model.model.layers[1].to("meta")
    return model


def quantised(model: PreTrainedModel) -> PreTrainedModel:
    model.config.quantization_config = {"load_in_4bit": True}
    return model


def dispatched(model: PreTrainedModel) -> PreTrainedModel:
    model.model._hf_hook = object()
    return model


def with_adapter(model: PreTrainedModel) -> Any:
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (with_adapter, UnsupportedError, r"modules of PEFT \(.*\) in .* give model.unload\(\)"),
        (lambda model: with_adapter(model).get_base_model(), UnsupportedError, "without adapters"),
        (half_on_meta, UnsupportedError, r"all weights on cpu, .* on cpu and meta; move it with model.to\('cpu'\)"),
        (quantised, UnsupportedError, "weights are not quantised"),
        (dispatched, UnsupportedError, "hooks of accelerate"),
        (lambda model: copy.copy(model.model.layers[0]), ModelError, "expected a transformers.PreTrainedModel"),
    ],
)
def test_what_cannot_be_trained_is_refused_and_left_alone(
    made: Callable[[PreTrainedModel], Any], error: type[Exception], message: str
) -> None:
    tokenizer = load_tokenizer()
    model = made(random_llama(len(tokenizer)))
    modules = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(error, match=message), borrowed(make_objects(model, tokenizer), CPU):
        raise AssertionError("it is refused before")
    assert [(name, type(module)) for name, module in model.named_modules()] == modules


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_that_was_removed_leaves_a_base_model() -> None:
    tokenizer = load_tokenizer()
    base = random_llama(len(tokenizer))
    unloaded = with_adapter(base).unload()
    with borrowed(make_objects(unloaded, tokenizer), CPU):
        change(make_objects(unloaded, tokenizer))


def test_another_tokenizer_is_refused() -> None:
    tokenizer = load_tokenizer()
    none, small = (
        make_objects(random_llama(len(tokenizer)), {}),
        make_objects(random_llama(len(tokenizer) - 1), tokenizer),
    )
    for objects, message in ((none, "expected a tokenizer of transformers, found dict"), (small, "resize_token_emb")):
        with pytest.raises(ModelError, match=message), borrowed(objects, CPU):
            pass
