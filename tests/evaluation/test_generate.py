"""Greedy completions: the argmax of every step, for each adapter the same as alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import SIZES
from peft import PeftModel
from peft_adapters import save_with_peft
from transformers import (
    GenerationConfig,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from alto.backbone import Backbone
from alto.errors import DataError, DeviceMemoryError
from alto.evaluation.generate import check_prompts, complete, max_positions
from alto.evaluation.key_value_cache import cache_argument
from alto.evaluation.target import loaded_adapters
from alto.lora import AdapterWeights, SavedAdapter, read_saved_adapter

# PEFT reads a transformers property by its deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ModelFactory = Callable[..., PreTrainedModel]
TOKENIZER = SimpleNamespace(eos_token_id=1, pad_token_id=0)
# The lengths differ much on purpose, in no order.
PROMPTS = [list(range(2, 2 + length)) for length in (9, 2, 23, 5, 14, 3, 30)]
ADAPTERS: tuple[dict[str, Any], ...] = (
    {"r": 2, "lora_alpha": 16},
    {"r": 8, "lora_alpha": 4, "use_rslora": True},
    {"r": 3, "target_modules": ["q_proj", "down_proj"]},
    {"r": 5, "lora_alpha": 40, "target_modules": ["o_proj"]},
)
WITH_VECTORS: tuple[dict[str, Any], ...] = (
    {"use_dora": True},
    {"r": 8, "bias": "all", "target_modules": ["q_proj", "down_proj"]},
    {"r": 2, "bias": "lora_only", "use_dora": True, "use_rslora": True},
    {"r": 5, "lora_alpha": 40, "target_modules": ["o_proj"]},
)


def completions(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    adapters: Sequence[SavedAdapter | None] = (None,),
    *,
    batch_size: int = 4,
    limit: int = 12,
) -> list[list[list[int]]]:
    done: list[int] = []
    with loaded_adapters(backbone, adapters, "tiny") as served:
        found = complete(backbone, served, prompts, max_new_tokens=limit, batch_size=batch_size, on_done=done.append)
    assert sum(done) == len(prompts) * len(adapters)
    return [[text.tokens for text in of_adapter] for of_adapter in found]


def base_completions(model: PreTrainedModel, prompts: Sequence[Sequence[int]], **settings: Any) -> list[list[int]]:
    return completions(Backbone(model, TOKENIZER, "tiny"), prompts, **settings)[0]


@torch.no_grad()
def argmax_by_hand(model: Any, prompt: Sequence[int], limit: int, ends: Sequence[int] = (1,)) -> list[int]:
    """Generate without a cache, without padding and without generate()."""
    ids = list(prompt)
    while len(ids) < len(prompt) + limit:
        token = int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        if token in ends:
            break
        ids.append(token)
    return ids[len(prompt) :]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mistral"])
def test_batches_give_what_every_prompt_gives_alone(tiny_model: ModelFactory, architecture: str) -> None:
    expected = [argmax_by_hand(tiny_model(architecture), prompt, 12) for prompt in PROMPTS]
    assert len({tuple(completion) for completion in expected}) > 3  # prompts change this model's answers
    backbone = Backbone(tiny_model(architecture), TOKENIZER, "tiny")
    for batch_size in (4, 1, 7):
        assert completions(backbone, PROMPTS, batch_size=batch_size) == [expected]


@pytest.mark.parametrize(
    ("architecture", "changes_of_each"), [("llama", ADAPTERS), ("mistral", ADAPTERS), ("llama-bias", WITH_VECTORS)]
)
def test_every_adapter_writes_what_peft_writes_with_it_alone(
    tiny_model: ModelFactory, tmp_path: Path, architecture: str, changes_of_each: Sequence[dict[str, Any]]
) -> None:
    folders = [
        save_with_peft(tiny_model(architecture), tmp_path / str(number), seed=number, **changes)
        for number, changes in enumerate(changes_of_each)
    ]
    expected = [
        [
            argmax_by_hand(PeftModel.from_pretrained(tiny_model(architecture), folder).eval(), prompt, 12)
            for prompt in PROMPTS[:4]
        ]
        for folder in folders
    ]
    expected.insert(2, [argmax_by_hand(tiny_model(architecture), prompt, 12) for prompt in PROMPTS[:4]])
    assert len({repr(of_adapter) for of_adapter in expected}) == 5  # adapters change the texts
    assert len({len(text) for of_adapter in expected for text in of_adapter}) > 1  # some end before others
    adapters: list[SavedAdapter | None] = [read_saved_adapter(folder) for folder in folders]
    adapters.insert(2, None)
    backbone = Backbone(tiny_model(architecture), TOKENIZER, "tiny")
    for batch_size in (20, 7, 2):  # with 2, most texts join one that another adapter writes
        assert completions(backbone, PROMPTS[:4], adapters, batch_size=batch_size) == expected


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.parametrize("is_padded", [False, True])
def test_an_adapter_on_the_output_head_writes_what_peft_writes(
    tiny_model: ModelFactory, tmp_path: Path, is_padded: bool
) -> None:
    def build() -> PreTrainedModel:
        torch.manual_seed(0)
        return MambaForCausalLM(MambaConfig(**SIZES, state_size=8)).eval() if is_padded else tiny_model("llama")

    targets = [["lm_head"], ["lm_head", "in_proj" if is_padded else "q_proj"]]
    folders = [
        save_with_peft(build(), tmp_path / str(seed), seed=seed, r=8, lora_alpha=80, target_modules=names)
        for seed, names in enumerate(targets)
    ]
    backbone = Backbone(build(), TOKENIZER, "tiny")
    assert backbone.is_padded == is_padded
    adapters: list[SavedAdapter | None] = [read_saved_adapter(folders[0]), None, read_saved_adapter(folders[1])]
    found = completions(backbone, PROMPTS[:3], adapters, limit=6)
    models = [PeftModel.from_pretrained(build(), folder).eval() for folder in folders]
    models.insert(1, build())
    expected = [[argmax_by_hand(model, prompt, 6) for prompt in PROMPTS[:3]] for model in models]
    assert len({repr(of_adapter) for of_adapter in expected}) == 3
    assert found == expected


def test_a_broken_adapter_changes_no_word_of_the_others(tiny_model: ModelFactory, tmp_path: Path) -> None:
    folders = [save_with_peft(tiny_model("llama"), tmp_path / str(seed), seed=seed) for seed in range(3)]
    adapters = [read_saved_adapter(folder) for folder in folders]
    backbone = Backbone(tiny_model("llama"), TOKENIZER, "tiny")
    expected = completions(backbone, PROMPTS, adapters, batch_size=21)
    weights = AdapterWeights({name: (a_KR * torch.nan, b_RN) for name, (a_KR, b_RN) in adapters[1].weights.items()})
    broken = [adapters[0], dataclasses.replace(adapters[1], weights=weights), adapters[2]]
    found = completions(backbone, PROMPTS, broken, batch_size=21)
    assert (found[0], found[2]) == (expected[0], expected[2])
    assert found[1] != expected[1]


def test_a_base_that_recomputes_its_layers_keeps_keys_and_values_all_the_same(tiny_model: ModelFactory) -> None:
    expected = base_completions(tiny_model("llama"), PROMPTS)
    backbone = Backbone(tiny_model("llama"), TOKENIZER, "tiny", gradient_checkpointing=True)
    training = [module for module in backbone.model.modules() if module.training]
    assert training
    assert completions(backbone, PROMPTS) == [expected]
    assert [module for module in backbone.model.modules() if module.training] == training


def test_a_token_that_ends_a_text_ends_it(tiny_model: ModelFactory) -> None:
    free = argmax_by_hand(tiny_model("llama"), PROMPTS[0], 12)
    end = free[3]
    assert end not in free[:3]
    expected = [argmax_by_hand(tiny_model("llama"), prompt, 12, (end, 1)) for prompt in PROMPTS]
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(eos_token_id=[end, 1])
    found = base_completions(model, PROMPTS)
    assert found[0] == free[:3]
    assert found == expected


def test_the_models_own_sampling_settings_do_not_count(tiny_model: ModelFactory) -> None:
    expected = base_completions(tiny_model("llama"), PROMPTS)
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=5.0, repetition_penalty=9.0, num_beams=3, eos_token_id=1, pad_token_id=0
    )
    assert base_completions(model, PROMPTS) == expected


def test_a_prompt_near_the_last_position_leaves_its_neighbours_their_length(tiny_model: ModelFactory) -> None:
    prompts = [*PROMPTS, list(range(2, 62))]  # of 64 positions
    found = base_completions(tiny_model("llama"), prompts, batch_size=8)
    assert found[:-1] == base_completions(tiny_model("llama"), PROMPTS)
    assert found[-1] == argmax_by_hand(tiny_model("llama"), prompts[-1], 4)
    assert len(found[-1]) == 4


def test_the_callback_may_end_the_generation(tiny_model: ModelFactory) -> None:
    backbone = Backbone(tiny_model("llama"), TOKENIZER, "tiny")

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), loaded_adapters(backbone, [None], "tiny") as served:
        complete(backbone, served, PROMPTS, max_new_tokens=12, batch_size=4, on_done=stop)
    assert completions(backbone, PROMPTS[:1]) == [[argmax_by_hand(tiny_model("llama"), PROMPTS[0], 12)]]


def test_a_prompt_without_a_position_to_write_to_is_an_error(tiny_model: ModelFactory) -> None:
    limit = max_positions(Backbone(tiny_model("llama"), TOKENIZER, "tiny"))
    with pytest.raises(DataError, match="shorter than 64 tokens, which this model can compute, found 64 in row 2"):
        check_prompts([[5], list(range(2, 66))], limit)
    check_prompts([[5], list(range(2, 65))], limit)
    check_prompts([list(range(2, 66))], None)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory, as the test wants it"), MemoryError()])
def test_where_memory_runs_out_fewer_are_written_at_a_time(tiny_model: ModelFactory, error: Exception) -> None:
    prompts = [*PROMPTS, list(range(2, 62))]  # the last one leaves 4 positions
    expected = base_completions(tiny_model("llama"), prompts)
    model, rows = tiny_model("llama"), []

    def refuse(_: Any, __: Any, settings: dict[str, Any]) -> None:
        """Refuse late, when the longest text is finished."""
        rows.append(len(settings["input_ids"]))
        if rows[-1] > 2 and 34 < settings["attention_mask"].shape[1] < 60:
            raise error

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    assert base_completions(model, prompts, batch_size=8) == expected
    assert max(rows) == 8
    assert max(rows[-20:]) <= 2


def test_one_text_that_does_not_fit_is_reported_as_too_large(tiny_model: ModelFactory) -> None:
    model = tiny_model("llama")

    def refuse(_: Any, __: Any, settings: dict[str, Any]) -> None:
        if cache_argument(model) in settings:
            raise torch.OutOfMemoryError("no memory, as the test wants it")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    backbone = Backbone(model, TOKENIZER, "tiny")
    message = "one answer of up to 12 tokens after a prompt of 30 tokens, found too little on cpu"
    with pytest.raises(DeviceMemoryError, match=message), loaded_adapters(backbone, [None], "tiny") as served:
        complete(backbone, served, PROMPTS, max_new_tokens=12, batch_size=4, on_done=lambda _: None)
